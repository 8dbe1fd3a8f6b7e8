"""Control connections over TCP and Unix sockets: multiplexing, deadlines, descriptors, and every kind of ending."""

# ruff: noqa: ASYNC220, ASYNC222, ASYNC240
from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from ucxkv.transport.address import TcpAddress, UnixAddress
from ucxkv.transport.base import (
    Closed,
    DeadlineExceeded,
    PeerLost,
    ProtocolError,
    SetupFailed,
    UsageError,
    deadline_after,
)
from ucxkv.transport.control import ControlConnection
from ucxkv.transport.control_server import ControlServer, connect
from ucxkv.transport.frames import pack_header

ECHO, NEVER, LATER, FDS, FAIL, COUNT_FDS, BIG = 1, 2, 3, 4, 5, 6, 7


def handler(connection, message):
    """The test server: echoes, stays silent, answers late, sends or counts descriptors, fails."""
    if message.type == ECHO:
        connection.reply(message, ECHO, message.payload)
    elif message.type == LATER:
        asyncio.get_running_loop().call_later(0.05, connection.reply, message, LATER, message.payload)
    elif message.type == FDS:
        fd = os.open("/dev/null", os.O_RDONLY)
        connection.reply(message, FDS, b"", fds=[fd, fd])
        os.close(fd)
    elif message.type == COUNT_FDS:
        connection.reply(message, COUNT_FDS, bytes([message.fds_count]))
    elif message.type == BIG:
        connection.reply(message, BIG, bytes(int(message.payload)))
    elif message.type == FAIL:
        raise RuntimeError("handler bug")


@pytest.fixture(params=["tcp", "tcp6", "abstract", "path"])
async def server(request, tmp_path):
    """A server on each kind of address."""
    address = {
        "tcp": TcpAddress("127.0.0.1", 0),
        "tcp6": TcpAddress("::1", 0),
        "abstract": UnixAddress(f"ucxkv-control-{os.getpid()}"),
        "path": UnixAddress(str(tmp_path / "s"), False),
    }[request.param]
    if request.param == "tcp6" and not _has_ipv6():
        pytest.skip("this host has no IPv6 loopback")
    made = await ControlServer.start([address], handler)
    yield made
    made.close()


@pytest.fixture
async def unix_server():
    made = await ControlServer.start([UnixAddress(f"ucxkv-control-u-{os.getpid()}")], handler)
    yield made
    made.close()


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as sock:
            sock.bind(("::1", 0))
    except OSError:
        return False
    return True


def fds_count() -> int:
    return len(os.listdir("/proc/self/fd"))


async def until(condition, seconds=5.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "condition not reached"
        await asyncio.sleep(0.005)


async def test_a_thousand_requests_at_once_get_their_own_replies(server):
    """Goal: replies never cross. Method: 1,000 concurrent requests with distinct payloads, some answered late."""
    connection = await connect(server.addresses[0], deadline_ns=deadline_after(5))
    kinds = [LATER if i % 7 == 0 else ECHO for i in range(1000)]
    replies = await asyncio.gather(*[connection.request(k, b"%d" % i * 50) for i, k in enumerate(kinds)])
    assert replies == [(k, b"%d" % i * 50) for i, k in enumerate(kinds)]
    assert connection.pending_count == 0
    await connection.aclose()


async def test_frames_of_many_megabytes_pass_both_ways(server):
    """Goal: frames larger than every buffer. Method: echo 20 MB in one piece and in three."""
    connection = await connect(server.addresses[0])
    data = os.urandom(1 << 20) * 20
    assert (await connection.request(ECHO, data, deadline_after(30)))[1] == data
    pieces = [data[:10], memoryview(data)[10:1000], data[1000:]]
    assert (await connection.request(ECHO, pieces, deadline_after(30)))[1] == data
    connection.abort()


async def test_an_unanswered_request_ends_at_its_deadline_and_its_late_reply_answers_nobody(server):
    """Goal: no hang and no crossed reply. Method: a deadline before a late answer, then another request."""
    connection = await connect(server.addresses[0])
    with pytest.raises(DeadlineExceeded):
        await connection.request(NEVER, b"", deadline_after(0.02))
    with pytest.raises(DeadlineExceeded):
        await connection.request(LATER, b"old", deadline_after(0.01))
    assert (await connection.request(LATER, b"new", deadline_after(5)))[1] == b"new"
    assert connection.late_replies_count == 1 and connection.pending_count == 0
    connection.abort()


async def test_a_cancelled_request_leaves_the_connection_usable(server):
    """Goal: redis-py issue 2665 cannot happen here. Method: cancel while the reply is on its way, ask again."""
    connection = await connect(server.addresses[0])
    task = asyncio.create_task(connection.request(LATER, b"cancelled"))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await connection.request(LATER, b"next", deadline_after(5)))[1] == b"next"
    assert connection.late_replies_count == 1
    connection.abort()


