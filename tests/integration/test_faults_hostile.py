"""Peers that send nonsense, leave half-way or reach for what is not theirs: the node lives, others notice nothing."""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncIterator, Iterator

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import ucxkv
from tests.conftest import blocks, keys
from tests.harness import NodeProcess, wait_until
from tests.messages import KINDS, messages, payloads
from tests.wire import RawPeer, hello
from ucxkv import PutStatus
from ucxkv.protocol import Message, encode
from ucxkv.protocol import messages as m
from ucxkv.transport.frames import pack_header

pytestmark = pytest.mark.faults


@pytest.fixture(scope="module")
def victim() -> Iterator[NodeProcess]:
    with NodeProcess("victim", host_bytes="32MiB", message_path=False) as node:
        yield node


@pytest.fixture
async def bystander(victim: NodeProcess) -> AsyncIterator[ucxkv.Client]:
    """A client that works before and after each attack; the node's counts must be as before."""
    async with ucxkv.connect(victim.address) as kv:
        k, b = keys(4), blocks(4, 10_000)
        assert (await kv.put_many(k, b, "chain")).ok
        async with kv.lease(k) as lease:
            yield kv
            into = np.zeros_like(b)
            assert (await kv.get_many(k, into)).hits == 4 and (into == b).all() and lease.valid
        kv._router.sole.putter.return_grants()
        left: dict[str, float] = {}
        try:
            await wait_until(lambda: _is_quiet(kv, left), "all is gone")
        except AssertionError:
            pytest.fail(f"sessions, grants and leases are left: {left}")
        await kv.delete(k)


async def _is_quiet(kv: ucxkv.Client, left: dict[str, float]) -> bool:
    numbers = (await kv.status())[0].numbers
    names = ("connections", "granted_bytes", "quarantined_bytes", "leases", "writing", "vanished_writers")
    left.update((name, numbers[name]) for name in names)
    return left["connections"] == 1 and not any(left[name] for name in names[1:])


def _open(node: NodeProcess, role: str = "client") -> RawPeer:
    peer = RawPeer(node.address)
    peer.open(role)
    return peer


# ---- nonsense


@pytest.mark.parametrize("is_open", [False, True])
async def test_frames_that_break_the_rules_end_their_connection_only(
    victim: NodeProcess, bystander: ucxkv.Client, is_open: bool
) -> None:
    """Goal: a wrong frame is the end of one connection. Method: lengths, flags, types, cuts, other protocols."""
    frames = (
        pack_header(1 << 31, 2, 0, 1),
        pack_header((1 << 32) - 1, 2, 0, 1) + bytes(100),
        pack_header(0, 2, 0x0002, 1),
        pack_header(0, 2, 0x0300, 1),
        pack_header(0, 60_000, 0, 1),
        pack_header(3, 26, 0, 1) + b"abc",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        os.urandom(5000),
        b"\x16\x03\x01\xff\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),
    )
    for raw in frames:
        with _open(victim) if is_open else RawPeer(victim.address) as peer:
            peer.socket.sendall(raw)
            assert peer.is_ended(), raw[:20]
    for cut in range(0, 40, 3):  # whole frames are answered, a cut one is let go with its connection
        with RawPeer(victim.address) as peer:
            payload = encode(hello())
            peer.socket.sendall((pack_header(len(payload), m.Hello.CODE, 0, 1) + payload)[:cut])


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(batch=st.lists(payloads(), min_size=1, max_size=30), role=st.sampled_from(["client", "node", ""]))
def test_no_payload_of_any_type_kills_the_node(victim: NodeProcess, batch: list[tuple[int, bytes]], role: str) -> None:
    """Goal: nothing a peer says ends more than its connection. Method: thousands of good and spoilt payloads."""
    with RawPeer(victim.address) as peer:
        if role:
            peer.open(role)
        try:
            for code, payload in batch:
                peer.send(code, payload)
        except OSError:
            pass  # it ended the connection: its right
    with _open(victim) as peer:
        assert isinstance(peer.ask(m.GetStatus()), m.NodeReport)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(batch=st.lists(messages(), min_size=1, max_size=20), role=st.sampled_from(["client", "node"]))
