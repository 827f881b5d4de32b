"""Adaptive rules: how many pages a query head needs, from its scores; then the group's union.

top-δ keeps what scores within δ of a peak, so that each dropped token weighs at most e^-δ of the
peak. top-p keeps the fewest pages whose masses reach a share p of all. Top-k is in topk.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparse_eval.core import AttentionCall
from sparse_eval.policies.base import (
    Policy,
    Selection,
    forced_BP,
    held_BP,
    num_pages_of,
    selection_from_mask,
    visible_BP,
)
from sparse_eval.policies.topk import top_BSP


def peak_BH1(max_BHP: Tensor, of_BP: Tensor) -> Tensor:
    """The largest score of each head over the pages of_BP; -inf where there are none."""
    return max_BHP.masked_fill(~of_BP[:, None], -torch.inf).amax(-1, keepdim=True)


def margin_BHP(max_BHP: Tensor, peak: Tensor, known_BP: Tensor) -> Tensor:
    """Scores relative to each head's peak; where that is -inf (no page to take it from), to the
    peak of all known pages, so that a cap still drops the lowest first."""
    level = torch.where(peak == -torch.inf, peak_BH1(max_BHP, known_BP), peak)
    return max_BHP - level


def within_delta_BHP(max_BHP: Tensor, peak: Tensor, delta: float) -> Tensor:
    """True where a page scores within delta of its head's peak; NaN is within."""
    return ~(max_BHP < peak - delta)


def nucleus_BHP(log_mass_BHP: Tensor, known_BP: Tensor, first_BP: Tensor, p: float) -> Tensor:
    """The pages of first_BP and the fewest others, best first and ties to the lowest id, with which
    the masses reach p of all known pages'; p = 1: all."""
    if p >= 1:
        return torch.ones_like(log_mass_BHP, dtype=torch.bool)
    share = log_mass_BHP.double().masked_fill(~known_BP[:, None], -torch.inf).softmax(-1)
    rank = share.masked_fill(first_BP[:, None], 2.0)  # shares are at most 1
    order = rank.sort(dim=-1, descending=True, stable=True).indices
    so_far = share.gather(-1, order).cumsum(-1)
    before = torch.nn.functional.pad(so_far[..., :-1], (1, 0))
    # NaN (a row without known pages) reaches nothing
    wanted = torch.empty_like(share, dtype=torch.bool).scatter_(-1, order, ~(before >= p))
    return wanted | first_BP[:, None]


def union_selection(
    own_BHP: Tensor,
    margin_BHP: Tensor,
    known_BP: Tensor,
    call: AttentionCall,
    policy: Policy,
    max_tokens: int | None,
) -> Selection:
    """The union over each group of what its heads chose among known pages, and the forced pages.

    margin_BHP: what pages are dropped by, the lowest first, where the union exceeds max_tokens."""
    num_pages = own_BHP.shape[-1]
    assert num_pages * policy.page_size >= call.k_BGND.shape[2], "state must be extended each step"
    forced = forced_BP(call, policy, num_pages)[:, None]
    visible = visible_BP(call, policy.page_size, num_pages)[:, None]
    own_BHP = (own_BHP & known_BP[:, None] | forced) & visible
    keep_BGP = own_BHP.unflatten(1, (call.num_kv_heads, -1)).any(2)
    width = num_pages
    if max_tokens is not None:
        margin = margin_BHP.unflatten(1, (call.num_kv_heads, -1)).amax(2)
        # NaN is dropped last, as it is chosen first
        margin = margin.nan_to_num(nan=torch.finfo(margin.dtype).max)
        margin = margin.masked_fill(~keep_BGP, -torch.inf)
        keep_BGP = keep_BGP & top_BSP(margin, call, policy, policy.checked(max_tokens))
        width = num_pages_of(max_tokens, policy.page_size)
    wanted_BH = (own_BHP * held_BP(call, policy.page_size, num_pages)[:, None]).sum(-1)
    lists = selection_from_mask(keep_BGP, policy.page_size, width)
    return Selection(lists.pages_BSK, lists.counts_BS, policy.page_size, wanted_BH)
