"""Decode attention over selected pages in plain torch: the meaning of the operation.

Scores every cached token and masks what was not selected. float32 arithmetic, float64 for float64.
"""

from __future__ import annotations

import torch
from torch import Tensor


def sparse_decode_reference(
    q_BHD: Tensor,
    k_BGND: Tensor,
    v_BGNE: Tensor,
    pages_BSK: Tensor | None,
    starts_B: Tensor,
    lengths_B: Tensor,
    *,
    page_size: int,
    scale: float,
    page_lse: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns out_BHE (q's dtype), lse_BH, and per read page lse_BHK if asked (float32)."""
    dtype = torch.promote_types(q_BHD.dtype, torch.float32)
    num_rows, num_heads, _ = q_BHD.shape
    num_kv_heads, num_tokens = k_BGND.shape[1:3]
    q = q_BHD.to(dtype).unflatten(1, (num_kv_heads, -1))
    k, v = k_BGND.to(dtype), v_BGNE.to(dtype)
    if k.shape[0] == 1:  # rows share one cache: one product per KV head, not one per row
        s = (q.transpose(0, 1).flatten(1, 2) @ k[0].transpose(-1, -2)).unflatten(1, (num_rows, -1))
        s = s.transpose(0, 1)
    else:
        s = q @ k.transpose(-1, -2)
    s_BHN = (s * scale).flatten(1, 2)

    position = torch.arange(num_tokens, device=q.device) - starts_B[:, None]  # [B, N], < 0: padding
    live = (position >= 0) & (position < lengths_B[:, None])
    read = live[:, None]
    page = position.clamp_min(0) // page_size
    if pages_BSK is not None:
        num_pages = -(-num_tokens // page_size)
        chosen = torch.zeros(*pages_BSK.shape[:2], num_pages + 1, dtype=torch.bool, device=q.device)
        chosen.scatter_(2, pages_BSK.long().where(pages_BSK >= 0, num_pages), True)
        chosen = chosen[..., :num_pages].repeat_interleave(num_heads // pages_BSK.shape[1], 1)
        read = read & chosen.gather(2, page[:, None].expand(-1, num_heads, -1))
    s_BHN = s_BHN.masked_fill(~read, -torch.inf)

    lse_BH = s_BHN.logsumexp(-1)
    p_BHN = (s_BHN - lse_BH.masked_fill(lse_BH.isinf(), 0)[..., None]).exp()
    v = v.masked_fill(~live[:, None, :, None], 0) if v.shape[0] == num_rows else v
    out = p_BHN.unflatten(1, (num_kv_heads, -1))
    if v.shape[0] == 1:
        out = out.transpose(0, 1).flatten(1, 2) @ v[0]
        out = out.unflatten(1, (num_rows, -1)).transpose(0, 1)
    else:
        out = out @ v
    return out.flatten(1, 2).to(q_BHD.dtype), lse_BH, None