@example(batch=[m.Warm(b"", 0), m.Warm(b"", 1000)], role="client")
def test_every_well_formed_request_is_answered_or_refused(victim: NodeProcess, batch: list[Message], role: str) -> None:
    """Goal: no request is forgotten or ends in a traceback. Method: any values; the log is searched afterwards."""
    unanswered = (
        m.ChosenPath,
        m.Touch,
        m.Release,
        m.Return,
        m.Damaged,
        m.Surrender,
        m.Bye,
        m.Join,
        m.PutPart,
        m.OpenData,
        m.Replicate,
        m.Lacks,
    )
    with _open(victim, role) as peer:
        for message in batch:
            if isinstance(message, unanswered):
                peer.send(message.CODE, encode(message), request_id=0)
                if isinstance(message, m.Bye):
                    break
            else:
                assert peer.ask(message) is not None
    assert "Traceback" not in victim.log()


async def test_after_all_that_the_bystander_works(victim: NodeProcess, bystander: ucxkv.Client) -> None:
    """Goal: the tests before left nothing behind. Method: puts and gets as usual; counts are as before."""
    k, b = keys(50), blocks(50, 20_000)
    assert (await bystander.put_many(k, b)).ok
    into = np.zeros_like(b)
    assert (await bystander.get_many(k, into)).hits == 50 and (into == b).all()
    await bystander.delete(k)
    assert victim.process.poll() is None


async def test_a_peer_that_never_reads_is_not_buffered_for(victim: NodeProcess, bystander: ucxkv.Client) -> None:
    """Goal: a slow reader holds no memory of the node. Method: ask for long answers and read none of them."""
    many = keys(2000)
    await bystander.put_many(many, blocks(2000, 8))
    with RawPeer(victim.address, timeout_s=0.3) as peer:
        peer.open()
        peer.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        try:
            for _ in range(400):
                peer.send(m.ListKeys.CODE, encode(m.ListKeys(0, 10_000)))
            for _ in range(64):
                peer.send(m.Touch.CODE, encode(m.Touch(bytes(1 << 20))))
        except TimeoutError:
            pass  # the node stopped reading
        else:
            pytest.fail("the node went on reading")
        assert await bystander.put(keys(1)[0], b"v") is PutStatus.STORED
    await bystander.delete(many)


# ---- reaching for what is not theirs


async def test_a_put_that_names_extents_of_another_is_refused(victim: NodeProcess, bystander: ucxkv.Client) -> None:
    """Goal: an extent is used by its holder only. Method: another session's, a free one, one twice, one too long."""
    with _open(victim) as owner, _open(victim) as thief:
        granted = owner.ask(m.Grant(1000, 2))
        assert isinstance(granted, m.Granted) and len(granted.offsets) == 16
        mine = thief.ask(m.Grant(1000, 1))
        assert isinstance(mine, m.Granted)
        own = mine.offsets

        def put(peer: RawPeer, offsets: bytes, length: int = 1000, region: int = 0) -> Message | None:
            n = len(offsets) // 8
            return peer.ask(
                m.Put(
                    b"".join(keys(n)), bytes(16 * n), region.to_bytes(2, "little") * n, offsets,
                    length.to_bytes(4, "little") * n, bytes(8 * n),
                )
            )  # fmt: skip

        far = (1 << 63).to_bytes(8, "little")
        for offsets, length, region in (
            (granted.offsets[:8], 1000, 0), (far, 1000, 0), (own + own, 1000, 0), (own, mine.capacity + 1, 0),
            (own, 1 << 31, 0), (own, 1000, 1), (own + granted.offsets[8:], 1000, 0),
        ):  # fmt: skip
            refused = put(thief, offsets, length, region)
            assert isinstance(refused, m.Failure) and refused.kind == "StaleError", (length, region)
        thief.send(m.Return.CODE, encode(m.Return(bytes(4), granted.offsets)), request_id=0)
        for peer, offsets in ((owner, granted.offsets), (thief, own)):
            done = put(peer, offsets)
            assert isinstance(done, m.PutDone) and not any(done.status), "what it held was taken from it"
            again = put(peer, offsets)
            assert isinstance(again, m.Failure) and again.kind == "StaleError", "an extent was used twice"


