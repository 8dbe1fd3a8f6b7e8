"""Objects on a real node, over every path: what is put is got, whole, by name and by version."""

from __future__ import annotations

import os
import secrets

import numpy as np
import pytest

import ucxkv
from tests.harness import NodeProcess
from ucxkv.objects import ABSENT, Version
from ucxkv.objects.records import BODY_BLOCK_BYTES

VALUES = [b"", b"x", bytes(range(256)) * 300, os.urandom(BODY_BLOCK_BYTES), os.urandom(3 * BODY_BLOCK_BYTES + 5)]


@pytest.fixture
def name() -> str:
    """A name nobody else has."""
    return f"test/{secrets.token_hex(8)}"


async def test_what_is_put_is_got_with_its_kind_and_shape(kv: ucxkv.Client, name: str) -> None:
    """Goal: bytes and arrays of any size, over every path. Method: put over one another, read into new memory."""
    rng = np.random.default_rng(1)
    arrays = [rng.standard_normal((100, 30)).astype("f4"), rng.integers(0, 9, (3, 700, 300)), np.zeros((0, 4))]
    for number, value in enumerate([*VALUES, *arrays], 1):
        version = await kv.objects.put(name, value)
        found = await kv.objects.get(name)
        assert version.number == number and found is not None and found.info.version == version
        assert found.info == await kv.objects.stat(name)
        if isinstance(value, bytes):
            assert found.value == value and (found.info.kind, found.info.shape) == ("bytes", ())
        else:
            assert isinstance(found.value, np.ndarray) and found.value.dtype == value.dtype
            assert np.array_equal(found.value, value) and found.info.shape == value.shape
    assert await kv.objects.delete(name)


async def test_a_value_is_read_into_the_callers_memory(kv: ucxkv.Client, name: str) -> None:
    """Goal: `into`. Method: the same array, a view of it, bytes; memory of another size is left alone."""
    value = np.random.default_rng(2).standard_normal((700, 600))
    await kv.objects.put(name, value)
    into = np.zeros_like(value)
    found = await kv.objects.get(name, into)
    assert found is not None and found.value is into and (into == value).all()
    raw = bytearray(value.nbytes)
    assert await kv.objects.get(name, raw) is not None and raw == value.tobytes()
    small = np.zeros(5)
    with pytest.raises(ucxkv.UsageError, match="3360000 bytes"):
        await kv.objects.get(name, small)
    assert not small.any()


async def test_a_name_without_an_object_is_a_miss(kv: ucxkv.Client, name: str) -> None:
    """Goal: absence is an answer. Method: every call on a name that nobody put."""
    assert await kv.objects.get(name) is None and await kv.objects.stat(name) is None
    assert await kv.objects.delete(name) is False and await kv.objects.list(name) == []


async def test_only_the_expected_version_is_replaced_or_deleted(kv: ucxkv.Client, name: str) -> None:
    """Goal: compare-and-set. Method: expectations that hold and that do not, of versions, of absence, after a delete;
    a conflict changes nothing and leaves no byte."""
    first = await kv.objects.put(name, b"one", if_version=ABSENT)
    with pytest.raises(ucxkv.VersionConflict, match=str(first)):
        await kv.objects.put(name, b"two", if_version=ABSENT)
    second = await kv.objects.put(name, b"two", if_version=first)
    blocks = len(await kv.list_keys(10**6))
    for wrong in (first, Version(3, second.stamp), Version(second.number, bytes(16))):
        with pytest.raises(ucxkv.VersionConflict):
            await kv.objects.put(name, b"three", if_version=wrong)
        with pytest.raises(ucxkv.VersionConflict):
            await kv.objects.delete(name, if_version=wrong)
    found = await kv.objects.get(name)
    assert found is not None and (found.value, found.info.version) == (b"two", second)
    assert len(await kv.list_keys(10**6)) == blocks
    assert await kv.objects.delete(name, if_version=second)
    with pytest.raises(ucxkv.VersionConflict, match="there is none"):
        await kv.objects.put(name, b"four", if_version=second)
    again = await kv.objects.put(name, b"five", if_version=ABSENT)
    assert again.number == 1 and again != first


