"""Layouts: sizes and shapes follow from the fields, and the fingerprint tells any two apart."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ucxkv.errors import UsageError
from ucxkv.keys import block_keys
from ucxkv.layout import DTYPE_BYTES, Layout

BASE = Layout(model="acme/llama", dtype="bfloat16", layers=4, kv_heads=2, head_dim=8)

small = st.integers(1, 6)
# Text as fields may hold it: separators that other systems join names with, NUL, emoji, case pairs, long and empty.
text = st.sampled_from(["", "/", "-SEP-", "@", "..", "\0", " ", "\N{GRINNING FACE}", "a", "A", "x" * 300]) | st.text()


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Any valid layout."""
    world, groups = draw(small), draw(st.integers(1, 3))
    return Layout(
        model=draw(text),
        revision=draw(text),
        dtype=draw(st.sampled_from(sorted(DTYPE_BYTES))),
        layers=groups * draw(small),
        kv_heads=draw(small),
        head_dim=draw(small),
        block_tokens=draw(small),
        order="".join(draw(st.permutations("lkhnd"))),
        kv_planes=draw(st.integers(1, 2)),
        rank=draw(st.integers(0, world - 1)),
        world=world,
        adapter=draw(text),
        salt=draw(text),
        shared=draw(st.booleans()),
        layer_groups=groups,
    )


@given(layouts(), layouts())
@settings(deadline=None)
def test_layouts_that_differ_in_any_field_differ_in_fingerprint(one: Layout, two: Layout) -> None:
    """Goal: user voice 10: text with separators, NUL, emoji or nothing never makes two models meet. Method: random
    layouts, equal exactly when their fingerprints are."""
    assert (one == two) == (one.fingerprint == two.fingerprint)


@given(layouts(), st.data())
@settings(deadline=None)
def test_text_moved_from_one_field_to_the_next_is_another_layout(base: Layout, data: st.DataObject) -> None:
    """Goal: fields are told apart by length, not by a separator. Method: cut one text in two at random places."""
    whole = data.draw(st.text(min_size=1, max_size=8))
    cut, other = data.draw(st.integers(0, len(whole))), data.draw(st.integers(0, len(whole)))
    one = dataclasses.replace(base, model=whole[:cut], revision=whole[cut:])
    two = dataclasses.replace(base, model=whole[:other], revision=whole[other:])
    assert (one.fingerprint == two.fingerprint) == (cut == other)


@pytest.mark.parametrize(
    "change",
    [
        {"model": "acme/other"},
        {"revision": "2"},
        {"dtype": "float8_e4m3"},
        {"dtype": "float16"},
        {"layers": 8},
        {"kv_heads": 4},
        {"head_dim": 16},
        {"block_tokens": 32},
        {"order": "lknhd"},
        {"kv_planes": 1},
        {"world": 2},
        {"rank": 1, "world": 2},
        {"adapter": "lora"},
        {"salt": "tenant"},
        {"shared": True},
        {"layer_groups": 2},
    ],
)
def test_another_dtype_head_order_or_size_gives_other_keys(change: dict[str, Any]) -> None:
    """Goal: user voices 11 and 35: a block stored under another dtype, head order, block size or head count is a miss,
    decided before any byte moves. Method: change one field; no key of the same tokens is shared."""
    other = dataclasses.replace(BASE, **change)
    assert other.fingerprint != BASE.fingerprint
    tokens = range(128)
    assert not {k.tobytes() for k in block_keys(tokens, BASE)} & {k.tobytes() for k in block_keys(tokens, other)}


def test_every_field_is_in_the_test_above() -> None:
    """Goal: a new field cannot be left out of the fingerprint unseen. Method: compare their names."""
    marks = test_another_dtype_head_order_or_size_gives_other_keys.pytestmark
    changed = {name for change in marks[0].args[1] for name in change}
    assert changed == {field.name for field in dataclasses.fields(Layout)}


