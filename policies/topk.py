"""The fixed-count rule: read the best pages by score, forced ones first, ties to the lowest id.

A group that shares its pages reads budget // page_size of them, the partial current page counted as
one; a row of no more than `budget` tokens is read whole. Where every query head has a list
of its own, what the KV head reads is their union, and that is what the budget counts: each head
reads its k best pages, k being the largest number for which the union fits. So heads that agree
read as many pages as a shared list, and a budget that covers the context reads everything.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparse_eval.core import AttentionCall
from sparse_eval.policies.base import (
    Policy,
    Selection,
    fits_B,
    forced_BP,
    num_pages_of,
    selection_from_mask,
    visible_BP,
)


def top_pages(
    score_BSP: Tensor, call: AttentionCall, policy: Policy, budget: int | None
) -> Selection:
    """The best pages by score, S = G or H lists a row; the policy's forced pages always.

    score_BSP: float, higher is better, NaN last; what it says of forced or unseen pages is ignored.
    Raises ValueError if the budget cannot hold the forced pages."""
    budget = policy.checked(budget)
    keep = top_BSP(score_BSP, call, policy, budget)
    return selection_from_mask(keep, policy.page_size, num_pages_of(budget, policy.page_size))


def top_BSP(score_BSP: Tensor, call: AttentionCall, policy: Policy, budget: int) -> Tensor:
    """True for the pages that top_pages reads."""
    num_selected = budget // policy.page_size
    num_pages = score_BSP.shape[-1]
    assert num_pages * policy.page_size >= call.k_BGND.shape[2], "state must be extended each step"
    visible = visible_BP(call, policy.page_size, num_pages)[:, None]
    forced = forced_BP(call, policy, num_pages)[:, None]
    lowest = torch.finfo(score_BSP.dtype).min
    score = score_BSP.nan_to_num(nan=lowest, posinf=-lowest, neginf=lowest)
    score = score.masked_fill(forced, torch.inf).masked_fill(~visible, -torch.inf)
    if num_selected >= num_pages:
        keep = visible.expand_as(score)
    elif score.shape[1] == call.num_kv_heads:
        keep = best_BSP(score, num_selected) & visible
    else:
        keep = best_per_head_BHP(score, num_selected, call.num_kv_heads) & visible
    return keep | (fits_B(call, budget)[:, None, None] & visible)


def best_BSP(score_BSP: Tensor, num_selected: int) -> Tensor:
    """True for the num_selected highest scores of each list, ties to the lowest id."""
    last = score_BSP.topk(num_selected, dim=-1, sorted=False).values.amin(-1, keepdim=True)
    above, tied = score_BSP > last, score_BSP == last
    room = num_selected - above.sum(-1, keepdim=True)
    return above | (tied & (tied.cumsum(-1) <= room))


def best_per_head_BHP(score_BHP: Tensor, num_selected: int, num_kv_heads: int) -> Tensor:
    """True for each head's k best pages, k the most for which a group's union is num_selected."""
    order = score_BHP.sort(dim=-1, descending=True, stable=True).indices
    page = torch.arange(order.shape[-1], device=order.device).expand_as(order)
    rank = torch.empty_like(order).scatter_(-1, order, page)
    # A page joins the union at its best rank in the group; the first that does not fit ends k.
    joins = rank.unflatten(1, (num_kv_heads, -1)).amin(2)
    end = joins.topk(num_selected + 1, dim=-1, largest=False, sorted=False).values.amax(-1)
    group_size = score_BHP.shape[1] // num_kv_heads
    return rank < end.repeat_interleave(group_size, dim=1)[..., None]
