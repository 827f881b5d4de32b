"""Launch top-δ selection (scan, compact) and attention by residual: sizes by shapes alone."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from sparse_eval.kernels.ffd.attend import attend_residual_kernel
from sparse_eval.kernels.ffd.kernel import compact_kernel, scan_kernel
from sparse_eval.kernels.quest_select.launch import batch_strides
from sparse_eval.kernels.sparse_decode.kernel import INTERPRETED, merge_splits_kernel
from sparse_eval.kernels.sparse_decode.launch import (
    can_overlap_launches,
    multiprocessors,
    splits_of,
)
from sparse_eval.kernels.thumbnail import Residual, Thumbnail
from sparse_eval.kernels.thumbnail.launch import form_of, tile_of

MAX_PROGRAMS = 1024


def ffd_select_triton(
    q: Tensor,
    k: Tensor,
    thumbnail: Thumbnail,
    starts: Tensor | None,
    lengths: Tensor,
    *,
    delta: float,
    sink_pages: int,
    local_pages: int,
    scale: float,
    pseudo_max: str,
    block_table: Tensor | None = None,
    chained: bool = False,
    block_n: int | None = None,
    num_blocks: int | None = None,
    num_warps: int | None = None,
    num_stages: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Arguments and results as in api.ffd_select, which checks them.

    chained: the kernel launched just before extends the thumbnail and lets this one take its place
    early. block_n: tokens of a tile; num_blocks: programs per list; None = by shape."""
    t = thumbnail
    assert t.codes.is_contiguous() and t.step.is_contiguous()
    (rows, heads, d), kv_heads = q.shape, t.codes.shape[1]
    block_n = scan_tile_of(t, block_n)
    tile_pages = block_n // t.page_size
    num_blocks = num_blocks or blocks_of(rows * kv_heads, triton.cdiv(t.num_pages, tile_pages), q)
    forced = (sink_pages + local_pages) * t.page_size
    table = None if block_table is None else block_table.expand(rows, -1).contiguous()

    def new(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(rows, kv_heads, *shape, dtype=dtype, device=q.device)

    flags, sums = new(t.num_pages, dtype=torch.uint8), new(num_blocks)
    pages, counts = new(t.num_pages), new()
    lengths = lengths.contiguous()
    form = form_of(t)
    pdl = can_overlap_launches(q.device)
    with torch.cuda.device_of(q):
        scan_kernel[(num_blocks, kv_heads, rows)](
            *(q, t.codes, t.step, k, None if starts is None else starts.contiguous(), lengths),
            *(table, flags, sums, float(scale), float(delta), t.reach, t.num_pages),
            k.shape[2] * (1 if table is None else table.shape[1]),
            *(heads // kv_heads, sink_pages, local_pages),
            0 if table is None else table.stride(0),
            *q.stride(),
            *batch_strides(k, table),
            kv_heads if len(t.codes) > 1 else 0,
            **form,
            BLOCK_SIZE=1 if table is None else k.shape[2],
            EXACT=pseudo_max == "exact",
            WHOLE=t.num_tokens % block_n == 0 and form["C"] == form["BLOCK_C"],
            INTERPRET=INTERPRETED,
            PDL=pdl,
            CHAINED=pdl and chained,
            launch_pdl=pdl and chained,
            BLOCK_H=max(8, triton.next_power_of_2(heads // kv_heads)),
            BLOCK_D=max(16, triton.next_power_of_2(d)),
            BLOCK_F=tile_of(t, min(256, max(16, triton.next_power_of_2(forced)))),
            BLOCK_N=block_n,
            num_warps=num_warps or 4,
            num_stages=num_stages or 3,
            enable_fp_fusion=True,
        )
        compact_kernel[(num_blocks, kv_heads, rows)](
            *(flags, sums, lengths, pages, counts, t.num_pages),
            PAGE_SIZE=t.page_size,
            TILE_PAGES=tile_pages,
            PDL=pdl,
            launch_pdl=pdl,
            BLOCK_SUMS=triton.next_power_of_2(num_blocks),
            BLOCK_PAGES=256 if not INTERPRETED else 1024,
            num_warps=2,
            enable_fp_fusion=True,
        )
    return pages, counts


def scan_tile_of(thumbnail: Thumbnail, block_n: int | None) -> int:
    """Tokens of a tile, whole pages; rule channel prepares the query for every page of it."""
    size = thumbnail.page_size
    most = 256 if thumbnail.rule == "token" else min(256, 8 * size)
    return max(size, block_n or most)


def blocks_of(lists: int, tiles: int, q: Tensor) -> int:
    """Programs that scan one list: four per multiprocessor in all, each with a tile of its own."""
    wanted = triton.cdiv(4 * multiprocessors(q.device), lists)
    return max(1, min(tiles, wanted, MAX_PROGRAMS))


def residual_decode_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    thumbnail: Thumbnail,
    residual: Residual,
    pages: Tensor,
    counts: Tensor,
    starts: Tensor | None,
    lengths: Tensor,
    *,
    scale: float,
    block_table: Tensor | None = None,
    chained: bool = False,
    block_t: int | None = None,
    num_splits: int | None = None,
    num_warps: int | None = None,
    num_stages: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Arguments and results as in api.residual_decode, which checks them."""
    t = thumbnail
    assert t.codes.is_contiguous() and t.step.is_contiguous() and residual.codes.is_contiguous()
    (rows, heads, d), e, kv_heads = q.shape, v.shape[3], k.shape[1]
    table = None if block_table is None else block_table.expand(rows, -1).contiguous()
    block_t = block_t or (128 if INTERPRETED else 64)
    if t.rule == "channel":
        block_t = min(block_t, t.page_size)
    num_tiles = triton.cdiv(pages.shape[2] * t.page_size, block_t)
    num_splits = num_splits or splits_of(rows * kv_heads, num_tiles, q.device)

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(rows, heads, *shape, dtype=dtype, device=q.device)

    acc, m, l = new(num_splits, e), new(num_splits), new(num_splits)  # noqa: E741
    # The interpreter's own float32 -> bfloat16 truncates.
    out, lse = new(e, dtype=torch.float32 if INTERPRETED else q.dtype), new()
    pdl = can_overlap_launches(q.device)
    with torch.cuda.device_of(q):
        attend_residual_kernel[(rows, kv_heads, num_splits)](
            *(q, k, v, t.codes, t.step, residual.codes, pages.contiguous(), counts.contiguous()),
            *(None if starts is None else starts.contiguous(), lengths.contiguous(), table),
            *(acc, m, l, float(scale), residual.unit),
            k.shape[2] * (1 if table is None else table.shape[1]),
            *(t.num_pages, pages.shape[2], num_splits, heads // kv_heads),
            0 if table is None else table.shape[1],
            *(*q.stride(), *batch_strides(k, table), *batch_strides(v, table)),
            kv_heads if len(t.codes) > 1 else 0,
            **form_of(t),
            E=e,
            BLOCK_SIZE=1 if table is None else k.shape[2],
            P_UNIT=2.0**15 if q.dtype == torch.float16 else 1.0,
            INTERPRET=INTERPRETED,
            PDL=pdl,
            CHAINED=pdl and chained,
            launch_pdl=pdl and chained,
            BLOCK_M=max(16, triton.next_power_of_2(heads // kv_heads)),
            BLOCK_T=block_t,
            BLOCK_D=max(32, triton.next_power_of_2(d)),
            BLOCK_E=max(16, triton.next_power_of_2(e)),
            num_warps=num_warps or 4,
            num_stages=num_stages or 3,
            enable_fp_fusion=True,
        )
        merge_splits_kernel[(rows * heads, triton.cdiv(e, 32))](
            *(acc, m, l, out, lse, num_splits),
            E=e,
            PDL=pdl,
            launch_pdl=pdl,
            BLOCK_SPLITS=triton.next_power_of_2(num_splits),
            BLOCK_E=32,
            enable_fp_fusion=True,
        )
    return out.to(q.dtype), lse
