"""Launch the thumbnail kernels: sizes that depend on shapes alone."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from sparse_eval.kernels.sparse_decode.kernel import INTERPRETED
from sparse_eval.kernels.sparse_decode.launch import can_overlap_launches
from sparse_eval.kernels.sparse_decode.reference import extent_of
from sparse_eval.kernels.thumbnail.format import Residual, Thumbnail, unit_of
from sparse_eval.kernels.thumbnail.kernel import pack_kernel, score_kernel


def pack_triton(
    thumbnail: Thumbnail,
    residual: Residual | None,
    k: Tensor,
    starts: Tensor | None,
    lengths: Tensor | None,
    block_table: Tensor | None,
    *,
    num_pages: int = 1,
    write_codes: bool = True,
    fresh: bool = False,
    cleared: Tensor | None = None,
) -> None:
    """Packs each row's newest full page (fresh: where its newest token filled it), or without
    lengths the first num_pages of every cache. cleared: int32 [B, G, ..], set to 0 on the way."""
    t = thumbnail
    assert t.codes.is_contiguous() and t.step.is_contiguous()
    assert residual is None or residual.codes.is_contiguous()
    rows = len(t.codes) if lengths is None else len(lengths)
    # Integer arguments are walked without strides.
    starts, lengths = (x if x is None else x.contiguous() for x in (starts, lengths))
    is_shared = block_table is None and len(k) == 1
    pdl = can_overlap_launches(k.device)
    with torch.cuda.device_of(k):
        pack_kernel[(rows, k.shape[1], num_pages)](
            *(k, starts, lengths, None if block_table is None else block_table.contiguous()),
            *(t.codes, t.step, None if residual is None else residual.codes, cleared),
            *(t.coverage / 2 ** (t.bits - 1), unit_of(t), t.num_tokens),
            *(extent_of(k, block_table), 0),
            0 if cleared is None else cleared.shape[2],
            0 if block_table is None or len(block_table) == 1 else block_table.shape[1],
            *(0 if is_shared else k.stride(0), *k.stride()[1:]),
            t.codes.shape[1] if len(t.codes) > 1 else 0,
            **form_of(t),
            BLOCK_SIZE=1 if block_table is None else k.shape[2],
            WRITE_CODES=write_codes,
            FRESH=fresh,
            PDL=pdl,
            launch_pdl=pdl,
            BLOCK_TOKENS=triton.next_power_of_2(t.page_size),
            num_warps=4,
            enable_fp_fusion=True,
        )


def scores_triton(
    q: Tensor, thumbnail: Thumbnail, scale: float, *, block_n: int | None = None
) -> Tensor:
    """Arguments and result as in api.thumbnail_scores, which checks them."""
    t = thumbnail
    assert t.codes.is_contiguous() and t.step.is_contiguous()
    (rows, heads, _), kv_heads = q.shape, t.codes.shape[1]
    out = torch.empty(rows, heads, t.num_tokens, dtype=torch.float32, device=q.device)
    block_n = tile_of(t, block_n or 256)
    with torch.cuda.device_of(q):
        score_kernel[(triton.cdiv(t.num_tokens, block_n), kv_heads, rows)](
            *(q, t.codes, t.step, out, float(scale), t.num_tokens, heads // kv_heads),
            *q.stride(),
            kv_heads if len(t.codes) > 1 else 0,
            **form_of(t),
            INTERPRET=INTERPRETED,
            BLOCK_H=max(8, triton.next_power_of_2(heads // kv_heads)),
            BLOCK_N=block_n,
            num_warps=4,
            enable_fp_fusion=True,
        )
    return out


def tile_of(thumbnail: Thumbnail, block_n: int) -> int:
    """Tokens of a tile: whole pages; one page under rule channel, whose steps are a page's."""
    return thumbnail.page_size if thumbnail.rule == "channel" else max(block_n, thumbnail.page_size)


def form_of(t: Thumbnail) -> dict[str, Any]:
    """Constants of every kernel that reads a thumbnail; a byte product takes 32 at least."""
    return {
        "D": t.head_dim,
        "C": t.codes.shape[3],
        "BITS": t.bits,
        "PAGE_SIZE": t.page_size,
        "CHANNEL": t.rule == "channel",
        "BLOCK_C": max(32, triton.next_power_of_2(t.codes.shape[3])),
    }
