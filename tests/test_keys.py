"""Block keys: chaining, stability across processes, the reserved key, and what is refused."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

import ucxkv.keys as keys_module
from ucxkv.errors import UsageError
from ucxkv.ids import ROOT_KEY
from ucxkv.keys import as_key, as_key_array, block_keys, derived_keys, hash_key
from ucxkv.layout import Layout

LAYOUT = Layout(model="acme/llama", revision="1", dtype="bfloat16", layers=2, kv_heads=2, head_dim=8, block_tokens=4)
FINGERPRINT = bytes(range(16))

tokens = st.lists(st.integers(0, 2**63 - 1), max_size=40)


@given(tokens, st.integers(1, 7))
@settings(deadline=None)
def test_only_whole_blocks_get_keys_and_keys_are_chained(ids: list[int], block_tokens: int) -> None:
    """Goal: key i covers exactly the blocks up to i. Method: keys of every cut prefix are a prefix of the keys; going
    on from a parent gives the rest."""
    whole = block_keys(ids, FINGERPRINT, block_tokens)
    assert whole.shape == (len(ids) // block_tokens, 16)
    for cut in range(len(whole)):
        part = block_keys(ids[: cut * block_tokens], FINGERPRINT, block_tokens)
        assert (part == whole[:cut]).all()
        if cut:
            rest = block_keys(ids[cut * block_tokens :], FINGERPRINT, block_tokens, parent=whole[cut - 1].tobytes())
            assert (rest == whole[cut:]).all()


@given(tokens.filter(lambda ids: len(ids) >= 8), st.data())
@settings(deadline=None)
def test_one_other_token_changes_its_key_and_all_after_it_but_none_before(ids: list[int], data: st.DataObject) -> None:
    """Goal: a key covers its whole prefix. Method: change one token at random and compare key by key."""
    ids = ids[: len(ids) // 4 * 4]
    at = data.draw(st.integers(0, len(ids) - 1))
    other = list(ids)
    other[at] = data.draw(st.integers(0, 2**63 - 1).filter(lambda token: token != ids[at]))
    same = (block_keys(ids, LAYOUT) == block_keys(other, LAYOUT)).all(axis=1)
    assert same.tolist() == [block < at // 4 for block in range(len(same))]


def test_list_int32_int64_and_uint_tokens_give_the_same_keys() -> None:
    """Goal: the encoding is canonical. Method: the same ids as a list and as arrays of several widths, byte order and
    strides."""
    ids = [1, 5, 2**31 - 1, 0, 7, 8, 9, 10]
    want = block_keys(ids, LAYOUT).tobytes()
    for dtype in ("<i4", ">i4", "<i8", ">i8", "u4", "u8"):
        assert block_keys(np.array(ids, dtype), LAYOUT).tobytes() == want
    assert block_keys(np.repeat(np.array(ids), 2)[::2], LAYOUT).tobytes() == want


def test_keys_are_the_same_in_fresh_interpreters_with_any_hash_seed() -> None:
    """Goal: user voice 9: keys do not depend on a per-process seed. Method: five fresh interpreters, PYTHONHASHSEED
    unset, 0, 1, 2 and random, print keys of the same tokens; they equal each other and the recorded bytes."""
    code = (
        "from ucxkv.keys import block_keys; from ucxkv.layout import Layout;"
        "l = Layout(model='m', dtype='bf16', layers=2, kv_heads=2, head_dim=8, block_tokens=4, salt='s');"
        "print(block_keys(range(8), l).tobytes().hex())"
    )
    seen = set()
    for seed in (None, "0", "1", "2", "random"):
        env = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
        if seed is not None:
            env["PYTHONHASHSEED"] = seed
        done = subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True, timeout=60
        )
        seen.add(done.stdout.strip())
    assert seen == {RECORDED_KEYS}


RECORDED_KEYS = "2330cfbb1db2185630e489f3e4ce91aaa2aa6070e2d4472931458b1f26641a18"


def test_the_record_that_is_hashed_is_the_documented_one() -> None:
    """Goal: another program can compute the keys. Method: build the table's record by hand and hash it."""
    record = ROOT_KEY + FINGERPRINT + b"".join(token.to_bytes(8, "little") for token in (3, 4))
    assert block_keys([3, 4], FINGERPRINT, 2).tobytes() == hash_key(record)
    assert block_keys([3, 4], FINGERPRINT, 2, shared=True).tobytes() == hash_key(record, shared=True)


def test_tenants_with_different_salts_share_no_key() -> None:
    """Goal: user voice 12: what one tenant cached is invisible to another; the same salt on two machines shares.
    Method: keys of equal tokens under salts a, b and a again, with either hash."""
    for shared in (False, True):
        base = dataclasses.replace(LAYOUT, shared=shared)
        a, b, again = (block_keys(range(64), dataclasses.replace(base, salt=salt)) for salt in ("a", "b", "a"))
        assert (a == again).all()
        assert not {k.tobytes() for k in a} & {k.tobytes() for k in b}


