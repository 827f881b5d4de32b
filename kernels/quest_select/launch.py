"""Launch Quest's select: sizes that depend on shapes alone; score, then choose."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from sparse_eval.kernels.quest_select.kernel import choose_kernel, score_kernel, update_kernel
from sparse_eval.kernels.sparse_decode.kernel import INTERPRETED
from sparse_eval.kernels.sparse_decode.launch import can_overlap_launches, multiprocessors

MAX_PAGES = 2**15 - 1


def quest_select_triton(
    q: Tensor,
    k: Tensor,
    mid: Tensor,
    half: Tensor,
    starts: Tensor | None,
    lengths: Tensor,
    *,
    page_size: int,
    budget: int,
    sink_pages: int,
    local_pages: int,
    group: str,
    scale: float,
    update: bool = False,
    block_table: Tensor | None = None,
    block_p: int | None = None,
    num_blocks: int | None = None,
    score_warps: int = 4,
    score_stages: int = 3,
    choose_warps: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Arguments and results as in api.quest_select, which checks them."""
    rows, kv_heads, num_pages = len(q), mid.shape[1], mid.shape[2]
    assert mid.is_contiguous() and half.is_contiguous()
    width = min(triton.cdiv(budget, page_size), num_pages)
    scores = torch.empty(rows, kv_heads, num_pages, dtype=torch.float32, device=q.device)
    pages = torch.empty(rows, kv_heads, width, dtype=torch.int32, device=q.device)
    counts = torch.empty(rows, kv_heads, dtype=torch.int32, device=q.device)
    block_p = block_p or 32
    num_blocks = num_blocks or blocks_of(rows * kv_heads, num_pages, block_p, q.device)
    block_pages = max(128, triton.next_power_of_2(num_pages))
    pdl = can_overlap_launches(q.device)
    with torch.cuda.device_of(q):
        score_kernel[(num_blocks + update, kv_heads, rows)](
            *(q, k, starts, lengths, block_table, mid, half, scores),
            *(float(scale), num_pages, num_blocks, q.shape[1] // kv_heads),
            0 if block_table is None else block_table.stride(0),
            *q.stride(),
            *batch_strides(k, block_table),
            mid.stride(0) if len(mid) > 1 else 0,
            D=q.shape[2],
            PAGE_SIZE=page_size,
            BLOCK_SIZE=1 if block_table is None else k.shape[2],
            GROUP_SUM=group == "sum",
            UPDATE=update,
            INTERPRET=INTERPRETED,
            PDL=pdl,
            BLOCK_M=max(16, triton.next_power_of_2(q.shape[1] // kv_heads)),
            BLOCK_D=max(16, triton.next_power_of_2(q.shape[2])),
            BLOCK_P=block_p,
            BLOCK_TOKENS=triton.next_power_of_2(page_size),
            num_warps=score_warps,
            num_stages=score_stages,
            enable_fp_fusion=True,
        )
        choose_kernel[(kv_heads, rows)](
            *(scores, lengths, pages, counts, num_pages, width, budget // page_size, budget),
            *(sink_pages, local_pages),
            PAGE_SIZE=page_size,
            PDL=pdl,
            BLOCK_PAGES=block_pages,
            num_warps=choose_warps or min(16, max(4, block_pages // 256)),
            launch_pdl=pdl,
            enable_fp_fusion=True,
        )
    return pages, counts


def update_metadata_triton(
    k: Tensor,
    mid: Tensor,
    half: Tensor,
    starts: Tensor | None,
    lengths: Tensor,
    *,
    page_size: int,
    block_table: Tensor | None = None,
) -> None:
    """Arguments as in api.update_metadata, which checks them."""
    assert mid.is_contiguous() and half.is_contiguous()
    with torch.cuda.device_of(k):
        update_kernel[(len(lengths), mid.shape[1])](
            *(k, starts, lengths, block_table, mid, half, mid.shape[2]),
            0 if block_table is None else block_table.stride(0),
            *batch_strides(k, block_table),
            mid.stride(0) if len(mid) > 1 else 0,
            D=k.shape[3],
            PAGE_SIZE=page_size,
            BLOCK_SIZE=1 if block_table is None else k.shape[2],
            BLOCK_D=max(16, triton.next_power_of_2(k.shape[3])),
            BLOCK_TOKENS=triton.next_power_of_2(page_size),
            enable_fp_fusion=True,
        )


def batch_strides(k: Tensor, block_table: Tensor | None) -> tuple[int, ...]:
    """Strides of k; 0 over a batch of one cache that all rows read."""
    return (k.stride(0) if block_table is not None or len(k) > 1 else 0, *k.stride()[1:])


def blocks_of(lists: int, num_pages: int, block_p: int, device: torch.device) -> int:
    """Programs that score one list: two per multiprocessor in all, each with a tile of its own."""
    wanted = triton.cdiv(2 * multiprocessors(device), lists)
    return max(1, min(triton.cdiv(num_pages, block_p), wanted))
