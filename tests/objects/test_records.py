"""The bytes of roots, headers and seals, and their keys."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ucxkv.errors import UsageError
from ucxkv.objects.records import (
    BODY_BLOCK_BYTES,
    ROOT_PREFIX,
    SEAL_PREFIX,
    Body,
    Header,
    Kind,
    Root,
    Seal,
    Version,
    checked_name,
    header_key,
    root_key,
)

STAMPS = st.binary(min_size=16, max_size=16)
NAMES = st.text(st.characters(codec="utf-8"), min_size=1, max_size=60)
SIZES = st.integers(0, (1 << 64) - 1)
BODIES = st.builds(Body, STAMPS, SIZES)
ROOTS = st.builds(Root, STAMPS, NAMES)
HEADERS = st.builds(Header, SIZES, BODIES, BODIES, st.lists(STAMPS, max_size=5).map(tuple))
SEALS = st.builds(
    Seal,
    NAMES,
    BODIES,
    st.sampled_from(Kind),
    st.text(st.characters(codec="ascii"), max_size=20),
    st.lists(SIZES, max_size=6).map(tuple),
    st.booleans(),
    SIZES,
)


@given(st.one_of(ROOTS, HEADERS, SEALS))
@settings(max_examples=400, deadline=None)
def test_a_record_comes_back_and_no_other_kind_takes_it(record: Root | Header | Seal) -> None:
    """Goal: one meaning for any bytes. Method: round trips; the other kinds, and every cut, are refused."""
    raw = record.to_bytes()
    for kind in (Root, Header, Seal):
        assert kind.from_bytes(raw) == (record if isinstance(record, kind) else None)
    assert all(type(record).from_bytes(raw[:cut]) is None for cut in range(len(raw)))
    assert type(record).from_bytes(raw + b"\0") is None


@given(st.binary(max_size=200), st.sampled_from([b"uOr1", b"uOh1", b"uOs1"]))
@settings(max_examples=400, deadline=None)
def test_foreign_bytes_are_no_record_or_a_whole_one(raw: bytes, magic: bytes) -> None:
    """Goal: a scan survives whatever lies under its keys. Method: noise behind each magic."""
    for kind in (Root, Header, Seal):
        found = kind.from_bytes(magic + raw)
        assert found is None or found.to_bytes() == magic + raw or isinstance(found, Seal)


def test_keys_are_the_same_in_every_process_and_differ_in_all_they_are_made_of() -> None:
    """Goal: objects are found by what is stored today. Method: fixed values, and one change at a time."""
    stamp, other = bytes(range(16)), bytes(16)
    assert root_key("a").hex() == "756f626a66a482263061dfd199b16f52"
    assert header_key(stamp, 1).hex() == "428b3d29676fca70c6e43cdc43b996ee"
    assert Body(stamp, 1).seal_key.hex() == "756f627376b8ab4b2304a6a03203b936"
    assert Body(stamp, 1).first_key.hex() == "77f95bbbae35268713d87c0e7499fd87"
    assert root_key("a").startswith(ROOT_PREFIX) and Body(stamp, 1).seal_key.startswith(SEAL_PREFIX)
    keys = {
        root_key("a"), root_key("b"), header_key(stamp, 1), header_key(stamp, 2), header_key(other, 1),
        Body(stamp, 1).seal_key, Body(other, 1).seal_key, Body(stamp, 1).first_key, Body(other, 1).first_key,
    }  # fmt: skip
    assert len(keys) == 9


@pytest.mark.parametrize("nbytes", [0, 1, BODY_BLOCK_BYTES, BODY_BLOCK_BYTES + 1, 5 * BODY_BLOCK_BYTES])
def test_a_body_is_its_blocks_and_the_seal(nbytes: int) -> None:
    """Goal: the number of blocks is that of the bytes. Method: sizes at the edges."""
    body = Body(bytes(range(16)), nbytes)
    keys = body.keys()
    assert len(keys) == body.blocks_count + 1 == (nbytes + BODY_BLOCK_BYTES - 1) // BODY_BLOCK_BYTES + 1
    assert keys[0].tobytes() == body.first_key and keys[-1].tobytes() == body.seal_key
    assert len({row.tobytes() for row in keys}) == len(keys)


@given(st.integers(1, 1 << 40), STAMPS)
def test_a_version_is_text_and_back(number: int, stamp: bytes) -> None:
    """Goal: versions can be written down. Method: round trip."""
    assert Version.parse(str(Version(number, stamp))) == Version(number, stamp)


@pytest.mark.parametrize("text", ["", "1", "1-", "0-" + "00" * 16, "1-" + "0" * 31, "x-" + "00" * 16, "1-" + "ZZ" * 16])
def test_what_is_no_version_is_refused(text: str) -> None:
    """Goal: a typing error is said. Method: near misses."""
    with pytest.raises(UsageError, match="is no version"):
        Version.parse(text)


@pytest.mark.parametrize("name", ["", "x" * 1025, "\ud800", b"bytes", 7])
def test_what_is_no_name_is_refused(name: object) -> None:
    """Goal: names are text that can be written down. Method: empty, too long, no Unicode, no text."""
    with pytest.raises(UsageError):
        checked_name(name)  # type: ignore[arg-type]
    assert checked_name("index/größe") == "index/größe"
