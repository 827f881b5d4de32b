"""Faster Flash Decoding: read every page within δ of the peak of 2-bit key thumbnails.

A key is a thumbnail of 2 bits a coordinate (mid-rise: symmetric, without a zero) and an 8-bit
residual. top-δ keeps what scores within δ logits of the row's maximum, so that each dropped token
weighs at most e^-δ of the peak; a pseudo-maximum over the sink and local tokens stands in for the
maximum: it is never higher, so the set can only grow. Each query head chooses, a group reads the
union. There is no budget: a head reads as many pages as its scores ask for.

Only full pages have thumbnails; the page that still fills is local, and read. Published: δ = 5 and 7,
sparsity 82 % and 73 %. Where this follows its own mind, fields say so: scales, widen, attend.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from sparse_eval.core import AttentionCall
from sparse_eval.kernels.thumbnail import Residual, pack_residual, unpack, unpack_residual
from sparse_eval.kernels.thumbnail.format import unit_of
from sparse_eval.policies.base import (
    Policy,
    Selection,
    check_flag,
    check_number,
    check_one_of,
    forced_BP,
    full_BP,
)
from sparse_eval.policies.metadata import build_metadata, extend_metadata
from sparse_eval.policies.rules import peak_BH1, union_selection, within_delta_BHP
from sparse_eval.policies.scored import check_cap
from sparse_eval.policies.thumbnail import ThumbnailScore, ThumbnailState


@dataclass
class ResidualState(ThumbnailState):
    """residual_BGPLD: uint8, what the thumbnails leave of their keys."""

    residual_BGPLD: Tensor
    paged: ClassVar[tuple[str, ...]] = ("codes_BGPLC", "step_BGPX", "residual_BGPLD")


@dataclass(frozen=True, kw_only=True)
class FFD(Policy[ThumbnailState]):
    """delta: in logits. bits: 2 or 4. scales: a step per token, or per channel of a page.

    widen: false compares thumbnail scores with thumbnail scores; true widens delta by the
    thumbnails' stated error bound on both sides, so that no token within delta of the true maximum
    is missed. attend: exact keys, or residual: full pages as thumbnail + residual. max_tokens:
    most tokens a KV head reads, the pages furthest below the peak dropped first; None: no cap."""

    delta: float = 5.0
    bits: int = 2
    scales: str = "channel"
    widen: bool = False
    attend: str = "exact"
    max_tokens: int | None = None
    evidence: ClassVar[Literal["query"]] = "query"
    adaptive: ClassVar[bool] = True
    dense_at: ClassVar[dict[str, Any]] = {"delta": float("inf")}

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("delta", self.delta, 0)
        check_flag("widen", self.widen)
        check_one_of("attend", self.attend, ("exact", "residual"))
        check_cap(self, self.max_tokens)
        self.thumbnails  # noqa: B018  (bits and scales are checked there)

    @property
    def thumbnails(self) -> ThumbnailScore:
        return ThumbnailScore(bits=self.bits, scales=self.scales)

    def init(self, call: AttentionCall, prompt_queries_BWHD: Tensor | None = None) -> ThumbnailState:
        kind = ResidualState if self.attend == "residual" else ThumbnailState
        return build_metadata(kind, call, self.page_size, self._summary)

    def extend(self, state: ThumbnailState, call: AttentionCall) -> None:
        extend_metadata(state, call, self.page_size, self._summary)

    def select(self, call: AttentionCall, state: ThumbnailState, budget: int | None) -> Selection:
        least_BHP, most_BHP = self.page_maxima(call, state)
        num_pages = most_BHP.shape[-1]
        known_BP = full_BP(call, self.page_size, num_pages)
        pseudo_max = peak_BH1(least_BHP, known_BP & forced_BP(call, self, num_pages))
        own_BHP = within_delta_BHP(most_BHP, pseudo_max, self.delta)
        margin_BHP = most_BHP - pseudo_max
        return union_selection(own_BHP, margin_BHP, known_BP, call, self, self.max_tokens)

    def page_maxima(self, call: AttentionCall, state: ThumbnailState) -> tuple[Tensor, Tensor]:
        """The least and the most that each page's largest logit can be, [B, H, P]: twice the
        thumbnails' own word, or with `widen` an interval that holds the true one."""
        logit = self.thumbnails.token_logits(call, state)
        if not self.widen:
            return (logit.amax(-1),) * 2
        error = self.thumbnails.token_errors(call, state)
        return (logit - error).amax(-1), (logit + error).amax(-1)

    def attended_keys(self, call: AttentionCall, state: ThumbnailState) -> Tensor:
        """With attend=residual, full pages as 2 (4) + 8 bits keep them; else the cache's keys."""
        if self.attend == "exact":
            return call.k_BGND
        packed = self.thumbnails.packed(state)
        left = Residual(state.residual_BGPLD.flatten(2, 3), unit_of(packed))  # type: ignore[attr-defined]
        kept_BGND = unpack(packed) + unpack_residual(left, packed)
        token = torch.arange(call.k_BGND.shape[2], device=call.device)
        position_BN = token.expand(len(call.lengths_B), -1)
        if call.starts_B is not None:
            position_BN = position_BN - call.starts_B.long()[:, None]
        num_full_B = torch.div(call.lengths_B, self.page_size, rounding_mode="floor")
        is_full_BN = (position_BN >= 0) & (position_BN < num_full_B[:, None] * self.page_size)
        index = position_BN.clamp(0, kept_BGND.shape[2] - 1)[:, None, :, None]
        kept_BGND = kept_BGND.expand(len(index), -1, -1, -1)
        kept = kept_BGND.gather(2, index.expand(-1, call.num_kv_heads, -1, kept_BGND.shape[3]))
        return torch.where(is_full_BN[:, None, :, None], kept.to(call.k_BGND.dtype), call.k_BGND)

    def _summary(self, keys_BGPLD: Tensor) -> tuple[Tensor, ...]:
        codes, step = self.thumbnails.pack(keys_BGPLD)
        if self.attend == "exact":
            return codes, step
        packed = self.thumbnails.packed(ThumbnailState(codes, step))
        left = pack_residual(keys_BGPLD.flatten(2, 3), packed).codes
        return codes, step, left.unflatten(2, keys_BGPLD.shape[2:4])