async def test_a_lease_is_ended_by_its_holder_only(victim: NodeProcess, bystander: ucxkv.Client) -> None:
    """Goal: nobody pulls memory from under a reader. Method: guess lease numbers to release and renew."""
    (key,), value = keys(1), os.urandom(100_000)
    await bystander.put(key, value)
    view = await bystander.view(key)
    assert view is not None
    with _open(victim) as peer:
        for lease in range(2000):
            peer.send(m.Release.CODE, encode(m.Release(lease)), request_id=0)
        renewed = peer.ask(m.Renew(1, 60_000))
        assert isinstance(renewed, m.Done) and not renewed.ok
        assert isinstance(peer.ask(m.Delete(key)), m.Statuses)
    assert (await bystander.put_many(keys(50), blocks(50, 100_000))).ok
    assert view.valid and view.data == value
    await view.aclose()


async def test_a_false_report_of_damage_drops_nothing(victim: NodeProcess, bystander: ucxkv.Client) -> None:
    """Goal: the node believes its own sum only. Method: report good blocks and unknown keys as damaged."""
    k = keys(10)
    await bystander.put_many(k, blocks(10, 1000), "chain")
    with _open(victim) as peer:
        peer.send(m.Damaged.CODE, encode(m.Damaged(b"".join([*k, *keys(10)]))), request_id=0)
        peer.ask(m.GetStatus())
    assert (await bystander.match(k)).blocks == 10
    await bystander.delete(k)


async def test_clients_may_not_speak_as_nodes(victim: NodeProcess, bystander: ucxkv.Client) -> None:
    """Goal: roles. Method: every message between nodes, and every answer, from a client; false members from a node."""
    node_only = (m.Adopt(1, b"", b""), m.Surrender(b"", b""), m.Reclaim(1 << 40))
    member = m.MemberInfo(7, "mallory", "127.0.0.1:1", 1)
    with _open(victim) as peer:
        for message in (*node_only, m.Join(member), m.Members([member]), m.Done(), m.Granted(1, b"", b"")):
            refused = peer.ask(message)
            assert isinstance(refused, m.Failure) and refused.kind == "UsageError"
    bad = (
        m.MemberInfo(7, "mallory", "127.0.0.1:1", 1, float("inf")),
        m.MemberInfo(7, "mallory", "127.0.0.1:1", 1, -1.0),
        m.MemberInfo(7, "", "127.0.0.1:1", 1),
        m.MemberInfo(7, "mallory\n", "127.0.0.1:1", 1),
        m.MemberInfo(7, "mallory", "no address", 1),
        m.MemberInfo(7, "victim", "127.0.0.1:1", 1),
    )
    with _open(victim, "node") as peer:
        for one in bad:
            refused = peer.ask(m.Join(one))
            assert isinstance(refused, m.Failure), one
        adopted = peer.ask(m.Adopt(1, bytes(2), bytes(8)))
        assert isinstance(adopted, m.Failure), "extents went to a node that is not linked"
    assert [peer.name for peer in bystander.peers()] == ["victim"]


def test_every_message_type_is_in_the_attack() -> None:
    """Goal: a new message joins these tests by itself. Method: the strategies cover the codec's table."""
    assert all(messages() is not None and code == kind.CODE for code, kind in KINDS.items())
