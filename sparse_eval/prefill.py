"""Prefill a prompt once, in chunks, and hand out forks of its cache that can be decoded from."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from sparse_eval.attention import Observer, observe

CHUNK_TOKENS = 4096


@dataclass(frozen=True)
class Prefilled:
    """The cache of prompt[:-1], never mutated; the first decode step feeds the last prompt token.

    prompt_queries: per layer with full attention, the last W - 1 prompt queries [W - 1, H, D].
    """

    ids: Tensor
    cache: Any
    prompt_queries: dict[int, Tensor]

    def fork(self) -> Any:
        """A cache with the same content that may be decoded from without touching this one."""
        fork = copy.copy(self.cache)
        fork.layers = [copy.copy(layer) for layer in self.cache.layers]
        return fork


def cache_keyword(model: Any) -> str:
    """How this transformers names forward's cache argument (an unknown name is swallowed)."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


@torch.inference_mode()
def prefill(
    model: Any,
    ids: Tensor,
    *,
    chunk_tokens: int = CHUNK_TOKENS,
    num_prompt_queries: int = 64,
    on_tokens: Callable[[int], None] = lambda tokens: None,
) -> Prefilled:
    """Run prompt[:-1] through the model. ids: int64 [N], N >= 2. on_tokens is called per chunk."""
    if ids.ndim != 1 or len(ids) < 2:
        raise ValueError(
            f"a prompt must be 1-D with at least 2 tokens, got shape {list(ids.shape)}"
        )
    cache = DynamicCache(config=model.config)
    keyword = cache_keyword(model)
    observer = Observer(num_prompt_queries=num_prompt_queries - 1)
    with observe(model, observer):
        for chunk in ids[:-1].to(model.device)[None].split(chunk_tokens, dim=1):
            model(chunk, **{keyword: cache}, use_cache=True, logits_to_keep=1)
            on_tokens(chunk.shape[1])
    return Prefilled(ids, cache, observer.prompt_queries())


def decode_step(model: Any, cache: Any, token: int) -> Tensor:
    """Feed one token: the cache grows by it. Returns the next token's logits [vocab]."""
    return feed(model, cache, torch.tensor([token]))


@torch.inference_mode()
def feed(model: Any, cache: Any, ids: Tensor) -> Tensor:
    """Feed tokens (int64 [n]) in one forward: the cache grows by n. Returns the logits [vocab] that
    follow the last."""
    keyword = {cache_keyword(model): cache}
    out = model(ids.to(model.device)[None], **keyword, use_cache=True, logits_to_keep=1)
    return out.logits[0, -1]
