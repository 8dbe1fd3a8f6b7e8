"""The example that keeps a vector index and embeddings beside KV blocks: it checks itself; these check its checks."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import ucxkv
from tests.harness import NodeProcess

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "vector_index.py"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("vector_index_example", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_the_example_runs_and_finds_everything_as_it_has_to_be() -> None:
    """Goal: the example works on any machine with numpy. Method: run it, with fewer updates; all of its checks held."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), "--updates", "2", "--json"], capture_output=True, text=True, timeout=100, cwd="/"
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["ok"] and all(result["checks"].values()) and len(result["checks"]) == 5
    assert result["reader"]["generations"][-1] == 2 and result["engine"]["encoded"] == 8


async def test_its_reader_refuses_an_index_that_is_not_what_was_put(example: ModuleType, node: NodeProcess) -> None:
    """Goal: the check can fail. Method: an index with one number changed is loaded and compared as the reader does."""
    vectors = example.vectors_of(0)
    index = example.Index.build(vectors)
    async with ucxkv.connect(node.address) as kv:
        version, manifest = await example.store(kv, index, 0, None)
        loaded = await example.load(kv)
        assert loaded is not None and np.array_equal(loaded[1].vectors, vectors[loaded[1].ids])
        index.vectors[5, 5] += 1
        await example.store(kv, index, 1, (version, manifest))
        with pytest.raises(ucxkv.VersionConflict):
            await example.store(kv, index, 1, (version, manifest))
        generation, changed = await example.load(kv)
        assert generation == 1 and not np.array_equal(changed.vectors, vectors[changed.ids])