async def test_objects_are_listed_by_prefix_and_name(kv: ucxkv.Client, name: str) -> None:
    """Goal: `list` is what is there. Method: several names, one overwritten, one deleted, among blocks of the cache."""
    await kv.put_many([os.urandom(16) for _ in range(50)], [b"block"] * 50)
    for suffix in ("b", "a", "ä/1", "gone", "ä/2"):
        await kv.objects.put(f"{name}/{suffix}", suffix.encode())
    latest = await kv.objects.put(f"{name}/a", np.arange(4))
    await kv.objects.delete(f"{name}/gone")
    found = await kv.objects.list(name)
    assert [info.name for info in found] == [f"{name}/{suffix}" for suffix in ("a", "b", "ä/1", "ä/2")]
    assert (found[0].version, found[0].dtype, found[0].nbytes) == (latest, np.arange(4).dtype.str, 32)
    assert [info.name for info in await kv.objects.list(f"{name}/ä")] == [f"{name}/ä/1", f"{name}/ä/2"]


async def test_nothing_is_left_of_what_was_overwritten_or_deleted(node: NodeProcess) -> None:
    """Goal: no garbage in good order. Method: 200 versions of two sizes: the headers stay few, one body is there; after
    the delete the node is empty."""
    async with ucxkv.connect(node.address) as kv:
        for number in range(1, 201):
            await kv.objects.put("x", bytes(BODY_BLOCK_BYTES + 1 if number % 2 else 5))
            blocks = len(await kv.list_keys())
            assert blocks <= 1 + 63 + number // 64 + (3 if number % 2 else 2)
        assert blocks == 1 + 3 + 8 + 2  # root; 64, 128, 192; 193 to 200; the body and its seal
        assert await kv.objects.delete("x")
        assert await kv.list_keys() == [] and await kv.objects.list() == []


async def test_what_cannot_be_stored_is_refused_before_anything_happens(kv: ucxkv.Client, name: str) -> None:
    """Goal: a wrong call changes nothing. Method: values, names, expectations and deadlines that are none."""
    await kv.objects.put(name, b"kept")
    for value in ("text", 7, [1], np.arange(9)[::2]):
        with pytest.raises(ucxkv.UsageError):
            await kv.objects.put(name, value)
    with pytest.raises(ucxkv.UsageError, match="if_version"):
        await kv.objects.put(name, b"x", if_version=1)  # type: ignore[arg-type]
    with pytest.raises(ucxkv.UsageError, match="deadline_s"):
        await kv.objects.put(name, b"x", deadline_s=0)
    with pytest.raises(ucxkv.UsageError, match="durable"):
        await kv.objects.put(name, b"x", durable=True)
    with pytest.raises(ucxkv.UsageError, match="1 to 1024"):
        await kv.objects.get("")
    with pytest.raises(ucxkv.UsageError, match="prefix"):
        await kv.objects.list(b"x")  # type: ignore[arg-type]
    for older in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ucxkv.UsageError, match="older_than_s"):
            await kv.objects.sweep(older_than_s=older)
    found = await kv.objects.get(name)
    assert found is not None and found.value == b"kept" and found.info.version.number == 1
    await kv.objects.put(name, np.arange(9)[::2], gather=True)


async def test_two_names_under_one_key_are_told_apart(kv: ucxkv.Client, name: str) -> None:
    """Goal: a name is read, not believed. Method: a root that names another object lies under this one's key."""
    from ucxkv.objects.records import Root, root_key

    await kv.put(root_key(name), Root(bytes(range(16)), "another").to_bytes())
    with pytest.raises(ucxkv.UsageError, match="another"):
        await kv.objects.put(name, b"x")
    with pytest.raises(ucxkv.UsageError, match="another"):
        await kv.objects.get(name)


def test_the_blocking_client_has_the_same_calls(shared_node: NodeProcess, name: str) -> None:
    """Goal: programs without a loop. Method: each call once, through `ucxkv.sync`."""
    with ucxkv.sync.connect(shared_node.address) as kv:
        version = kv.objects.put(name, b"one")
        assert kv.objects.put(name, np.ones(3), if_version=version).number == 2
        found = kv.objects.get(name)
        assert found is not None and np.array_equal(found.value, np.ones(3))  # type: ignore[arg-type]
        info = kv.objects.stat(name)
        assert info == found.info and kv.objects.list(name) == [info]
        assert kv.objects.sweep() == 0
        assert kv.objects.delete(name) and not kv.objects.delete(name)