async def test_the_servers_end_fails_every_pending_request_and_sets_closed(server):
    """Goal: the end of the stream is the death signal. Method: 50 pending requests, the server closes."""
    connection = await connect(server.addresses[0])
    told = []
    connection.on_closed(told.append)
    tasks = [asyncio.create_task(connection.request(NEVER)) for _ in range(50)]
    await until(lambda: connection.pending_count == 50)
    server.close()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(r, PeerLost) for r in results)
    assert connection.closed.is_set() and told == [connection] and not connection.is_open
    with pytest.raises(PeerLost):
        await connection.request(ECHO)


async def test_a_killed_process_is_noticed(tmp_path):
    """Goal: kill -9 of the peer ends the wait. Method: a server process that never answers, SIGKILL."""
    name = f"ucxkv-kill-{os.getpid()}"
    code = (
        "import asyncio,sys\n"
        "from ucxkv.transport import ControlServer, UnixAddress\n"
        "async def main():\n"
        f"    await ControlServer.start([UnixAddress({name!r})], lambda c, m: None)\n"
        "    print('ready', flush=True)\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    root = Path(__file__).resolve().parents[2]
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=root) as process:
        assert process.stdout is not None
        assert await asyncio.to_thread(process.stdout.readline) == b"ready\n"
        connection = await connect(UnixAddress(name))
        assert connection.peer_credentials is not None
        assert connection.peer_credentials.pid == process.pid and connection.peer_credentials.uid == os.getuid()
        task = asyncio.create_task(connection.request(NEVER, b"", deadline_after(30)))
        await asyncio.sleep(0.05)
        process.kill()
        with pytest.raises(PeerLost):
            await task


@pytest.mark.parametrize("big", [0, 300_000], ids=["small-answers", "answers-that-wait"])
async def test_what_a_peer_said_before_it_closed_is_handled_though_nobody_takes_the_answers(unix_server, big):
    """Goal: a goodbye is heard from a peer that asked and did not wait. Method: while the server sleeps: requests, a
    one-way last word, close; every message is handled, the connection ends, its descriptor is closed.
    """
    server, heard = unix_server, []
    server._handler = lambda connection, message: (heard.append(message.type), handler(connection, message))
    before = len(os.listdir("/proc/self/fd"))
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.connect(server.addresses[0].sockaddr)
        ask = str(big).encode() if big else b"x" * 100
        for request_id in range(1, 201):
            sock.sendall(pack_header(len(ask), BIG if big else ECHO, 0, request_id) + ask)
        sock.sendall(pack_header(0, NEVER, 0, 0))
        if big:
            await asyncio.sleep(0.05)  # the answers fill the socket, and the server reads no more
    for _ in range(500):
        if heard and not server.connections:
            break
        await asyncio.sleep(0.01)
    assert not server.connections and heard == [BIG if big else ECHO] * 200 + [NEVER]
    assert len(os.listdir("/proc/self/fd")) <= before


