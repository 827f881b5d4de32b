"""Launch top-δ selection: sizes that depend on shapes alone; scan, then compact."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from sparse_eval.kernels.ffd.kernel import compact_kernel, scan_kernel
from sparse_eval.kernels.quest_select.launch import batch_strides
from sparse_eval.kernels.sparse_decode.kernel import INTERPRETED
from sparse_eval.kernels.sparse_decode.launch import can_overlap_launches, multiprocessors
from sparse_eval.kernels.thumbnail import Thumbnail
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
    block_n = tile_of(t, block_n or 256)
    tile_pages = block_n // t.page_size
    num_blocks = num_blocks or blocks_of(rows * kv_heads, triton.cdiv(t.num_pages, tile_pages), q)
    forced = (sink_pages + local_pages) * t.page_size
    table = None if block_table is None else block_table.expand(rows, -1).contiguous()

    def new(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(rows, kv_heads, *shape, dtype=dtype, device=q.device)

    flags, sums = new(t.num_pages, dtype=torch.uint8), new(num_blocks)
    pages, counts = new(t.num_pages), new()
    lengths = lengths.contiguous()
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
            **form_of(t),
            BLOCK_SIZE=1 if table is None else k.shape[2],
            EXACT=pseudo_max == "exact",
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


def blocks_of(lists: int, tiles: int, q: Tensor) -> int:
    """Programs that scan one list: four per multiprocessor in all, each with a tile of its own."""
    wanted = triton.cdiv(4 * multiprocessors(q.device), lists)
    return max(1, min(tiles, wanted, MAX_PROGRAMS))
