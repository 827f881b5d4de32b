"""Quest: bound each page's best logit by its per-channel key min and max, read the best pages.

Source: Tang et al. 2024, https://arxiv.org/abs/2406.10774. Its sum over channels of
max(q·lo, q·hi) equals q·mid + |q|·half.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparse_eval.policies.page_score import ChannelScorePolicy

SAME_SIZE = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, kw_only=True)
class Quest(ChannelScorePolicy):
    """Center and spread are the middle and the half-width of the page's key box."""

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