def test_the_fingerprint_is_the_same_in_every_process() -> None:
    """Goal: user voice 9. Method: fresh interpreters with several PYTHONHASHSEEDs against the recorded bytes."""
    code = (
        "from ucxkv.layout import Layout;"
        "print(Layout(model='acme/llama', dtype='bf16', layers=4, kv_heads=2, head_dim=8).fingerprint.hex())"
    )
    for seed in ("0", "1", "random"):
        env = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True, timeout=60
        )
        assert done.stdout.strip() == BASE.fingerprint.hex() == RECORDED_FINGERPRINT


RECORDED_FINGERPRINT = "a615cb14fd730bbaaeb052781d4c3304"


@given(layouts())
@settings(deadline=None)
def test_sizes_and_shapes_agree(layout: Layout) -> None:
    """Goal: bytes are what the shape says, whole, by group and by layer. Method: products over random layouts."""
    product = 1
    for size in layout.shape:
        product *= size
    assert layout.block_bytes == product * layout.item_bytes
    assert layout.block_bytes == layout.layer_bytes * layout.layers == layout.group_bytes * layout.layer_groups
    at = layout.order.index("l")
    assert layout.layer_shape == layout.shape[:at] + layout.shape[at + 1 :]
    assert layout.group_shape == (*layout.shape[:at], layout.group_layers, *layout.shape[at + 1 :])
    assert layout.shape[layout.order.index("n")] == layout.block_tokens


def test_known_models_have_their_known_sizes() -> None:
    """Goal: the arithmetic is that of real engines. Method: SmolLM2-135M and Llama-3.1-8B blocks of published sizes."""
    smol = Layout(model="SmolLM2-135M", dtype="bf16", layers=30, kv_heads=3, head_dim=64, block_tokens=64)
    assert smol.block_bytes == 64 * 23_040
    llama = Layout(model="Llama-3.1-8B", dtype="bf16", layers=32, kv_heads=8, head_dim=128, block_tokens=16)
    assert llama.block_bytes == 2 << 20
    assert llama.shape == (32, 2, 8, 16, 128)


@pytest.mark.parametrize(
    ("name", "canonical"),
    [
        ("bf16", "bfloat16"),
        ("torch.bfloat16", "bfloat16"),
        ("fp16", "float16"),
        ("half", "float16"),
        ("FP32", "float32"),
        ("torch.float8_e4m3fn", "float8_e4m3"),
        ("torch.float8_e5m2", "float8_e5m2"),
        ("int8", "int8"),
        ("uint8", "uint8"),
    ],
)
def test_names_of_one_dtype_are_one_dtype(name: str, canonical: str) -> None:
    """Goal: two engines that spell the dtype differently still share.

    Method: each spelling against its canonical one.
    """
    one, two = (dataclasses.replace(BASE, dtype=spelling) for spelling in (name, canonical))
    assert one.dtype == canonical
    assert one.fingerprint == two.fingerprint


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"dtype": "complex64"}, "not known"),
        ({"dtype": "float8"}, "not known"),
        ({"layers": 0}, "layers is 0"),
        ({"head_dim": -1}, "head_dim is -1"),
        ({"kv_heads": 2.0}, "kv_heads is 2.0"),
        ({"block_tokens": True}, "block_tokens is True"),
        ({"order": "lkhn"}, "permutation"),
        ({"order": "lkhnn"}, "permutation"),
        ({"rank": 1}, "rank is 1"),
        ({"kv_planes": 3}, "kv_planes is 3"),
        ({"layer_groups": 3}, "3 layer groups"),
        ({"model": b"bytes"}, "model is bytes"),
    ],
)
def test_impossible_layouts_are_refused_by_name(change: dict[str, Any], says: str) -> None:
    """Goal: a wrong layout never gets a fingerprint. Method: one case for each rule, matched on its message."""
    with pytest.raises(UsageError, match=says):
        dataclasses.replace(BASE, **change)
