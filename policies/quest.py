"""Quest: bound each page's best logit by its per-channel key min and max, read the best pages.

Source: Tang et al. 2024, https://arxiv.org/abs/2406.10774. Its sum over channels of
max(q·lo, q·hi) equals q·mid + |q|·half.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sparse_eval.core import AttentionCall
from sparse_eval.kernels.quest_select import can_select, quest_select, update_metadata
from sparse_eval.policies.base import (
    Selection,
    check_one_of,
    check_triton_heads,
    num_pages_of,
)
from sparse_eval.policies.metadata import ChannelState, query_page_products
from sparse_eval.policies.page_score import ChannelScorePolicy

SELECT_BACKENDS = ("auto", "torch", "triton")
EIGHT_BITS = "int8"
SAME_SIZE = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass
class ByteState(ChannelState):
    """center int8 and spread uint8, to be multiplied by a page's two scales, [B, G, P, 2]."""

    scales_BGP2: Tensor
    paged: ClassVar[tuple[str, ...]] = ("center_BGPD", "spread_BGPD", "scales_BGP2")


@dataclass(frozen=True, kw_only=True)
class Quest(ChannelScorePolicy):
    """Center and spread are the middle and the half-width of the page's key box.

    metadata_dtype: auto (the keys' own), float32, or int8, a scale per page: half the bytes, and
    the box still covers every key. select_backend: who extends metadata and selects: torch, triton
    (groups max and sum), or auto: triton on a GPU where it has the group rule, the dtype and room
    for the pages."""

    select_backend: str = "auto"
    metadata_dtypes: ClassVar[tuple[str, ...]] = ("auto", "float32", EIGHT_BITS)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_one_of("select_backend", self.select_backend, SELECT_BACKENDS)
        if self.select_backend == "triton" and not can_select(self.group, 1):
            raise ValueError(f"select_backend triton takes group max or sum, got {self.group!r}")

    def check_cache(self, head_dim: int | None, num_tokens: int) -> None:
        num_pages = num_pages_of(num_tokens, self.page_size)
        if self.select_backend != "triton":
            return
        check_triton_heads(head_dim)
        if not can_select(self.group, num_pages):
            raise ValueError(
                "select_backend triton takes fewer than 32,768 pages, got "
                f"{num_pages:,} of page_size={self.page_size}"
            )

    def backend(self, call: AttentionCall, state: ChannelState) -> str:
        """The backend that select_backend means for this call."""
        if self.select_backend != "auto":
            return self.select_backend
        on_gpu = call.device.type == "cuda" and call.q_BHD.dtype != torch.float64
        return (
            "triton" if on_gpu and can_select(self.group, state.center_BGPD.shape[2]) else "torch"
        )

    def extend(self, state: ChannelState, call: AttentionCall) -> None:
        state.grow(num_pages_of(call.capacity, self.page_size))
        if self.backend(call, state) == "torch":
            super().extend(state, call)
            return
        update_metadata(
            *(call.k_BGND, state.center_BGPD, state.spread_BGPD, call.starts_B, call.lengths_B),
            page_size=self.page_size,
            backend="triton",
            scales=scales_of(state),
        )

    def select(self, call: AttentionCall, state: ChannelState, budget: int | None) -> Selection:
        if self.backend(call, state) == "torch":
            return super().select(call, state, budget)
        pages, counts = quest_select(
            *(call.q_BHD, call.k_BGND, state.center_BGPD, state.spread_BGPD),
            *(call.starts_B, call.lengths_B),
            page_size=self.page_size,
            budget=self.checked(budget),
            sink_pages=self.sink_pages,
            local_pages=self.local_pages,
            group=self.group,
            scale=call.scale,
            backend="triton",
            scales=scales_of(state),
        )
        return Selection(pages, counts, self.page_size)

    def score(self, call: AttentionCall, state: ChannelState) -> Tensor:
        scales = scales_of(state)
        if scales is None:
            return super().score(call, state)
        center = query_page_products(call.q_BHD, state.center_BGPD)
        spread = query_page_products(call.q_BHD.abs(), state.spread_BGPD)
        scales = scales.repeat_interleave(call.group_size, 1)  # [B or 1, H, P, 2]
        return call.scale * (center * scales[..., 0] + spread * scales[..., 1])

    def summary(self, keys: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
        return (
            key_box_in_8_bits(keys) if self.metadata_dtype == EIGHT_BITS else key_box(keys, dtype)
        )

    def new_state(self, *tensors: Tensor) -> ChannelState:
        return ByteState(*tensors) if len(tensors) == 3 else super().new_state(*tensors)


def scales_of(state: ChannelState) -> Tensor | None:
    return state.scales_BGP2 if isinstance(state, ByteState) else None


def key_box(keys: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Mid and half-width, in dtype, of a box around keys [..., page_size, D]: half is rounded
    outward from the rounded mid, so that [mid - half, mid + half] covers every key."""
    lo, hi = keys.amin(-2).double(), keys.amax(-2).double()
    mid = ((lo + hi) / 2).to(dtype)
    half = torch.maximum(hi - mid.double(), mid.double() - lo)
    return mid, round_up(half, dtype)


def key_box_in_8_bits(keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same in 8 bits: mid int8, half uint8 and a page's scales of the two [..., 2] float32.
    half is rounded outward from the rounded mid, so the box covers every key."""
    lo, hi = keys.amin(-2).double(), keys.amax(-2).double()
    mid = (lo + hi) / 2
    scale = positive((mid.abs().amax(-1, keepdim=True) / 127).float())
    code = (mid / scale.double() + 0.5).floor()
    center = code * scale.double()
    half = torch.maximum(hi - center, center - lo)
    half_scale = positive(round_up(half.amax(-1, keepdim=True) / 255, torch.float32))
    half_code = (half / half_scale.double()).ceil()
    half_code += half_code * half_scale.double() < half
    return code.to(torch.int8), half_code.to(torch.uint8), torch.cat((scale, half_scale), -1)


def positive(scale: Tensor) -> Tensor:
    """1 in place of 0: a page of equal keys has no width."""
    return scale.masked_fill(scale == 0, 1)


def round_up(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The smallest number of dtype that is >= x (float64, >= 0)."""
    nearest = x.to(dtype)
    # of floats >= 0 the next larger has the next larger bits; nextafter lacks some dtypes
    above = (nearest.view(SAME_SIZE[dtype.itemsize]) + 1).view(dtype)
    return torch.where(nearest.double() < x, above, nearest)
