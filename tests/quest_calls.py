"""Calls and rules that the tests of Quest's select and step share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparse_eval.core import AttentionCall
from sparse_eval.kernels.quest_select import quest_select
from sparse_eval.kernels.quest_step import quest_step
from sparse_eval.policies.quest import Quest, scales_of

SELECT: Any = quest_select
STEP: Any = quest_step


def make_call(
    device: str,
    lengths: list[int],
    *,
    dtype: torch.dtype = torch.float32,
    integers: bool = True,
    kv_heads: int = 2,
    group_size: int = 3,
    head_dim: int = 24,
    tokens: int = 200,
    starts: list[int] | None = None,
    shared: bool = False,
    seed: int = 0,
) -> AttentionCall:
    """Rows over a random cache; integers make every score exact, with many ties."""
    rng = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        values = torch.randint(-2, 3, shape, generator=rng) if integers else None
        real = torch.randn(shape, generator=rng) if values is None else values
        return real.to(device, dtype)

    rows = len(lengths)
    cache = (1 if shared else rows, kv_heads, tokens, head_dim)
    return AttentionCall(
        q_BHD=draw(rows, kv_heads * group_size, head_dim),
        k_BGND=draw(*cache),
        v_BGNE=draw(*cache),
        lengths_B=torch.tensor(lengths, dtype=torch.int32, device=device),
        starts_B=None if starts is None else torch.tensor(starts, device=device).int(),
        scale=0.25,
        layer=0,
    )


def policy(**fields: Any) -> Quest:
    return Quest(**{"select_backend": "torch", **fields})


def select(call: AttentionCall, quest: Quest, state: Any, budget: int, **options: Any) -> Any:
    return SELECT(
        *(call.q_BHD, call.k_BGND, state.center_BGPD, state.spread_BGPD),
        *(call.starts_B, call.lengths_B),
        **rule_of(quest, call, budget),
        **{"backend": "triton", "scales": scales_of(state), **options},
    )


def rule_of(quest: Quest, call: AttentionCall, budget: int) -> dict[str, Any]:
    return {
        "page_size": quest.page_size,
        "budget": budget,
        "sink_pages": quest.sink_pages,
        "local_pages": quest.local_pages,
        "group": quest.group,
        "scale": call.scale,
    }
