"""Tokens per second of a patched decode loop against the dense one: the same loop, eager."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparse_eval.latency.clock import Timing, timing
from sparse_eval.latency.config import Shapes
from sparse_eval.live import patched
from sparse_eval.models import load_model
from sparse_eval.policies.base import Policy
from sparse_eval.prefill import cache_keyword, prefill


def random_model(shapes: Shapes, num_layers: int, context: int, device: str, dtype: Any) -> Any:
    """A Qwen2 of these attention shapes with random weights; its vocabulary is small."""
    hidden = shapes.num_heads * shapes.head_dim
    cfg = {
        "source": "random",
        "architecture": "qwen2",
        "weights_seed": 0,
        "adds_bos": False,
        "chat_template": False,
        "name": "random_qwen2",
        "base": "random Qwen2",
        "variant": "",
        "weights": "random",
        "default_context": context,
        "max_context": 2 * context,
        "num_layers": num_layers,
        "num_heads": shapes.num_heads,
        "num_kv_heads": shapes.num_kv_heads,
        "head_dim": shapes.head_dim,
        "config": {"hidden_size": hidden, "intermediate_size": 4 * hidden},
    }
    return load_model(cfg, device=device, dtype=dtype, model_cache=Path(".")).model


@torch.inference_mode()
def decode_times(
    model: Any, ids: Tensor, policy: Policy, budget: int, *, new_tokens: int, dense_layers: Any
) -> dict[str, Timing]:
    """Microseconds per token of `dense` (the model's own attention) and `sparse`, in turns, from
    one prefill of ids [N]; the first two tokens of each loop warm up."""
    filled = prefill(model, ids)
    samples: dict[str, list[float]] = {"dense": [], "sparse": []}
    for turn in range(3):
        for name in ("dense", "sparse") if turn % 2 else ("sparse", "dense"):
            if name == "dense":
                spent = loop_us(model, filled.fork(), ids[-1:], new_tokens)
            else:
                with patched(
                    model,
                    policy,
                    budget=budget,
                    dense_layers=dense_layers,
                    prompt_queries=filled.prompt_queries,
                    backend="triton",
                ):
                    spent = loop_us(model, filled.fork(), ids[-1:], new_tokens)
            samples[name] += spent[2:]
    return {name: timing(values) for name, values in samples.items()}


def loop_us(model: Any, cache: Any, token: Tensor, new_tokens: int) -> list[float]:
    """Greedy decoding of one row: microseconds of each token."""
    keyword, spent = cache_keyword(model), []
    for _ in range(new_tokens):
        torch.cuda.synchronize()
        started = time.perf_counter()
        logits = model(token[None], **{keyword: cache}, use_cache=True).logits
        token = logits[0, -1].argmax(-1, keepdim=True)
        torch.cuda.synchronize()
        spent.append((time.perf_counter() - started) * 1e6)
    return spent
