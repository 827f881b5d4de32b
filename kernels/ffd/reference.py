"""Top-δ selection over thumbnails in plain torch: the meaning of the operation."""

from __future__ import annotations

import torch
from torch import Tensor


def ffd_select_reference(
    score_BHN: Tensor,
    slack_BHN: Tensor | None,
    exact_BHN: Tensor | None,
    lengths_B: Tensor,
    *,
    page_size: int,
    num_kv_heads: int,
    delta: float,
    sink_pages: int,
    local_pages: int,
) -> tuple[Tensor, Tensor]:
    """pages_BGP (ascending, then -1) and counts_BG, both int32.

    score_BHN: thumbnail scores. exact_BHN: exact ones of the first tokens, whose maximum over the
    forced pages is the pseudo-max then, slack_BHN added to the scores; else the scores' own
    maximum over forced full pages."""
    num_pages = score_BHN.shape[2] // page_size
    page = torch.arange(num_pages, device=score_BHN.device)
    visible_B1 = -(-lengths_B.long() // page_size)[:, None]
    full_BP = page < (lengths_B.long() // page_size)[:, None]
    forced_BP = (page < sink_pages) | (page >= visible_B1 - local_pages)
    forced_BP = forced_BP & (page < visible_B1)

    paged_BHPL = score_BHN.unflatten(2, (num_pages, page_size))
    if exact_BHN is None:
        usable = (forced_BP & full_BP)[:, None]
        page_max = paged_BHPL.nan_to_num(nan=-torch.inf).amax(3)
        pseudo_max = page_max.masked_fill(~usable, -torch.inf).amax(2)
    else:
        token = torch.arange(exact_BHN.shape[2], device=score_BHN.device)
        usable = forced_BP.repeat_interleave(page_size, 1)[:, : len(token)]
        usable = (usable & (token < lengths_B[:, None]))[:, None]
        pseudo_max = exact_BHN.nan_to_num(nan=-torch.inf).masked_fill(~usable, -torch.inf).amax(2)
    if slack_BHN is not None:
        paged_BHPL = (score_BHN + slack_BHN).unflatten(2, (num_pages, page_size))
    keep_BHP = (paged_BHPL >= (pseudo_max - delta)[..., None, None]).any(3)
    keep_BGP = keep_BHP.unflatten(1, (num_kv_heads, -1)).any(2)
    keep_BGP = (keep_BGP & full_BP[:, None]) | forced_BP[:, None]

    counts_BG = keep_BGP.sum(-1, dtype=torch.int32)
    order = torch.where(keep_BGP, page, num_pages).sort(-1).values
    return order.masked_fill(order == num_pages, -1).int(), counts_BG
