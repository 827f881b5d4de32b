"""Policies that score each page against the query: from a score per query head to a selection.

A score is in units of the logits, scale · q·k, and speaks of full pages only: the current page has
no metadata and is always read.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from sparse_eval.core import AttentionCall
from sparse_eval.policies.base import (
    Policy,
    Selection,
    State,
    StateT,
    check_one_of,
    full_BP,
    newest_full_page,
    num_pages_of,
    pages_of_keys,
)
from sparse_eval.policies.topk import top_pages

GROUP_RULES = ("max", "sum", "softmax_sum", "per_head")


@dataclass(frozen=True, kw_only=True)
class PageScorePolicy(Policy[StateT]):
    """Reads the pages with the best score; subclasses say what the score is.

    group: how the heads of a GQA group share their pages (see share_in_group)."""

    group: str = "max"
    evidence: ClassVar[Literal["query"]] = "query"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_one_of("group", self.group, GROUP_RULES)

    @abstractmethod
    def score(self, call: AttentionCall, state: StateT) -> Tensor:
        """A logit per query head and page, [B, H, P] float32; anything on pages not full."""

    def select(self, call: AttentionCall, state: StateT, budget: int | None) -> Selection:
        logit_BHP = self.score(call, state)
        full = full_BP(call, self.page_size, logit_BHP.shape[-1])
        shared = share_in_group(logit_BHP, call.num_kv_heads, self.group, full)
        return top_pages(shared, call, self, budget)


@dataclass
class ChannelState(State):
    """Per channel of each full page: a centre and a spread >= 0, [B, G, P, D]."""

    center_BGPD: Tensor
    spread_BGPD: Tensor
    paged: ClassVar[tuple[str, ...]] = ("center_BGPD", "spread_BGPD")


@dataclass(frozen=True, kw_only=True)
class ChannelScorePolicy(PageScorePolicy[ChannelState]):
    """Scores a page by scale · (q·center + |q|·spread): two matrix products.

    metadata_dtype: auto (the keys' own) or float32."""

    metadata_dtype: str = "auto"
    metadata_dtypes: ClassVar[tuple[str, ...]] = ("auto", "float32")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_one_of("metadata_dtype", self.metadata_dtype, self.metadata_dtypes)

    @abstractmethod
    def summary(self, keys: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """The state's paged tensors over the tokens of keys [..., page_size, D]: center and spread,
        stored in dtype."""

    def init(self, call: AttentionCall, prompt_queries_BWHD: Tensor | None = None) -> ChannelState:
        keys = pages_of_keys(call, self.page_size)
        state = self.new_state(*self.summary(keys, self._dtype(keys)))
        state.grow(num_pages_of(call.capacity, self.page_size))
        return state

    def extend(self, state: ChannelState, call: AttentionCall) -> None:
        state.grow(num_pages_of(call.capacity, self.page_size))
        page_B, keys_BGLD = newest_full_page(call, self.page_size)
        row = torch.arange(page_B.shape[0], device=call.device)
        of_page = self.summary(keys_BGLD, self._dtype(keys_BGLD))
        for name, x in zip(state.paged, of_page, strict=True):
            getattr(state, name)[row, :, page_B] = x

    def score(self, call: AttentionCall, state: ChannelState) -> Tensor:
        center = query_page_products(call.q_BHD, state.center_BGPD)
        spread = query_page_products(call.q_BHD.abs(), state.spread_BGPD)
        return call.scale * (center + spread)

    def new_state(self, *tensors: Tensor) -> ChannelState:
        return ChannelState(*tensors)

    def _dtype(self, keys: Tensor) -> torch.dtype:
        return keys.dtype if self.metadata_dtype == "auto" else torch.float32


def query_page_products(q_BHD: Tensor, x_BGPD: Tensor) -> Tensor:
    """q·x for each head and page: [B, H, P] in float32 (float64 stays); x's batch may be 1."""
    dtype = torch.promote_types(q_BHD.dtype, torch.float32)
    num_rows, num_heads, head_dim = q_BHD.shape
    num_kv_heads, num_pages = x_BGPD.shape[1:3]
    q = q_BHD.to(dtype).reshape(num_rows, num_kv_heads, -1, head_dim)
    x_BGDP = x_BGPD.to(dtype).transpose(-1, -2)
    if x_BGDP.shape[0] == 1:  # rows share one cache: one product per KV head, not one per row
        flat = q.transpose(0, 1).reshape(num_kv_heads, -1, head_dim) @ x_BGDP[0]
        return flat.unflatten(1, (num_rows, -1)).transpose(0, 1).reshape(num_rows, num_heads, -1)
    return (q @ x_BGDP).reshape(num_rows, num_heads, num_pages)


def share_in_group(logit_BHP: Tensor, num_kv_heads: int, rule: str, full_BP: Tensor) -> Tensor:
    """One score per list from per-head logits: [B, G, P], or [B, H, P] for per_head.

    max, sum: of the logits. softmax_sum: each head's softmax over its full pages, summed."""
    if rule == "per_head":
        return logit_BHP
    if rule == "softmax_sum":
        logit_BHP = logit_BHP.masked_fill(~full_BP[:, None], -torch.inf).softmax(-1)
    grouped = logit_BHP.unflatten(1, (num_kv_heads, -1))
    return grouped.amax(2) if rule == "max" else grouped.sum(2)