@pytest.mark.parametrize(
    ("sent", "error"),
    [
        (pack_header(100 << 20, 1, 0, 1), "limit"),
        (pack_header(10, 1, 0, 1) + b"abc", "inside a frame"),
        (b"\x01\x02", "inside a frame header"),
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "limit"),
        (pack_header(0, 1, 0x0200, 1), "claims 2 descriptors"),
        (os.urandom(1) + b"\xff" * 4000, "limit"),
    ],
)
async def test_malformed_streams_end_their_connection_and_nothing_else(server, sent, error):
    """Goal: garbage never kills a server. Method: each kind of garbage beside a healthy connection."""
    healthy = await connect(server.addresses[0])
    reader, writer = await _raw(server.addresses[0])
    writer.write(sent)
    writer.write_eof()
    await reader.read()
    writer.close()
    await until(lambda: len(server.connections) == 1)
    assert (await healthy.request(ECHO, b"fine", deadline_after(5)))[1] == b"fine"
    healthy.abort()


async def _raw(address):
    if isinstance(address, UnixAddress):
        return await asyncio.open_unix_connection(address.sockaddr)
    return await asyncio.open_connection(address.host, address.port)


async def test_the_reason_of_a_malformed_stream_is_kept():
    """Goal: the close reason says what was wrong. Method: both ends of a socket pair in one process."""
    for sent, text in ((pack_header(100 << 20, 1, 0, 1), "limit"), (pack_header(9, 1, 0, 1) + b"x", "1 of 9")):
        ours, theirs = socket.socketpair()
        connection = ControlConnection(ours, handler)
        theirs.sendall(sent)
        theirs.close()
        await asyncio.wait_for(connection.closed.wait(), 5)
        assert isinstance(connection.close_reason, ProtocolError) and text in str(connection.close_reason)


async def test_a_request_to_a_side_without_handler_ends_the_connection():
    """Goal: a client does not serve. Method: the other end asks."""
    ours, theirs = socket.socketpair()
    connection = ControlConnection(ours)
    theirs.sendall(pack_header(0, 5, 0, 1))
    await asyncio.wait_for(connection.closed.wait(), 5)
    assert isinstance(connection.close_reason, ProtocolError)
    theirs.close()


async def test_a_failing_handler_ends_its_connection_and_is_reported(unix_server):
    """Goal: a bug in a handler is loud and contained. Method: a handler that raises; the loop's handler records."""
    reported = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context["exception"]))
    bad = await connect(unix_server.addresses[0])
    with pytest.raises(PeerLost):
        await bad.request(FAIL, b"", deadline_after(5))
    assert [type(e) for e in reported] == [RuntimeError]
    good = await connect(unix_server.addresses[0])
    assert (await good.request(ECHO, b"x"))[1] == b"x"
    good.abort()


async def test_descriptors_travel_and_unclaimed_ones_are_closed(unix_server):
    """Goal: SCM_RIGHTS both ways without leaks. Method: count this process's descriptors around taken and untaken
    ones.
    """
    connection = await connect(unix_server.addresses[0])
    await connection.request(ECHO)
    before = fds_count()
    message = await connection.request_message(FDS)
    assert message.fds_count == 2
    fds = message.take_fds()
    assert all(os.fstat(fd).st_rdev == os.stat("/dev/null").st_rdev for fd in fds)
    assert not any(os.get_inheritable(fd) for fd in fds)
    for fd in fds:
        os.close(fd)
    await connection.request(FDS)  # nobody takes them
    (await connection.request_message(FDS)).close_fds()
    zero = os.open("/dev/zero", os.O_RDONLY)
    reply = await connection.request_message(COUNT_FDS, b"", fds=[zero] * 3)
    os.close(zero)
    assert reply.payload == b"\x03"
    assert fds_count() == before
    connection.abort()


