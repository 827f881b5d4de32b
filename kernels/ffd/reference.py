"""Top-δ selection and attention by residual in plain torch: the meaning of the operations."""

from __future__ import annotations

import torch
from torch import Tensor

from sparse_eval.kernels.sparse_decode.reference import live_lengths
from sparse_eval.kernels.thumbnail.format import Residual, Thumbnail
from sparse_eval.kernels.thumbnail.reference import (
    unpack_reference,
    unpack_residual_reference,
)


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


def refined_keys(
    k_BGND: Tensor,
    thumbnail: Thumbnail,
    residual: Residual,
    starts_B: Tensor | None,
    lengths_B: Tensor,
) -> Tensor:
    """k_quant + k_res of each row's full pages at their place in the cache, the exact keys
    elsewhere: [B, G, N, D] in float32 (float64 stays)."""
    refined = unpack_reference(thumbnail)
    refined = refined + unpack_residual_reference(residual.codes, residual.unit, thumbnail)
    token = torch.arange(k_BGND.shape[2], device=k_BGND.device)
    position_BN = token - (0 if starts_B is None else starts_B.long()[:, None])
    position_BN = position_BN.expand(len(lengths_B), -1)
    lengths_B = live_lengths(lengths_B, starts_B, len(token))
    full_B1 = (lengths_B.long() // thumbnail.page_size * thumbnail.page_size)[:, None]
    is_packed = (position_BN >= 0) & (position_BN < full_B1.clamp_max(thumbnail.num_tokens))
    index = position_BN.clamp(0, thumbnail.num_tokens - 1)[:, None, :, None]
    refined = refined.expand(len(lengths_B), -1, -1, -1)
    placed = refined.gather(2, index.expand(-1, refined.shape[1], -1, refined.shape[3]))
    return torch.where(is_packed[:, None, :, None], placed, k_BGND.to(placed.dtype))