@pytest.mark.parametrize("shared", [False, True])
def test_the_zero_key_never_results(shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: no block gets the reserved key. Method: a hash that answers zero for the plain record and something for the
    record with a counter behind it; block, derived and plain hashes all take the second."""

    def mostly_zero(record: bytes) -> bytes:
        return ROOT_KEY if record[-1] != 1 else b"\x07" * 16

    monkeypatch.setattr(keys_module, "_sha256_128", mostly_zero)
    monkeypatch.setattr(xxhash, "xxh3_128_digest", mostly_zero)
    assert block_keys([2, 2], FINGERPRINT, 2, shared=shared).tobytes() == b"\x07" * 16
    assert hash_key(b"x", shared=shared) == b"\x07" * 16
    assert derived_keys(np.full((1, 16), 9, np.uint8), b"x").tobytes() == b"\x07" * 16


@given(st.binary(max_size=8), st.binary(max_size=8))
@settings(deadline=None)
def test_derived_keys_differ_by_label_and_from_their_origin(one: bytes, two: bytes) -> None:
    """Goal: what is derived from a block never meets the block or another derivation. Method: random labels."""
    origin = block_keys(range(12), LAYOUT)
    a, b = derived_keys(origin, one), derived_keys(origin, two)
    assert (a == b).all() == (one == two)
    assert not {k.tobytes() for k in origin} & {k.tobytes() for k in a}


@given(st.lists(st.binary(min_size=16, max_size=16).filter(lambda key: key != ROOT_KEY), max_size=20))
@settings(deadline=None)
def test_keys_given_as_bytes_or_array_become_one_array(given_keys: list[bytes]) -> None:
    """Goal: every way to pass keys means the same. Method: list, tuple, generator, bytearrays, array, strided array."""
    want = b"".join(given_keys)
    array = np.frombuffer(want, np.uint8).reshape(-1, 16)
    ways = [given_keys, tuple(given_keys), (k for k in given_keys), [bytearray(k) for k in given_keys], array]
    for way in [*ways, np.repeat(array, 2, axis=0)[::2], list(array)]:
        got = as_key_array(way)  # type: ignore[arg-type]
        assert got.tobytes() == want
        assert got.shape == (len(given_keys), 16)
        assert got.dtype == np.uint8
        assert got.flags.c_contiguous
    assert as_key_array(array) is array


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ([b"a" * 16, b"b" * 15], "key 1 has 15 bytes"),
        ([b"a" * 17, b"b" * 15], "key 0 has 17 bytes"),
        ([b"a" * 16, b""], "key 1 has 0 bytes"),
        ([b"a" * 16, "b" * 16], "key 1 is str"),
        ([b"a" * 16, 5], "key 1 is int"),
        ([b"a" * 16, None], "key 1 is NoneType"),
        ([b"a" * 16, ROOT_KEY], "key 1 is all zeros"),
        ([np.zeros(16, np.uint32)], "key 0 has 64 bytes"),
        (b"a" * 16, "pass a list of keys"),
        ("a", "pass a list of keys"),
        (7, "keys is int"),
        (np.zeros((2, 15), np.uint8), "shape \\(2, 15\\)"),
        (np.ones(16, np.uint8), "shape \\(16,\\)"),
        (np.ones((2, 16), np.int8), "dtype int8"),
        (np.zeros((2, 16), np.uint8), "key 0 is all zeros"),
    ],
)
def test_bad_keys_are_refused_with_index_and_length(bad: object, says: str) -> None:
    """Goal: wrong keys never reach a node. Method: one case for each way to be wrong, matched on its message."""
    with pytest.raises(UsageError, match=says):
        as_key_array(bad)  # type: ignore[arg-type]


def test_sixteen_zero_bytes_across_two_keys_are_no_reserved_key() -> None:
    """Goal: the quick search for the reserved key has no false alarm. Method: two keys whose zeros meet in the middle,
    and the reserved key itself where parents may be roots."""
    pair = [b"\x01" * 8 + bytes(8), bytes(8) + b"\x01" * 8]
    assert as_key_array(pair).tobytes() == b"".join(pair)
    assert as_key_array([ROOT_KEY], allow_root=True).tobytes() == ROOT_KEY


def test_one_key_is_checked_like_many() -> None:
    """Goal: single forms refuse what batches refuse. Method: good bytes, good bytearray, short and reserved keys."""
    assert as_key(b"k" * 16) == b"k" * 16
    assert as_key(bytearray(b"k" * 16)) == b"k" * 16  # type: ignore[arg-type]
    for bad in (b"k" * 15, ROOT_KEY, "k" * 16):
        with pytest.raises(UsageError):
            as_key(bad)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("ids", "options", "says"),
    [
        ([1.5, 2.0], {}, "float64"),
        (["a"], {}, "integers"),
        ([[1, 2], [3, 4]], {}, "one axis"),
        ([1, -1], {}, "negative id marks padding"),
        (np.array([2**63], np.uint64), {}, "below 2\\*\\*63"),
        ([1], {"layout": FINGERPRINT}, "pass block_tokens"),
        ([1], {"layout": b"short", "block_tokens": 4}, "has 5 bytes"),
        ([1], {"layout": FINGERPRINT, "block_tokens": 0}, "at least one token"),
        ([1], {"block_tokens": 8}, "differs from the layout"),
        ([1], {"parent": b"short"}, "5 bytes"),
    ],
)
def test_bad_tokens_and_layouts_are_refused_by_name(ids: object, options: dict[str, object], says: str) -> None:
    """Goal: no key is computed from something else than token ids. Method: one case for each way to be wrong."""
    with pytest.raises(UsageError, match=says):
        block_keys(ids, options.pop("layout", LAYOUT), **options)  # type: ignore[arg-type]


def test_no_tokens_and_short_prompts_give_no_keys() -> None:
    """Goal: partial tail blocks are not stored. Method: 0, 3 and 4 tokens at 4 a block."""
    assert [len(block_keys(list(range(count)), LAYOUT)) for count in (0, 3, 4)] == [0, 0, 1]
