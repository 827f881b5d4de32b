"""Quest: bound each page's best logit by its per-channel key min and max, read the best pages.

Source: Tang et al. 2024, https://arxiv.org/abs/2406.10774. Its sum over channels of
max(q·lo, q·hi) equals q·mid + |q|·half.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparse_eval.core import AttentionCall
from sparse_eval.kernels.quest_select import can_select, quest_select, update_metadata
from sparse_eval.policies.base import Selection, check_one_of, num_pages_of
from sparse_eval.policies.metadata import ChannelState
from sparse_eval.policies.page_score import ChannelScorePolicy

SELECT_BACKENDS = ("auto", "torch", "triton")
SAME_SIZE = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, kw_only=True)
class Quest(ChannelScorePolicy):
    """Center and spread are the middle and the half-width of the page's key box.

    select_backend: who extends metadata and selects: torch, triton (groups max and sum), or auto:
    triton on a GPU where it has the group rule, the dtype and room for the pages."""

    select_backend: str = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_one_of("select_backend", self.select_backend, SELECT_BACKENDS)
        if self.select_backend == "triton" and not can_select(self.group, 1):
            raise ValueError(f"select_backend triton takes group max or sum, got {self.group!r}")

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
        )
        return Selection(pages, counts, self.page_size)

    def summary(self, keys: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return key_box(keys, dtype)


def key_box(keys: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Mid and half-width, in dtype, of a box around keys [..., page_size, D]: half is rounded
    outward from the rounded mid, so that [mid - half, mid + half] covers every key."""
    lo, hi = keys.amin(-2).double(), keys.amax(-2).double()
    mid = ((lo + hi) / 2).to(dtype)
    half = torch.maximum(hi - mid.double(), mid.double() - lo)
    return mid, round_up(half, dtype)


def round_up(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The smallest number of dtype that is >= x (float64, >= 0)."""
    nearest = x.to(dtype)
    # of floats >= 0 the next larger has the next larger bits; nextafter lacks some dtypes
    above = (nearest.view(SAME_SIZE[dtype.itemsize]) + 1).view(dtype)
    return torch.where(nearest.double() < x, above, nearest)