async def test_descriptors_of_a_cancelled_request_are_closed(unix_server):
    """Goal: a reply nobody awaits leaks nothing. Method: cancel in the turn before the reply is read, many times."""
    connection = await connect(unix_server.addresses[0], inline_wait_us=0)
    await connection.request(ECHO)
    before = fds_count()
    for turns in range(20):
        task = asyncio.create_task(connection.request_message(FDS))
        for _ in range(turns % 5 + 1):
            await asyncio.sleep(0)
        task.cancel()
        try:
            (await task).close_fds()
        except asyncio.CancelledError:
            pass
    await connection.request(ECHO)
    assert fds_count() == before
    connection.abort()


async def test_descriptors_over_tcp_are_refused():
    """Goal: a clear error before anything is sent. Method: fds on a TCP connection."""
    server = await ControlServer.start([TcpAddress("127.0.0.1", 0)], handler)
    connection = await connect(server.addresses[0])
    with pytest.raises(UsageError, match="Unix"):
        await connection.request_message(ECHO, b"", fds=[0])
    assert (await connection.request(ECHO, b"still fine"))[1] == b"still fine"
    server.close()
    connection.abort()


async def test_a_peer_that_does_not_read_is_not_buffered_for_without_bound(unix_server):
    """Goal: the serving side stops reading a peer that takes no replies. Method: ask for 2,000 x 64 KiB, read
    nothing.
    """
    address = unix_server.addresses[0]
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(address.sockaddr)
    sock.setblocking(False)
    ask = b"".join(pack_header(5, BIG, 0, i + 1) + b"65536" for i in range(2000))
    sent = 0
    for _ in range(200):
        try:
            sent += sock.send(ask[sent:])
        except BlockingIOError:
            pass
        await asyncio.sleep(0.002)
        if sent == len(ask):
            break
    served = next(iter(unix_server.connections))
    assert served.unsent_bytes <= (1 << 20) + (256 << 10) // 17 * 65548  # high water, plus one receive buffer's answers
    sock.close()
    await until(lambda: not unix_server.connections)


async def test_payloads_over_the_limit_are_refused_before_sending(unix_server):
    """Goal: the caller's mistake is the caller's error. Method: a lazily zero payload of 64 MiB + 1."""
    connection = await connect(unix_server.addresses[0])
    with pytest.raises(UsageError, match="at most"):
        await connection.request(ECHO, bytes((64 << 20) + 1))
    assert (await connection.request(ECHO, b"x"))[1] == b"x"
    connection.abort()


async def test_closing_is_idempotent_and_later_use_says_closed(unix_server):
    """Goal: own close differs from the peer's. Method: close twice, then use; a pending request raises Closed."""
    connection = await connect(unix_server.addresses[0])
    task = asyncio.create_task(connection.request(NEVER))
    await until(lambda: connection.pending_count == 1)
    await connection.aclose()
    await connection.aclose()
    connection.abort()
    with pytest.raises(Closed):
        await task
    with pytest.raises(Closed):
        await connection.request(ECHO)
    with pytest.raises(Closed):
        connection.send(ECHO)


async def test_two_hundred_reconnects_leave_no_descriptor(unix_server):
    """Goal: no descriptor leak. Method: count before and after 200 connections with a request each."""
    (await connect(unix_server.addresses[0])).abort()
    await until(lambda: not unix_server.connections)
    before = fds_count()
    for _ in range(200):
        connection = await connect(unix_server.addresses[0])
        await connection.request(ECHO, b"x", deadline_after(5))
        connection.abort()
    await until(lambda: not unix_server.connections)
    assert fds_count() == before


