"""Policies that score each page against the query: from a score per query head to a selection.

A score is in units of the logits, scale · q·k, and speaks of full pages only: the current page has
no metadata and is always read. Scores that combine with any rule are in score.py.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from sparse_eval.core import AttentionCall
from sparse_eval.policies.base import Policy, Selection, StateT, check_one_of, full_BP
from sparse_eval.policies.metadata import (
    METADATA_DTYPES,
    ChannelState,
    build_metadata,
    channel_logits,
    extend_metadata,
    metadata_dtype,
)
from sparse_eval.policies.metadata import query_page_products as query_page_products
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


@dataclass(frozen=True, kw_only=True)
class ChannelScorePolicy(PageScorePolicy[ChannelState]):
    """Scores a page by scale · (q·center + |q|·spread): two matrix products.

    metadata_dtype: auto (the keys' own) or float32."""

    metadata_dtype: str = "auto"
    metadata_dtypes: ClassVar[tuple[str, ...]] = METADATA_DTYPES

    def __post_init__(self) -> None:
        super().__post_init__()
        check_one_of("metadata_dtype", self.metadata_dtype, self.metadata_dtypes)

    @abstractmethod
    def summary(self, keys: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """The state's paged tensors over the tokens of keys [..., page_size, D]: center and spread,
        stored in dtype."""

    def init(self, call: AttentionCall, prompt_queries_BWHD: Tensor | None = None) -> ChannelState:
        return build_metadata(self.new_state, call, self.page_size, self._summary)

    def extend(self, state: ChannelState, call: AttentionCall) -> None:
        extend_metadata(state, call, self.page_size, self._summary)

    def score(self, call: AttentionCall, state: ChannelState) -> Tensor:
        return channel_logits(call, state)

    def new_state(self, *tensors: Tensor) -> ChannelState:
        return ChannelState(*tensors)

    def _summary(self, keys: Tensor) -> tuple[Tensor, ...]:
        return self.summary(keys, metadata_dtype(keys, self.metadata_dtype))


def share_in_group(logit_BHP: Tensor, num_kv_heads: int, rule: str, full_BP: Tensor) -> Tensor:
    """One score per list from per-head logits: [B, G, P], or [B, H, P] for per_head.

    max, sum: of the logits. softmax_sum: each head's softmax over its full pages, summed."""
    if rule == "per_head":
        return logit_BHP
    if rule == "softmax_sum":
        logit_BHP = logit_BHP.masked_fill(~full_BP[:, None], -torch.inf).softmax(-1)
    grouped = logit_BHP.unflatten(1, (num_kv_heads, -1))
    return grouped.amax(2) if rule == "max" else grouped.sum(2)
