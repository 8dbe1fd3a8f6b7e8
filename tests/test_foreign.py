"""Engines' keys: injective, decodable, told apart by namespace, and refused by name when they cannot be keys."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ucxkv.errors import UsageError
from ucxkv.foreign import MAX_DEPTH, ForeignKey, ForeignKeys, Namespace, decode, encode
from ucxkv.layout import Layout

SPACE = Namespace(engine="vllm", model="acme/llama", dtype="bfloat16", block_tokens=16)

# What broke other stores' keys: path and join characters, NUL, spaces, emoji, 300 characters, case pairs, nothing.
HOSTILE = ["", "/", "-SEP-", "a-SEP-b", "@", "..", "../../etc", "\0", " ", "\N{GRINNING FACE}", "x" * 300, "a", "A"]

text = st.text(st.characters(codec=None)) | st.sampled_from(HOSTILE)
leaves = st.none() | st.booleans() | st.integers() | text | st.binary()
foreign_keys = st.recursive(leaves, lambda inner: st.lists(inner, max_size=4).map(tuple), max_leaves=12)


def exact(key: ForeignKey) -> Any:
    """The key with the types of its parts, as 1 == True in Python but not as keys."""
    return [exact(item) for item in key] if isinstance(key, tuple) else (type(key), key)


@given(foreign_keys)
@settings(deadline=None)
def test_a_key_decodes_back_to_itself(key: ForeignKey) -> None:
    """Goal: the encoding loses nothing.

    Method: encode, decode, compare value and types; encoding again gives the same.
    """
    data = encode(key)
    assert exact(decode(data)) == exact(key)
    assert encode(decode(data)) == data


@given(foreign_keys, foreign_keys)
@settings(deadline=None)
def test_different_keys_have_different_bytes_and_hashes(one: ForeignKey, two: ForeignKey) -> None:
    """Goal: injective, then told apart by the hash. Method: random pairs are equal in all three ways or in none."""
    same = exact(one) == exact(two)
    assert (encode(one) == encode(two)) == same
    mapped = ForeignKeys(SPACE).map([one, two])
    assert (mapped[0] == mapped[1]).all() == same


@given(st.binary(max_size=40))
@settings(deadline=None)
def test_any_bytes_decode_to_a_key_that_encodes_to_them_or_are_refused(data: bytes) -> None:
    """Goal: one encoding for each key, and no crash on bad bytes. Method: random bytes, most of them no encoding."""
    try:
        key = decode(data)
    except UsageError:
        return
    assert encode(key) == data


@given(foreign_keys, st.data())
@settings(deadline=None)
def test_truncated_or_lengthened_bytes_are_refused(key: ForeignKey, data: st.DataObject) -> None:
    """Goal: the encoding says where it ends. Method: cut at every byte, and add one."""
    encoded = encode(key)
    cut = data.draw(st.integers(0, len(encoded) - 1))
    for bad in (encoded[:cut], encoded + b"N"):
        with pytest.raises(UsageError):
            decode(bad)


def test_hostile_names_stay_apart() -> None:
    """Goal: user voice 10 (key part): no separator, escape or case fold makes two keys meet. Method: all pairs of
    hostile parts in tuples of two, and all of them as the model of a namespace."""
    pairs = [(one, two) for one in HOSTILE for two in HOSTILE]
    mapped = ForeignKeys(SPACE).map(pairs)
    assert len({row.tobytes() for row in mapped}) == len(pairs)
    spaces = [dataclasses.replace(SPACE, model=one, revision=two) for one, two in pairs]
    assert len({ForeignKeys(space).one(b"k") for space in spaces}) == len(pairs)


def test_the_keys_of_real_engines_are_accepted() -> None:
    """Goal: what vLLM, SGLang and LMCache use as keys maps. Method: a key of each shape; results are distinct, of 16
    bytes, and equal to the single form."""
    keys: list[ForeignKey] = [
        bytes(range(32)) + (3).to_bytes(4, "little"),
        "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
        ("acme/llama@vllm", 2, 0, -0x7FEDCBA987654321, "bfloat16", None, (("group", 1),)),
    ]
    mapped = ForeignKeys(SPACE).map(keys)
    assert mapped.shape == (3, 16)
    assert [row.tobytes() for row in mapped] == [ForeignKeys(SPACE).one(key) for key in keys]
    assert len({row.tobytes() for row in mapped}) == 3
    assert ForeignKeys(SPACE).map([]).shape == (0, 16)


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Namespace)])
def test_a_namespace_that_differs_in_any_field_shares_no_key(field: str) -> None:
    """Goal: user voices 11 and 12: another dtype, rank or tenant is a miss. Method: change each field in turn."""
    value = getattr(SPACE, field)
    changed: Any = (not value) if isinstance(value, bool) else value + 1 if isinstance(value, int) else value + "x"
    other = dataclasses.replace(SPACE, **{field: changed})
    assert other.digest != SPACE.digest
    assert ForeignKeys(other).one(b"key") != ForeignKeys(SPACE).one(b"key")


def test_a_layouts_namespace_follows_the_layout() -> None:
    """Goal: engines that describe blocks by Layout get namespaces as strict as it. Method: change the head order."""
    layout = Layout(model="acme/llama", dtype="bf16", layers=2, kv_heads=2, head_dim=8)
    one = Namespace.of(layout, engine="sglang")
    two = Namespace.of(dataclasses.replace(layout, order="lknhd"), engine="sglang")
    assert one.digest != two.digest
    assert one.digest == Namespace.of(layout, engine="sglang").digest


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (1.5, "float cannot be part of a key"),
        ([1, 2], "list cannot be part of a key"),
        ((1, {"a": 1}), "dict cannot be part of a key"),
        (bytes(1 << 20), "at most 1048576"),
    ],
)
def test_what_cannot_be_a_key_is_refused_with_its_index(bad: Any, says: str) -> None:
    """Goal: nothing is turned into text on the way. Method: one case for each refusal, second in its list."""
    with pytest.raises(UsageError, match=f"engine key 1: .*{says}"):
        ForeignKeys(SPACE).map([b"good", bad])


def test_keys_nested_too_deep_are_refused_both_ways() -> None:
    """Goal: recursion has a bound. Method: one level more than allowed, by encode and by hand-made bytes."""
    key: ForeignKey = b"leaf"
    for _ in range(MAX_DEPTH):
        key = (key,)
    assert decode(encode(key)) == key
    with pytest.raises(UsageError, match="nests"):
        encode((key,))
    with pytest.raises(UsageError, match="nests"):
        decode(b"t\1\0\0\0" * 10_000 + b"N")


def test_one_key_given_as_the_list_is_refused() -> None:
    """Goal: a string is not silently a list of characters. Method: text and bytes in place of the list."""
    for bad in ("abc", b"abc"):
        with pytest.raises(UsageError, match="pass a list of keys"):
            ForeignKeys(SPACE).map(bad)