async def test_a_port_in_use_is_a_setup_error_that_names_the_fix():
    """Goal: operators know what to do. Method: bind twice; also a left-over and a live Unix path."""
    server = await ControlServer.start([TcpAddress("127.0.0.1", 0)], handler)
    with pytest.raises(SetupFailed, match="choose another address"):
        await ControlServer.start([server.addresses[0]], handler)
    server.close()
    with tempfile.TemporaryDirectory() as folder:
        path = UnixAddress(f"{folder}/s", False)
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(path.name)  # a server that died without unlinking
        first = await ControlServer.start([path], handler)
        with pytest.raises(SetupFailed, match="another process"):
            await ControlServer.start([path], handler)
        (await connect(path)).abort()
        first.close()
        assert not os.path.exists(path.name)


async def test_nobody_listening_is_peer_lost_and_an_unknown_name_is_a_setup_error():
    """Goal: typed connect errors within the deadline. Method: a closed port, an abstract name, an invalid host."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    with pytest.raises(PeerLost, match="nobody answers"):
        await connect(TcpAddress("127.0.0.1", port), deadline_ns=deadline_after(5))
    with pytest.raises(PeerLost):
        await connect(UnixAddress("ucxkv-nobody-there"), deadline_ns=deadline_after(5))
    with pytest.raises((SetupFailed, DeadlineExceeded)):
        await connect(TcpAddress("no-such-host.invalid", 1), deadline_ns=deadline_after(5))


async def test_connections_over_the_bound_are_closed_at_once():
    """Goal: accepted connections are bounded. Method: a server for two gets three."""
    server = await ControlServer.start([UnixAddress(f"ucxkv-two-{os.getpid()}")], handler, max_connections=2)
    kept = [await connect(server.addresses[0]) for _ in range(2)]
    third = await connect(server.addresses[0])
    with pytest.raises(PeerLost):
        await third.request(ECHO, b"", deadline_after(5))
    assert server.refused_count == 1
    for connection in kept:
        assert (await connection.request(ECHO, b"x"))[1] == b"x"
    server.close()
    for connection in kept:
        connection.abort()


async def test_use_after_fork_is_refused_and_the_parent_goes_on(unix_server):
    """Goal: a forked child cannot corrupt the parent's stream. Method: os.fork, use in the child, exit code."""
    connection = await connect(unix_server.addresses[0])
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            connection.send(ECHO, b"from the child")
        except Closed:
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    assert (await connection.request(ECHO, b"parent", deadline_after(5)))[1] == b"parent"
    connection.abort()


async def test_a_client_can_be_asked_by_the_server_too():
    """Goal: both sides may ask over one connection. Method: the server's connection asks the client's handler."""
    made = []
    server = await ControlServer.start([UnixAddress(f"ucxkv-both-{os.getpid()}")], handler, on_connect=made.append)
    client = await connect(server.addresses[0], handler=handler)
    await client.request(ECHO)
    assert (await made[0].request(ECHO, b"to the client", deadline_after(5)))[1] == b"to the client"
    server.close()
    client.abort()


def test_it_all_works_under_uvloop():
    """Goal: uvloop as well as asyncio. Method: echo, descriptors, death of the peer under uvloop."""
    uvloop = pytest.importorskip("uvloop")

    async def main():
        server = await ControlServer.start(
            [UnixAddress(f"ucxkv-uv-{os.getpid()}"), TcpAddress("localhost", 0)], handler
        )
        for address in server.addresses:
            connection = await connect(address, deadline_ns=deadline_after(5))
            data = os.urandom(3 << 20)
            assert (await connection.request(ECHO, data, deadline_after(10)))[1] == data
            replies = await asyncio.gather(*[connection.request(ECHO, b"%d" % i) for i in range(200)])
            assert [p for _, p in replies] == [b"%d" % i for i in range(200)]
            if connection.is_unix:
                (await connection.request_message(FDS)).close_fds()
            with pytest.raises(DeadlineExceeded):
                await connection.request(NEVER, b"", deadline_after(0.02))
            await connection.aclose()
        last = await connect(server.addresses[0])
        task = asyncio.ensure_future(last.request(NEVER))
        await asyncio.sleep(0.01)
        server.close()
        with pytest.raises(PeerLost):
            await task

    uvloop.run(main())
