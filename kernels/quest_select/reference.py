"""Quest's selection in plain torch: the meaning of the operation, with a stable sort."""

from __future__ import annotations

import torch
from torch import Tensor

FLOAT_MAX = torch.finfo(torch.float32).max


def quest_select_reference(
    q_BHD: Tensor,
    mid_BGPD: Tensor,
    half_BGPD: Tensor,
    lengths_B: Tensor,
    *,
    page_size: int,
    budget: int,
    sink_pages: int,
    local_pages: int,
    group: str,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """pages_BGW (ascending, then -1) and counts_BG, both int32."""
    num_kv_heads, num_pages = mid_BGPD.shape[1:3]
    q = q_BHD.float().unflatten(1, (num_kv_heads, -1))  # [B, G, M, D]
    logit = q @ mid_BGPD.float().mT + q.abs() @ half_BGPD.float().mT
    score = scale * logit
    score = score.amax(2) if group == "max" else score.sum(2)  # [B, G, P]
    score = score.nan_to_num(nan=-FLOAT_MAX, posinf=FLOAT_MAX, neginf=-FLOAT_MAX)
    page = torch.arange(num_pages, device=q.device)
    visible = (-(-lengths_B.long() // page_size))[:, None]  # pages that hold a live token
    is_forced = (page < sink_pages) | (page >= visible - local_pages)
    score = score.masked_fill(is_forced[:, None], torch.inf)
    score = score.masked_fill((page >= visible)[:, None], -torch.inf)
    width = min(-(-budget // page_size), num_pages)
    room = torch.where(lengths_B <= budget, width, min(budget // page_size, width))
    counts = torch.minimum(room, visible[:, 0])[:, None]  # [B, 1]
    best = score.sort(dim=-1, descending=True, stable=True).indices[..., :width]
    beyond = torch.arange(width, device=q.device) >= counts[..., None]
    pages = best.masked_fill(beyond, num_pages).sort(-1).values
    pages = pages.masked_fill(pages == num_pages, -1).int()
    return pages, counts.expand(-1, num_kv_heads).int().contiguous()


def update_metadata_reference(
    k: Tensor,
    mid_BGPD: Tensor,
    half_BGPD: Tensor,
    starts_B: Tensor | None,
    lengths_B: Tensor,
    page_size: int,
    block_table: Tensor | None,
) -> None:
    """One row at a time, its newest full page's smallest and largest key per channel."""
    for row in range(len(lengths_B)):
        page = int(lengths_B[row]) // page_size - 1
        if page < 0:
            continue
        first = page * page_size + (0 if starts_B is None else int(starts_B[row]))
        token = torch.arange(first, first + page_size, device=k.device)
        if block_table is None:
            keys = k[row % len(k)][:, token]  # [G, page_size, D]
        else:
            table = block_table[row % len(block_table)].long()
            block_size = k.shape[2]
            keys = k[table[token // block_size], :, token % block_size].transpose(0, 1)
        lo, hi = keys.double().amin(1), keys.double().amax(1)
        mid = ((lo + hi) / 2).to(mid_BGPD.dtype)
        wanted = torch.maximum(hi - mid.double(), mid.double() - lo)
        half = wanted.to(half_BGPD.dtype)
        too_small = half.double() < wanted
        bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[half.element_size()]
        half = torch.where(too_small, (half.view(bits) + 1).view(half.dtype), half)
        mid_BGPD[row % len(mid_BGPD), :, page] = mid
        half_BGPD[row % len(half_BGPD), :, page] = half
