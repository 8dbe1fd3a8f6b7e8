"""The framing of control connections, without sockets."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ucxkv.transport.base import ProtocolError
from ucxkv.transport.frames import FLAG_REPLY, HEADER, FrameDecoder, pack_header

frames = st.lists(
    st.tuples(
        st.integers(0, 0xFFFF),
        st.sampled_from([0, FLAG_REPLY, 0x0300]),
        st.integers(0, 0xFFFFFFFF),
        st.one_of(st.binary(max_size=200), st.integers(0, 700_000).map(bytes)),
    ),
    max_size=8,
)


def feed(decoder: FrameDecoder, stream: bytes, steps: list[int]):
    """The frames that come out of a stream received in pieces of these sizes."""
    out = []
    at = index = 0
    while at < len(stream):
        buffer = decoder.buffer()
        step = min(len(buffer), len(stream) - at, steps[index % len(steps)])
        buffer[:step] = stream[at : at + step]
        decoder.received(step)
        at += step
        index += 1
        while (frame := decoder.next_frame()) is not None:
            out.append((*frame[:3], bytes(frame[3])))
    return out


@settings(deadline=None)
@given(frames, st.lists(st.sampled_from([1, 7, 11, 12, 13, 4096, 300_000, 1 << 20]), min_size=1, max_size=5))
def test_frames_come_out_as_they_went_in_whatever_the_pieces(sent, steps):
    """Goal: framing is independent of how the stream is cut. Method: property, frames larger than the buffer
    included.
    """
    if sum(len(f[3]) for f in sent) > 50_000:
        steps = [max(step, 4096) for step in steps]
    stream = b"".join(pack_header(len(p), kind, flags, rid) + p for kind, flags, rid, p in sent)
    decoder = FrameDecoder()
    assert feed(decoder, stream, steps) == sent
    decoder.finish()


@settings(deadline=None)
@given(frames.filter(bool), st.integers(1, 200))
def test_a_stream_that_ends_inside_a_frame_is_an_error(sent, cut):
    """Goal: truncation is never taken for an end. Method: drop the last bytes of a stream of frames."""
    stream = b"".join(pack_header(len(p), kind, flags, rid) + p for kind, flags, rid, p in sent)
    last = HEADER.size + len(sent[-1][3])
    decoder = FrameDecoder()
    feed(decoder, stream[: len(stream) - min(cut, last - 1)], [1 << 20])
    with pytest.raises(ProtocolError, match="inside a frame"):
        decoder.finish()


def test_a_frame_over_the_limit_is_refused_at_its_header():
    """Goal: no memory is spent on it. Method: the header alone."""
    decoder = FrameDecoder(max_frame_bytes=1000)
    with pytest.raises(ProtocolError, match="1001 bytes"):
        feed(decoder, pack_header(1001, 1, 0, 1), [12])


@settings(deadline=None)
@given(st.binary(min_size=12, max_size=4000))
def test_garbage_is_an_error_or_waits_for_more_within_the_bound(garbage):
    """Goal: arbitrary bytes raise ProtocolError or parse; nothing else. Method: property."""
    decoder = FrameDecoder(max_frame_bytes=1 << 16)
    try:
        feed(decoder, garbage, [1000])
    except ProtocolError:
        pass


def test_unknown_flags_are_refused():
    """Goal: bits of a later version are not ignored. Method: each unknown bit."""
    for bit in range(1, 8):
        with pytest.raises(ProtocolError, match="flags"):
            feed(FrameDecoder(), pack_header(0, 1, 1 << bit, 1), [12])
