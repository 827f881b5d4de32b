"""What a selection held of the dense softmax, as pure functions of tensors.

T queries and H = G·M heads stand last but for named axes; any axes before them (layers) are kept.
Results are float64 per KV head: [..., G].
"""

from __future__ import annotations

import torch
from torch import Tensor

RECALL_TOLERANCE = 1e-5
CONTESTED_MIN = 1e-3


def mass(lse_selected_TH: Tensor, lse_dense_TH: Tensor) -> Tensor:
    """The share of the dense softmax's mass that the selected tokens hold, per query and head."""
    return (lse_selected_TH.double() - lse_dense_TH.double()).exp()


def mean_per_kv_head(x_TH: Tensor, num_kv_heads: int) -> Tensor:
    return x_TH.double().unflatten(-1, (num_kv_heads, -1)).mean((-3, -1))


def p10_per_kv_head(x_TH: Tensor, num_kv_heads: int) -> Tensor:
    """The 10th percentile over queries and the group's heads."""
    x_GTM = x_TH.double().unflatten(-1, (num_kv_heads, -1)).transpose(-3, -2)
    return x_GTM.flatten(-2).quantile(0.1, dim=-1)


def contested(recall_G: Tensor, forced_G: Tensor) -> Tensor:
    """What the policy found of the mass the forced pages do not hold; NaN where they hold all."""
    left = 1 - forced_G
    return ((recall_G - forced_G) / left).masked_fill(left < CONTESTED_MIN, torch.nan)


def output_error(out_THE: Tensor, dense_THE: Tensor, num_kv_heads: int) -> Tensor:
    """√Σ‖o − o_dense‖² / √Σ‖o_dense‖², sums over queries and the group's heads."""
    dense = dense_THE.double()
    error_TH = (out_THE.double() - dense).square().sum(-1)
    size_TH = dense.square().sum(-1)
    return (
        mean_per_kv_head(error_TH, num_kv_heads) / mean_per_kv_head(size_TH, num_kv_heads)
    ).sqrt()


def page_ranks(mass_TSP: Tensor, current_TP: Tensor) -> Tensor:
    """Each page's place when a list's pages are ordered by dense mass, the current page first."""
    ranked = mass_TSP.masked_fill(current_TP[:, None], torch.inf)
    return ranked.sort(dim=-1, descending=True, stable=True).indices.argsort(-1)


def page_overlap(chosen_TSP: Tensor, ranks_TSP: Tensor) -> Tensor:
    """|chosen ∩ oracle| / |chosen|, the oracle reading as many pages. Mean over T: [..., S]."""
    count = chosen_TSP.sum(-1, keepdim=True)
    shared = (chosen_TSP & (ranks_TSP < count)).sum(-1)
    return (shared / count[..., 0].clamp_min(1)).double().mean(-2)
