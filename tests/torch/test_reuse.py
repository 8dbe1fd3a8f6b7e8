"""KV of a real transformers model through a real node: what the example does, with a small random model."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs the torch extra: pip install ucxkv[torch]")
transformers = pytest.importorskip("transformers", reason="needs the example extra: pip install ucxkv[example]")

import ucxkv  # noqa: E402
from ucxkv.cli.launch import running_node  # noqa: E402

pytestmark = pytest.mark.torch

BLOCK_TOKENS = 16


@pytest.fixture(scope="module")
def model() -> Any:
    """A Llama of 2 layers with random weights, in the example's wrapper; it chooses varied tokens."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
    try:
        import smollm2
    finally:
        sys.path.pop(0)
    torch.manual_seed(3)
    torch.set_num_threads(1)
    config = transformers.LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
    )
    return smollm2.Model(transformers.LlamaForCausalLM(config).eval(), None)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A node's address."""
    with running_node("reuse-test", host_bytes="64MiB") as node:
        yield node.address
    if node.log is not None:
        node.log.close()


def layout_of(model: Any, **more: Any) -> ucxkv.Layout:
    """The layout of the model's blocks."""
    return ucxkv.Layout(
        model="random llama",
        dtype="float32",
        layers=model.layers,
        kv_heads=model.kv_heads,
        head_dim=model.head_dim,
        block_tokens=BLOCK_TOKENS,
        **more,
    )


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("order", ["layer", "block", "tail"])
async def test_tokens_after_reuse_are_those_of_a_plain_run(model: Any, address: str, groups: int, order: Any) -> None:
    """Goal: reuse changes nothing but the time. Method: prefill 100 tokens, save, load into fresh memory through the
    node, decode 12 tokens greedily from it and from nothing; tokens and KV bits are identical, all 6 whole blocks
    were reused."""
    tokens = torch.randint(0, 512, (100,), generator=torch.Generator().manual_seed(groups)).tolist()
    plain = model.generate(tokens, 12)
    layout = layout_of(model, layer_groups=groups, salt=order)
    async with ucxkv.connect(address) as kv:
        seq = kv.sequence(layout, tokens[:-1])
        source = model.cut(model.prefill(tokens), seq.blocks_count, BLOCK_TOKENS)
        saved = await seq.save(source)
        assert (saved.blocks, saved.stored) == (6, 6 * groups)
        again = kv.sequence(layout, tokens[:-1])
        assert await again.match() == 6
        into = torch.zeros(6, *layout.shape)
        async with again.load(into, order=order) as load:
            async for _ in load:
                pass
        assert load.loaded == range(6)
        assert torch.equal(into.view(torch.uint8), source.view(torch.uint8))
        other = kv.sequence(layout_of(model, salt="another tenant"), tokens[:-1])
        assert await other.match() == 0
    reused = model.generate(tokens, 12, cache=model.join(into), done=6 * BLOCK_TOKENS)
    assert reused.tokens == plain.tokens
    assert len(set(plain.tokens)) > 3


@pytest.mark.parametrize("tokens_s", [1e12, 1e-3])
async def test_tokens_after_a_split_are_those_of_a_plain_run(model: Any, address: str, tokens_s: float) -> None:
    """Goal: computing some blocks and loading the others changes nothing but the time. Method: a split of 6 blocks by
    an engine that is told to be faster than any load, and one that is hopeless; decode greedily from it and from
    nothing."""
    tokens = torch.randint(0, 512, (100,), generator=torch.Generator().manual_seed(7)).tolist()
    plain = model.generate(tokens, 12)
    layout = layout_of(model, salt=f"split {tokens_s}")
    async with ucxkv.connect(address) as kv:
        seq = kv.sequence(layout, tokens[:-1])
        assert (await seq.save(model.cut(model.prefill(tokens), 6, BLOCK_TOKENS))).blocks == 6
        blocks, cache = torch.zeros(6, *layout.shape), None
        async with seq.split(blocks, tokens_s, compute_blocks=2, load_blocks=1) as split:
            async for span in split:
                cache = await asyncio.to_thread(model.compute_span, tokens, blocks, span, cache)
        assert split.blocks == 6 and split.is_over
        assert (split.computed_blocks > 0) == (tokens_s == 1e12)
    reused = model.generate(tokens, 12, cache=model.join(blocks), done=6 * BLOCK_TOKENS)
    assert reused.tokens == plain.tokens
    assert len(set(plain.tokens)) > 3


@pytest.mark.parametrize("spans", [[range(6)], [range(2), range(2, 6)], [range(4, 6)], [range(1), range(3, 4)]])
def test_spans_computed_after_loaded_blocks_are_those_of_one_prefill(model: Any, spans: list[range]) -> None:
    """Goal: blocks handed out at the end, because they did not come, are computed from what is in the cache. Method:
    spans of any place computed after blocks that are there; all keys and values are those of one prefill."""
    tokens = torch.randint(0, 512, (96,), generator=torch.Generator().manual_seed(8)).tolist()
    whole = model.cut(model.prefill(tokens), 6, BLOCK_TOKENS)
    blocks, cache = whole.clone(), None
    for span in spans:
        blocks[span.start : span.stop] = 0
    for span in spans:
        cache = model.compute_span(tokens, blocks, span, cache)
    assert torch.allclose(blocks, whole, atol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8", "uint8"])
async def test_paged_caches_of_every_dtype_come_back_bit_for_bit(address: str, dtype: str) -> None:
    """Goal: user voice 36: dtypes that numpy cannot name keep dtype, shape and bits, NaN payloads too. Method: a
    paged cache listed by layer and by keys and values, filled with random bits, saved and loaded into other pages."""
    kind = getattr(torch, dtype)
    layout = ucxkv.Layout(model="bits", dtype=dtype, layers=3, kv_heads=2, head_dim=8, block_tokens=4)

    def cache(fill: bool) -> list[list[Any]]:
        raw = torch.randint if fill else (lambda low, high, shape, dtype: torch.zeros(shape, dtype=dtype))
        width = 8 * layout.item_bytes
        return [[raw(0, 256, (6, 2, 4, width), dtype=torch.uint8).view(kind) for _ in range(2)] for _ in range(3)]

    source, into = cache(True), cache(False)
    async with ucxkv.connect(address) as kv:
        seq = kv.sequence(layout, range(16))
        assert (await seq.save(source, block_ids=[5, 0, 3, 2])).stored == 4
        assert [step.blocks async for step in seq.load(into, block_ids=[1, 2, 3, 4])] == [range(4)]
    for layer in range(3):
        for plane in range(2):
            got, want = into[layer][plane], source[layer][plane]
            assert got.dtype == kind
            assert torch.equal(got[[1, 2, 3, 4]].view(torch.uint8), want[[5, 0, 3, 2]].view(torch.uint8))
            assert not got[[0, 5]].view(torch.uint8).any()
