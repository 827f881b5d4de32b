"""Quest: bound each page's score by its per-channel key min and max, read the best pages.

Source: Tang et al. 2024, https://arxiv.org/abs/2406.10774. The bound max(q·lo, q·hi) summed over
channels equals q·mid + |q|·half: two matrix products.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from sparse_eval.core import AttentionCall
from sparse_eval.policies.base import (
    GROUP_RULES,
    Policy,
    Selection,
    State,
    check_one_of,
    newest_full_page,
    num_pages_of,
    pages_of_keys,
    query_page_scores,
    share_in_group,
    top_pages,
    visible_BP,
)


@dataclass
class QuestState(State):
    """mid and half-width of each full page's key box: [B, G, P, D]."""

    mid_BGPD: Tensor
    half_BGPD: Tensor
    paged: ClassVar[tuple[str, ...]] = ("mid_BGPD", "half_BGPD")


@dataclass(frozen=True, kw_only=True)
class Quest(Policy):
    group: str = "max"
    evidence: ClassVar[Literal["query"]] = "query"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_one_of("group", self.group, GROUP_RULES)

    def init(self, call: AttentionCall, prompt_queries_BWHD: Tensor | None = None) -> QuestState:
        keys = pages_of_keys(call, self.page_size)
        mid, half = key_box(keys)
        state = QuestState(mid, half)
        state.grow(num_pages_of(call.capacity, self.page_size))
        return state

    def extend(self, state: QuestState, call: AttentionCall) -> None:  # type: ignore[override]
        page_B, keys_BGLD = newest_full_page(call, self.page_size)
        row = torch.arange(page_B.shape[0], device=call.device)
        state.mid_BGPD[row, :, page_B], state.half_BGPD[row, :, page_B] = key_box(keys_BGLD)

    def select(
        self, call: AttentionCall, state: QuestState, budget: int | None
    ) -> Selection:  # type: ignore[override]
        assert budget is not None
        bound_BHP = query_page_scores(call.q_BHD, state.mid_BGPD)
        bound_BHP = call.scale * (bound_BHP + query_page_scores(call.q_BHD.abs(), state.half_BGPD))
        visible = visible_BP(call, self.page_size, bound_BHP.shape[-1])
        score = share_in_group(bound_BHP, call.num_kv_heads, self.group, visible)
        return top_pages(score, call, self, budget)


def key_box(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Mid and half-width of the box around keys [..., page_size, D], in their dtype; half is
    rounded outward so that [mid - half, mid + half] covers every key."""
    lo, hi = keys.float().aminmax(dim=-2) if keys.dtype != torch.float64 else keys.aminmax(dim=-2)
    mid = ((lo + hi) / 2).to(keys.dtype)
    need = torch.maximum(hi - mid, mid.to(lo.dtype) - lo)
    half = need.to(keys.dtype)
    return mid, torch.where(half < need, torch.nextafter(half, torch.full_like(half, torch.inf)), half)
