"""Launch Quest's select: sizes that depend on shapes alone, one launch."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from sparse_eval.kernels.quest_select.kernel import select_kernel, update_kernel
from sparse_eval.kernels.sparse_decode.kernel import INTERPRETED


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
    arrived: Tensor | None = None,
    block_p: int = 64,
    num_warps: int = 4,
) -> tuple[Tensor, Tensor]:
    """Arguments and results as in api.quest_select, which checks them."""
    rows, kv_heads, num_pages = len(q), mid.shape[1], mid.shape[2]
    assert mid.is_contiguous() and half.is_contiguous()
    width = min(triton.cdiv(budget, page_size), num_pages)
    scores = torch.empty(rows, kv_heads, num_pages, dtype=torch.float32, device=q.device)
    pages = torch.empty(rows, kv_heads, width, dtype=torch.int32, device=q.device)
    counts = torch.empty(rows, kv_heads, dtype=torch.int32, device=q.device)
    if arrived is None:
        arrived = torch.zeros(rows * kv_heads, dtype=torch.int32, device=q.device)
    num_blocks = triton.cdiv(num_pages, block_p)
    with torch.cuda.device_of(q):
        select_kernel[(num_blocks, kv_heads, rows)](
            *(q, k, starts, lengths, block_table, mid, half, scores, arrived, pages, counts),
            *(float(scale), num_pages, width, budget // page_size, budget, sink_pages),
            *(local_pages, num_blocks, q.shape[1] // kv_heads),
            *strides_of(q, k, mid, block_table),
            **constants(q, k, page_size, num_pages, block_table, group, update),
            BLOCK_P=block_p,
            num_warps=num_warps,
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
        )


def batch_strides(k: Tensor, block_table: Tensor | None) -> tuple[int, ...]:
    """Strides of k; 0 over a batch of one cache that all rows read."""
    return (k.stride(0) if block_table is not None or len(k) > 1 else 0, *k.stride()[1:])


def strides_of(q: Tensor, k: Tensor, mid: Tensor, block_table: Tensor | None) -> tuple[int, ...]:
    """stride_tb, stride_q*, stride_k*, stride_mb of the kernel's arguments."""
    return (
        0 if block_table is None else block_table.stride(0),
        *q.stride(),
        *batch_strides(k, block_table),
        mid.stride(0) if len(mid) > 1 else 0,
    )


def constants(
    q: Tensor,
    k: Tensor,
    page_size: int,
    num_pages: int,
    block_table: Tensor | None,
    group: str,
    update: bool,
) -> dict[str, object]:
    return {
        "D": q.shape[2],
        "PAGE_SIZE": page_size,
        "BLOCK_SIZE": 1 if block_table is None else k.shape[2],
        "GROUP_SUM": group == "sum",
        "UPDATE": update,
        "INTERPRET": INTERPRETED,
        "BLOCK_M": max(16, triton.next_power_of_2(q.shape[1] // k.shape[1])),
        "BLOCK_D": max(16, triton.next_power_of_2(q.shape[2])),
        "BLOCK_TOKENS": triton.next_power_of_2(page_size),
        "BLOCK_PAGES": triton.next_power_of_2(num_pages),
    }
