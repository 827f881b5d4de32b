"""What a selection held of the dense softmax, as pure functions of tensors.

All take float tensors over T queries and H = G·M heads and return one number per KV head [G].
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
    return x_TH.unflatten(1, (num_kv_heads, -1)).mean((0, 2))


def p10_per_kv_head(x_TH: Tensor, num_kv_heads: int) -> Tensor:
    """The 10th percentile over queries and the group's heads."""
    per_head = x_TH.unflatten(1, (num_kv_heads, -1)).transpose(0, 1).flatten(1)
    return per_head.quantile(0.1, dim=1)


def contested(recall_G: Tensor, forced_G: Tensor) -> Tensor:
    """What the policy found of the mass the forced pages do not hold; NaN where they hold all."""
    left = 1 - forced_G
    return ((recall_G - forced_G) / left).masked_fill(left < CONTESTED_MIN, torch.nan)


def output_error(out_THE: Tensor, dense_THE: Tensor, num_kv_heads: int) -> Tensor:
    """√Σ‖o − o_dense‖² / √Σ‖o_dense‖², sums over queries and the group's heads."""
    error = (out_THE.double() - dense_THE.double()).square().sum(-1)
    size = dense_THE.double().square().sum(-1)
    return (_sum_G(error, num_kv_heads) / _sum_G(size, num_kv_heads)).sqrt()


def _sum_G(x_TH: Tensor, num_kv_heads: int) -> Tensor:
    return x_TH.unflatten(1, (num_kv_heads, -1)).sum((0, 2))


def page_overlap(chosen_TSP: Tensor, mass_TSP: Tensor, current_TP: Tensor) -> Tensor:
    """|chosen ∩ oracle| / |chosen|, the oracle's set being as large and holding the current page.

    chosen_TSP: bool. mass_TSP: the dense mass of each page for each list. Mean over T: [S]."""
    ranked = mass_TSP.masked_fill(current_TP[:, None], torch.inf)
    rank = ranked.sort(dim=-1, descending=True, stable=True).indices.argsort(-1)
    count = chosen_TSP.sum(-1, keepdim=True)
    shared = (chosen_TSP & (rank < count)).sum(-1)
    return (shared / count[..., 0].clamp_min(1)).double().mean(0)
