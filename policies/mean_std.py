"""Mean + std: Quest's score with the page's mean key and standard deviation in place of the corner.

The corner of the key box is far from every key when a page's channels vary independently; the mean
and one standard deviation along the query's signs cost the same bytes and sit nearer. No bound.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparse_eval.policies.page_score import ChannelScorePolicy


@dataclass(frozen=True, kw_only=True)
class MeanStd(ChannelScorePolicy):
    """Center and spread are the mean and the (population) standard deviation of the page's keys."""

    def summary(self, keys: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return mean_and_std(keys, dtype)


def mean_and_std(keys: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Over the tokens of keys [..., page_size, D], computed in float32 or wider."""
    exact = torch.promote_types(keys.dtype, torch.float32)
    mean = keys.mean(-2, keepdim=True, dtype=exact)
    std = (keys - mean).square().mean(-2).sqrt()
    return mean.squeeze(-2).to(dtype), std.to(dtype)
