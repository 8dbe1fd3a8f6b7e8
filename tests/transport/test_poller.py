"""Sockets whose peer is reset, gone or never there are reported on every event loop (uvloop loses resets)."""

from __future__ import annotations

import asyncio
import errno
import socket
import struct
from collections.abc import Callable, Coroutine

import pytest

from tests.harness import open_files, wait_until
from ucxkv.transport.address import TcpAddress
from ucxkv.transport.control import ControlConnection
from ucxkv.transport.control_server import ControlServer, connect
from ucxkv.transport.frames import pack_header
from ucxkv.transport.poller import Poller, connect_socket


def _uvloop() -> asyncio.AbstractEventLoop:
    return pytest.importorskip("uvloop").new_event_loop()


@pytest.fixture(params=[asyncio.new_event_loop, _uvloop], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Callable[[Coroutine[object, object, None]], None]:
    def go(coroutine: Coroutine[object, object, None]) -> None:
        with asyncio.Runner(loop_factory=request.param) as runner:
            runner.run(coroutine)

    return go


def reset(sock: socket.socket) -> None:
    """Close with a reset."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


@pytest.mark.parametrize("unread", [b"", b"unread"])
@pytest.mark.parametrize("answers", [False, True])
def test_a_reset_is_told(run, unread: bytes, answers: bool) -> None:
    """Method: 200 connections are reset, with and without bytes that were not read and answers that find nobody."""

    async def main() -> None:
        poller, before = Poller.of_loop(), open_files()
        with socket.create_server(("127.0.0.1", 0)) as listener:
            for _ in range(200):
                peer = socket.create_connection(listener.getsockname())
                sock, _ = listener.accept()
                sock.setblocking(False)
                ended, seen = asyncio.Event(), []

                def readable(sock=sock, seen=seen, ended=ended) -> None:
                    try:
                        seen.append(sock.recv(3))
                    except OSError:
                        seen.append(b"")
                    if not seen[-1]:
                        poller.remove(sock.fileno())
                        ended.set()

                poller.set_reader(sock.fileno(), readable)
                await asyncio.sleep(0)
                if unread:
                    peer.send(unread)
                reset(peer)
                if answers:
                    with pytest.raises(OSError):
                        for _ in range(3):
                            sock.send(b"answer")
                await asyncio.wait_for(ended.wait(), 20)
                sock.close()
        assert open_files() == before

    run(main())


def test_a_connection_whose_peer_resets_it_ends(run) -> None:
    """Method: clients ask, read nothing and reset; every connection of the server ends, and the next ones are served
    though they get the same descriptors.
    """

    async def main() -> None:
        def answer(connection: ControlConnection, message: object) -> None:
            connection.reply(message, 1, bytes(1000))

        server = await ControlServer.start([TcpAddress("127.0.0.1", 0)], answer)
        host, _, port = str(server.addresses[0]).rpartition(":")
        for _ in range(40):
            peers = [socket.create_connection((host, int(port))) for _ in range(8)]
            for peer in peers:
                for _ in range(4):
                    peer.send(pack_header(1, 1, 0, 1) + b"x")
            await asyncio.sleep(0.001)
            for peer in peers:
                peer.send(pack_header(1, 1, 0, 1) + b"x")
                reset(peer)
            await wait_until(lambda: not server.connections, "every connection has ended", 20)
        good = await connect(server.addresses[0])
        assert (await good.request(1, b"x"))[0] == 1
        await good.aclose()
        server.close()

    run(main())


def test_connecting_ends_in_a_connection_or_in_its_error(run) -> None:
    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            address = listener.getsockname()
            sock = socket.socket()
            sock.setblocking(False)
            await connect_socket(sock, address)
            assert sock.getpeername() == address
            sock.close()
        for family, where, expected in (
            (socket.AF_INET, address, errno.ECONNREFUSED),
            (socket.AF_UNIX, "\0nobody-is-there", errno.ECONNREFUSED),
        ):
            with socket.socket(family) as sock:
                sock.setblocking(False)
                with pytest.raises(OSError) as failure:
                    await asyncio.wait_for(connect_socket(sock, where), 20)
                assert failure.value.errno == expected

    run(main())


def test_a_callback_that_fails_is_reported_and_the_others_are_called(run) -> None:
    async def main() -> None:
        poller, reported = Poller.of_loop(), []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context["exception"]))
        pairs = [socket.socketpair() for _ in range(2)]
        called = asyncio.Event()

        def bad() -> None:
            poller.remove(pairs[0][0].fileno())
            raise RuntimeError("bad")

        poller.set_reader(pairs[0][0].fileno(), bad)
        poller.set_reader(pairs[1][0].fileno(), called.set)
        for pair in pairs:
            pair[1].send(b"x")
        await asyncio.wait_for(called.wait(), 20)
        poller.remove(pairs[1][0].fileno())
        assert [str(one) for one in reported] == ["bad"]
        for pair in pairs:
            for sock in pair:
                sock.close()

    run(main())
