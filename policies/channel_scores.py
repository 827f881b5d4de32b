"""Scores from a centre and a spread per channel of a page: bound, mean, mean + std."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sparse_eval.core import AttentionCall
from sparse_eval.policies.base import State, check_one_of
from sparse_eval.policies.mean_std import mean_and_std
from sparse_eval.policies.metadata import (
    METADATA_DTYPES,
    ChannelState,
    build_metadata,
    channel_logits,
    extend_metadata,
    metadata_dtype,
    query_page_products,
)
from sparse_eval.policies.quest import key_box
from sparse_eval.policies.score import Score


@dataclass(frozen=True, kw_only=True)
class ChannelScore(Score[ChannelState]):
    """metadata_dtype: auto (the keys' own) or float32."""

    metadata_dtype: str = "auto"

    def __post_init__(self) -> None:
        check_one_of("score.metadata_dtype", self.metadata_dtype, METADATA_DTYPES)

    @abstractmethod
    def summary(self, keys: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Center and spread over the tokens of keys [..., page_size, D], stored in dtype."""

    def init(self, call: AttentionCall, page_size: int) -> ChannelState:
        return build_metadata(ChannelState, call, page_size, self._summary)

    def extend(self, state: ChannelState, call: AttentionCall, page_size: int) -> None:
        extend_metadata(state, call, page_size, self._summary)

    def max(self, call: AttentionCall, state: ChannelState, page_size: int) -> Tensor:
        return channel_logits(call, state)

    def _summary(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        return self.summary(keys, metadata_dtype(keys, self.metadata_dtype))


@dataclass(frozen=True, kw_only=True)
class BoundScore(ChannelScore):
    """Quest's: max is at least every logit of the page. log_mass = max + log page_size is the most
    that page_size tokens under that bound can hold: an upper bound too, loose by up to
    log page_size even where the bound is tight."""

    name: ClassVar[str] = "bound"

    def summary(self, keys: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return key_box(keys, dtype)

    def log_mass(self, call: AttentionCall, state: ChannelState, page_size: int) -> Tensor:
        return self.max(call, state, page_size) + math.log(page_size)


@dataclass(frozen=True, kw_only=True)
class MeanStdScore(ChannelScore):
    """Mean plus one standard deviation along the query's signs: an estimate of the largest logit.
    It is no estimate of a sum of exponentials: no log_mass."""

    name: ClassVar[str] = "mean_std"
    gives: ClassVar[tuple[str, ...]] = ("max",)

    def summary(self, keys: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return mean_and_std(keys, dtype)


@dataclass
class MeanState(State):
    """The mean key of each full page, [B, G, P, D]."""

    mean_BGPD: Tensor
    paged: ClassVar[tuple[str, ...]] = ("mean_BGPD",)


@dataclass(frozen=True, kw_only=True)
class MeanScore(Score[MeanState]):
    """The mean key's logit, which is the mean of the page's logits: at most their largest, and
    log_mass = that + log page_size at most the true one (Jensen), both up to the rounding of the
    mean in its stored dtype.

    metadata_dtype: auto (the keys' own) or float32."""

    metadata_dtype: str = "auto"
    name: ClassVar[str] = "mean"

    def __post_init__(self) -> None:
        check_one_of("score.metadata_dtype", self.metadata_dtype, METADATA_DTYPES)

    def init(self, call: AttentionCall, page_size: int) -> MeanState:
        return build_metadata(MeanState, call, page_size, self._summary)

    def extend(self, state: MeanState, call: AttentionCall, page_size: int) -> None:
        extend_metadata(state, call, page_size, self._summary)

    def max(self, call: AttentionCall, state: MeanState, page_size: int) -> Tensor:
        return call.scale * query_page_products(call.q_BHD, state.mean_BGPD)

    def log_mass(self, call: AttentionCall, state: MeanState, page_size: int) -> Tensor:
        return self.max(call, state, page_size) + math.log(page_size)

    def _summary(self, keys: Tensor) -> tuple[Tensor]:
        exact = torch.promote_types(keys.dtype, torch.float32)
        return (keys.mean(-2, dtype=exact).to(metadata_dtype(keys, self.metadata_dtype)),)
