"""Quest's selection in plain torch: the meaning of the operation, with a stable sort."""

from __future__ import annotations

import torch
from torch import Tensor

from sparse_eval.kernels.sparse_decode.reference import extent_of, live_lengths

FLOAT_MAX = torch.finfo(torch.float32).max


def quest_select_reference(
    q_BHD: Tensor,
    mid_BGPD: Tensor,
    half_BGPD: Tensor,
    scales_BGP2: Tensor | None,
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
    center, spread = q @ mid_BGPD.float().mT, q.abs() @ half_BGPD.float().mT  # [B, G, M, P]
    if scales_BGP2 is not None:
        center, spread = (
            center * scales_BGP2[..., None, :, 0],
            spread * scales_BGP2[..., None, :, 1],
        )
    score = scale * (center + spread)
    score = score.amax(2) if group == "max" else score.sum(2)  # [B, G, P]
    score = score.nan_to_num(nan=-FLOAT_MAX, posinf=FLOAT_MAX, neginf=-FLOAT_MAX)
    page = torch.arange(num_pages, device=q.device)
    pages_B = (-(-lengths_B.long() // page_size)).clamp(0, num_pages)
    visible = pages_B[:, None]  # pages that hold a live token
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
    scales_BGP2: Tensor | None,
    starts_B: Tensor | None,
    lengths_B: Tensor,
    page_size: int,
    block_table: Tensor | None,
) -> None:
    """One row at a time, its newest full page's smallest and largest key per channel."""
    live_B = live_lengths(lengths_B, starts_B, extent_of(k, block_table))
    for row in range(len(lengths_B)):
        page = int(live_B[row]) // page_size - 1
        if not 0 <= page < mid_BGPD.shape[2]:
            continue
        first = page * page_size + (0 if starts_B is None else int(starts_B[row]))
        token = torch.arange(first, first + page_size, device=k.device)
        if block_table is None:
            keys = k[row % len(k)][:, token]  # [G, page_size, D]
        else:
            table = block_table[row % len(block_table)].long()
            block_size = k.shape[2]
            keys = k[table[token // block_size], :, token % block_size].transpose(0, 1)
        box = box_in_8_bits(keys) if scales_BGP2 is not None else box_in(keys, mid_BGPD.dtype)
        for x, of_page in zip((mid_BGPD, half_BGPD, scales_BGP2), box, strict=False):
            assert x is not None
            x[row % len(x), :, page] = of_page


def box_in(keys: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Middle and half-width over keys [..., page_size, D]; half rounded up from the rounded mid."""
    lo, hi = keys.double().amin(-2), keys.double().amax(-2)
    mid = ((lo + hi) / 2).to(dtype)
    wanted = torch.maximum(hi - mid.double(), mid.double() - lo)
    half = wanted.to(dtype)
    too_small = half.double() < wanted
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[half.element_size()]
    return mid, torch.where(too_small, (half.view(bits) + 1).view(half.dtype), half)


def box_in_8_bits(keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """mid int8, half uint8 [..., D] and their scales [..., 2]: one of each per page; the box they
    span covers every key."""
    lo, hi = keys.double().amin(-2), keys.double().amax(-2)
    mid = (lo + hi) / 2
    scale = (mid.abs().amax(-1, keepdim=True) / 127).float()
    scale = scale.masked_fill(scale == 0, 1).double()
    code = (mid / scale + 0.5).floor()
    half = torch.maximum(hi - code * scale, code * scale - lo)
    widest = half.amax(-1, keepdim=True) / 255
    half_scale = widest.float()
    above = (half_scale.view(torch.int32) + 1).view(torch.float32)
    half_scale = torch.where(half_scale.double() < widest, above, half_scale)
    half_scale = half_scale.masked_fill(half_scale == 0, 1).double()
    half_code = (half / half_scale).ceil()
    half_code += half_code * half_scale < half
    return (
        code.to(torch.int8),
        half_code.to(torch.uint8),
        torch.cat((scale, half_scale), -1).float(),
    )
