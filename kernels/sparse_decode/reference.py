"""Decode attention over selected pages in plain torch: the meaning of the operation.

Scores every cached token and masks what was not read; where a list is short beside the cache, only
its pages. float32 arithmetic, float64 for float64.
"""

from __future__ import annotations

import torch
from torch import Tensor

GATHER_SHARE = 4  # pages are copied out where lists hold at most a quarter of the cache


def sparse_decode_reference(
    q_BHD: Tensor,
    k_BGND: Tensor,
    v_BGNE: Tensor,
    pages_BSK: Tensor | None,
    counts_BS: Tensor | None,
    starts_B: Tensor | None,
    lengths_B: Tensor,
    *,
    page_size: int,
    scale: float,
    page_lse: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns out_BHE (q's dtype), lse_BH and, if asked, the lse_BHK of each slot of pages_BSK."""
    if pages_BSK is not None and counts_BS is not None:
        is_shared = pages_BSK.shape[1] == k_BGND.shape[1] and len(k_BGND) == len(q_BHD)
        if is_shared and 0 < GATHER_SHARE * pages_BSK.shape[2] * page_size <= k_BGND.shape[2]:
            return attend_gathered(
                *(q_BHD, k_BGND, v_BGNE, pages_BSK, counts_BS, starts_B, lengths_B),
                *(page_size, scale, page_lse),
            )
    dtype = torch.promote_types(q_BHD.dtype, torch.float32)
    num_kv_heads, num_tokens = k_BGND.shape[1:3]
    num_pages = -(-num_tokens // page_size)
    first_B = torch.zeros_like(lengths_B) if starts_B is None else starts_B
    position_BN = torch.arange(num_tokens, device=q_BHD.device) - first_B[:, None]
    live_BN = (position_BN >= 0) & (position_BN < lengths_B[:, None])

    # Lists are [B, G, L, K] below: L = 1 where a group shares its pages, L = M where it does not.
    read = live_BN[:, None, None]  # [B, 1, 1, N]
    if pages_BSK is None or counts_BS is None:
        slot_page = torch.arange(num_pages, device=q_BHD.device).expand(len(q_BHD), 1, 1, -1)
    else:
        slot = torch.arange(pages_BSK.shape[2], device=q_BHD.device)
        empty = (slot >= counts_BS[..., None]) | (pages_BSK < 0) | (pages_BSK >= num_pages)
        slot_page = pages_BSK.long().masked_fill(empty, num_pages).unflatten(1, (num_kv_heads, -1))
        chosen = live_BN.new_zeros(*slot_page.shape[:3], num_pages + 1)
        chosen.scatter_(3, slot_page, True)  # the last column takes the empty slots
        page_BN = position_BN.clamp_min(0) // page_size
        read = read & chosen.gather(3, page_BN[:, None, None].expand(*chosen.shape[:3], -1))

    q = (q_BHD.to(dtype) * scale).unflatten(1, (num_kv_heads, -1))  # [B, G, M, D]
    s = per_kv_head(q, k_BGND.to(dtype).mT).masked_fill_(~read, -torch.inf)  # [B, G, M, N]
    lse_BHK = slot_lse(s, slot_page, first_B, page_size) if page_lse else None
    # What nobody reads may be NaN, and 0 · NaN would be NaN.
    read_by_group = read.any(2)[..., None]  # [B, G or 1, N, 1]
    if len(v_BGNE) == 1:
        read_by_group = read_by_group.any(0, keepdim=True)
    out, lse = weigh(s, v_BGNE.to(dtype).masked_fill(~read_by_group, 0))
    return out.to(q_BHD.dtype), lse, lse_BHK


def attend_gathered(
    q_BHD: Tensor,
    k_BGND: Tensor,
    v_BGNE: Tensor,
    pages_BGK: Tensor,
    counts_BG: Tensor,
    starts_B: Tensor | None,
    lengths_B: Tensor,
    page_size: int,
    scale: float,
    page_lse: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The same, of one list per KV head and a cache per row, over copies of the listed pages."""
    dtype = torch.promote_types(q_BHD.dtype, torch.float32)
    num_kv_heads, num_tokens = k_BGND.shape[1:3]
    slot = torch.arange(pages_BGK.shape[2], device=q_BHD.device)
    used = (slot < counts_BG[..., None]) & (pages_BGK >= 0)
    offset = torch.arange(page_size, device=q_BHD.device)
    position = (pages_BGK.long()[..., None] * page_size + offset).flatten(2)  # [B, G, K · page]
    token = position if starts_B is None else position + starts_B[:, None, None]
    read = used.repeat_interleave(page_size, 2) & (position < lengths_B[:, None, None])
    read &= token < num_tokens
    # What nobody reads may be NaN, and 0 · NaN would be NaN: a token that is read stands in for it.
    stand_in = token.gather(2, read.int().argmax(2, keepdim=True))
    token = torch.where(read, token, stand_in).clamp(0, num_tokens - 1)
    k, v = (tokens_of(x, token).to(dtype) for x in (k_BGND, v_BGNE))

    q = (q_BHD.to(dtype) * scale).unflatten(1, (num_kv_heads, -1))  # [B, G, M, D]
    s = (q @ k.mT).masked_fill_(~read[:, :, None], -torch.inf)
    lse_BHK = s.unflatten(3, (-1, page_size)).logsumexp(-1).flatten(1, 2) if page_lse else None
    out, lse = weigh(s, v)
    return out.masked_fill_(lse.isneginf()[..., None], 0).to(q_BHD.dtype), lse, lse_BHK


def tokens_of(x_BGND: Tensor, token_BGT: Tensor) -> Tensor:
    """Each list's tokens of its KV head: [B, G, T, D]."""
    num_tokens = x_BGND.shape[2]
    first = torch.arange(
        0, token_BGT[..., 0].numel() * num_tokens, num_tokens, device=x_BGND.device
    )
    index = first.view(*token_BGT.shape[:2], 1) + token_BGT
    return x_BGND.reshape(-1, x_BGND.shape[3])[index]


def weigh(s_BGMN: Tensor, v_BGNE: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax-weighted values [B, H, E] and log-sum-exp [B, H]; overwrites s. -inf: not read."""
    m = s_BGMN.amax(-1, keepdim=True)
    m = m.masked_fill(m.isneginf(), 0)
    p = s_BGMN.sub_(m).exp_()
    l = p.sum(-1, keepdim=True)  # noqa: E741  (>= 1 wherever a token was read)
    out = per_kv_head(p, v_BGNE) / l.clamp_min(1)
    return out.flatten(1, 2), (m + l.log()).flatten(1)


def slot_lse(s_BGMN: Tensor, page_BGLK: Tensor, first_B: Tensor, page_size: int) -> Tensor:
    """Log-sum-exp of the logits in each slot's page: [B, H, K]; -inf logits were not read."""
    num_tokens = s_BGMN.shape[3]
    first = first_B.long()[:, None, None, None, None]
    offset = torch.arange(page_size, device=s_BGMN.device)
    token = (first + page_BGLK[..., None] * page_size + offset).flatten(3)
    outside = token >= num_tokens  # empty slots too
    index = token.clamp_max(num_tokens - 1).expand(*s_BGMN.shape[:3], -1)
    s = s_BGMN.gather(3, index).masked_fill_(outside, -torch.inf)
    return s.unflatten(3, (-1, page_size)).logsumexp(-1).flatten(1, 2)


def per_kv_head(x_BGMI: Tensor, y_BGIJ: Tensor) -> Tensor:
    """x @ y as [B, G, M, J]; where y's batch is 1 all rows enter one product per KV head."""
    if len(y_BGIJ) > 1 or len(x_BGMI) == 1:
        return x_BGMI @ y_BGIJ
    rows = x_BGMI.transpose(0, 1).flatten(1, 2) @ y_BGIJ[0]
    return rows.unflatten(1, (len(x_BGMI), -1)).transpose(0, 1)


def extent_of(k: Tensor, block_table: Tensor | None) -> int:
    """Tokens that a row of the cache has room for."""
    return k.shape[2] * (1 if block_table is None else block_table.shape[1])


def live_lengths(lengths_B: Tensor, starts_B: Tensor | None, extent: int) -> Tensor:
    """lengths_B cut at the end of a cache of `extent` tokens, int64."""
    room = extent - (torch.zeros_like(lengths_B) if starts_B is None else starts_B).long()
    return torch.minimum(lengths_B.long(), room).clamp_min(0)


def gather_blocks(pool: Tensor, block_table_BC: Tensor) -> Tensor:
    """A pool [num_blocks, G, block_size, D] as a contiguous cache [B, G, C · block_size, D]."""
    blocks = pool[block_table_BC.long().clamp(0, len(pool) - 1)]  # unused entries hold anything
    return blocks.transpose(1, 2).flatten(2, 3).contiguous()
