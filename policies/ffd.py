"""Faster Flash Decoding: read every page within δ of the peak of 2-bit key thumbnails.

A key is a thumbnail of 2 bits a coordinate (mid-rise: levels ±½ and ±1½ steps, no zero) and an
8-bit residual. top-δ keeps what scores within δ logits of the row's maximum, so that each dropped
token weighs at most e^-δ of the peak; a pseudo-maximum over the sink and local tokens stands in for
the maximum: it is never higher, so the set can only grow. Each query head chooses, a group reads
the union. There is no budget: a head reads as many pages as its scores ask for.

Only full pages have thumbnails; the page that still fills is local, and read. Published: δ = 5 and
7, sparsity 82 % and 73 %. What the description leaves open are fields: scales, pseudo_max, attend.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from sparse_eval.core import AttentionCall
from sparse_eval.kernels.ffd import ffd_select
from sparse_eval.kernels.ffd.api import PSEUDO_MAX
from sparse_eval.kernels.ffd.reference import refined_keys
from sparse_eval.kernels.thumbnail import (
    MAX_TRITON_PAGE_SIZE,
    Residual,
    can_use_triton,
    pack_residual,
)
from sparse_eval.kernels.thumbnail.format import unit_of
from sparse_eval.policies.base import (
    Policy,
    Selection,
    check_number,
    check_one_of,
    check_triton_heads,
    current_page_B,
    forced_BP,
    full_BP,
    gather_tokens,
)
from sparse_eval.policies.metadata import build_metadata, extend_metadata, query_page_products
from sparse_eval.policies.rules import margin_BHP, peak_BH1, union_selection, within_delta_BHP
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

    pseudo_max: thumbnail compares thumbnail scores with thumbnail scores; exact takes the maximum
    from the sink and local keys themselves and raises every score by its stated error bound, so
    that no token within delta of the true maximum is missed. attend: exact keys, or residual: full
    pages as thumbnail + residual. max_tokens: most tokens a KV head reads, the pages furthest below
    the pseudo-maximum dropped first; None: no cap. select_backend: torch; or triton, which scans
    packed keys, has no cap, does not tell what single heads chose and leaves out NaN scores, which
    torch reads."""

    delta: float = 5.0
    bits: int = 2
    scales: str = "channel"
    pseudo_max: str = "thumbnail"
    attend: str = "exact"
    max_tokens: int | None = None
    select_backend: str = "torch"
    evidence: ClassVar[Literal["query"]] = "query"
    adaptive: ClassVar[bool] = True
    dense_at: ClassVar[dict[str, Any]] = {"delta": float("inf")}

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("delta", self.delta, 0)
        check_one_of("pseudo_max", self.pseudo_max, PSEUDO_MAX)
        check_one_of("attend", self.attend, ("exact", "residual"))
        check_cap(self, self.max_tokens)
        check_one_of("select_backend", self.select_backend, ("torch", "triton"))
        if self.select_backend == "triton" and self.max_tokens is not None:
            raise ValueError(f"select_backend triton has no cap, got max_tokens={self.max_tokens}")
        if self.select_backend == "triton" and not can_use_triton(self.page_size):
            raise ValueError(
                "select_backend triton takes page sizes that are powers of two up to "
                f"{MAX_TRITON_PAGE_SIZE}, got page_size={self.page_size}"
            )
        self.thumbnails  # noqa: B018  (bits and scales are checked there)

    @property
    def thumbnails(self) -> ThumbnailScore:
        return ThumbnailScore(bits=self.bits, scales=self.scales)

    def check_cache(self, head_dim: int | None, num_tokens: int) -> None:
        self.thumbnails.check_heads(head_dim)
        if self.select_backend == "triton":
            check_triton_heads(head_dim)

    def init(
        self, call: AttentionCall, prompt_queries_BWHD: Tensor | None = None
    ) -> ThumbnailState:
        kind = ResidualState if self.attend == "residual" else ThumbnailState
        return build_metadata(kind, call, self.page_size, self._summary)

    def extend(self, state: ThumbnailState, call: AttentionCall) -> None:
        extend_metadata(state, call, self.page_size, self._summary)

    def select(self, call: AttentionCall, state: ThumbnailState, budget: int | None) -> Selection:
        if self.select_backend == "triton":
            return self._select_triton(call, state)
        logit_BHPL = self.thumbnails.token_logits(call, state)
        if self.pseudo_max == "exact":
            logit_BHPL = logit_BHPL + self.thumbnails.token_errors(call, state)
        max_BHP = logit_BHPL.amax(-1)
        num_pages = max_BHP.shape[-1]
        known_BP = full_BP(call, self.page_size, num_pages)
        if self.pseudo_max == "exact":
            peak = forced_logits(call, self).amax(-1, keepdim=True)
        else:
            peak = peak_BH1(max_BHP, known_BP & forced_BP(call, self, num_pages))
        own_BHP = within_delta_BHP(max_BHP, peak, self.delta)
        margin = margin_BHP(max_BHP, peak, known_BP)
        return union_selection(own_BHP, margin, known_BP, call, self, self.max_tokens)

    def _select_triton(self, call: AttentionCall, state: ThumbnailState) -> Selection:
        pages, counts = ffd_select(
            *(call.q_BHD, call.k_BGND, self.thumbnails.packed(state)),
            *(call.starts_B, call.lengths_B),
            delta=self.delta,
            sink_pages=self.sink_pages,
            local_pages=self.local_pages,
            scale=call.scale,
            backend="triton",
            pseudo_max=self.pseudo_max,
        )
        return Selection(pages, counts, self.page_size)

    def attended_keys(self, call: AttentionCall, state: ThumbnailState) -> Tensor:
        """With attend=residual, full pages as 2 (4) + 8 bits keep them; else the cache's keys."""
        if self.attend == "exact":
            return call.k_BGND
        packed = self.thumbnails.packed(state)
        left = Residual(state.residual_BGPLD.flatten(2, 3), unit_of(packed))  # type: ignore[attr-defined]
        keys = refined_keys(call.k_BGND, packed, left, call.starts_B, call.lengths_B)
        return keys.to(call.k_BGND.dtype)

    def _summary(self, keys_BGPLD: Tensor) -> tuple[Tensor, ...]:
        codes, step = self.thumbnails.pack(keys_BGPLD)
        if self.attend == "exact":
            return codes, step
        packed = self.thumbnails.packed(ThumbnailState(codes, step))
        left = pack_residual(keys_BGPLD.flatten(2, 3), packed).codes
        return codes, step, left.unflatten(2, keys_BGPLD.shape[2:4])


def forced_logits(call: AttentionCall, policy: Policy) -> Tensor:
    """True logits of each row's sink and local tokens, -inf where there is none: [B, H, tokens] in
    float64, so that their rounding adds nothing to a maximum."""
    size = policy.page_size
    local = (current_page_B(call, size) - policy.local_pages + 1).clamp_min(0) * size
    parts = []
    for first_B, num_tokens in (
        (torch.zeros_like(local), policy.sink_pages * size),
        (local, policy.local_pages * size),
    ):
        start_B = first_B if call.starts_B is None else first_B + call.starts_B.long()
        keys = gather_tokens(call.k_BGND, start_B[:, None], num_tokens)
        logit = call.scale * query_page_products(call.q_BHD.double(), keys)
        position = first_B[:, None] + torch.arange(num_tokens, device=call.device)
        is_live = position < call.lengths_B[:, None]
        parts.append(logit.masked_fill(~is_live[:, None], -torch.inf))
    return torch.cat(parts, -1)
