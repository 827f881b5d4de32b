"""Random: sinks, local pages, and as many others as fit, drawn anew at every layer, step and head.

What a budget finds by chance. Each page's score is a hash of (seed, layer, length, KV head, page),
so the draw is the same on a CPU and a GPU, alone and in a batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from sparse_eval.core import AttentionCall
from sparse_eval.policies.base import Policy, Selection, State, check_at_least, num_pages_of
from sparse_eval.policies.topk import top_pages

Hashed = Any  # an int, or an int64 tensor


MAX_KV_HEADS = 1024


@dataclass(frozen=True, kw_only=True)
class Random(Policy[State]):
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least("seed", self.seed, 0)

    def select(self, call: AttentionCall, state: State, budget: int | None) -> Selection:
        num_pages = num_pages_of(call.capacity, self.page_size)
        draw_B = hashed(hashed(hashed(0, self.seed), call.layer), call.lengths_B.long())
        head_G = torch.arange(call.num_kv_heads, device=call.device)
        page_P = torch.arange(num_pages, device=call.device)
        draw_BGP = hashed(draw_B[:, None, None], page_P * MAX_KV_HEADS + head_G[:, None])
        # 24 bits are exact in float32
        return top_pages((draw_BGP >> 8).float(), call, self, budget)


def hashed(key: Hashed, x: Hashed) -> Hashed:
    """A 32-bit hash of x under a 32-bit key, in int64 without overflow: splitmix32's finaliser."""
    z = (key + (x + 1) * 0x9E3779B9) & 0xFFFFFFFF
    z = ((z ^ (z >> 16)) * 0x21F0AAAD) & 0xFFFFFFFF
    z = ((z ^ (z >> 15)) * 0x735A2D97) & 0xFFFFFFFF
    return z ^ (z >> 15)
