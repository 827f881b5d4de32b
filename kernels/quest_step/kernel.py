"""A step's attention in Triton: start on a list as soon as its scores, or its pages, are there.

The kernels of a step overlap: a list's pages are chosen and attended while later lists are still
being scored. Words in memory, one set per list, say how far it is.
"""

# ruff: noqa: E741

import triton
import triton.language as tl

from sparse_eval.kernels.quest_select.kernel import choose_pages, count_of
from sparse_eval.kernels.sparse_decode.kernel import (
    attend_split,
    load_queries,
    pdl_launch,
    pdl_wait,
    store_split,
    wait_for,
)

SIZES = [
    "num_tokens",
    "num_pages",
    "width",
    "num_selected",
    "budget",
    "sink_pages",
    "local_pages",
    "num_splits",
    "kv_heads",
    "group_size",
]


@triton.jit(do_not_specialize=SIZES)
def step_attend_kernel(
    q_ptr,  # [B, H, D]
    k_ptr,  # [batch or block, G, token, D]
    v_ptr,  # [batch or block, G, token, E]
    keys_ptr,  # [B, G, stride_list]
    pages_ptr,  # [B, G, width]
    counts_ptr,  # [B, G]
    starts_ptr,  # [B], None = 0
    lengths_ptr,  # [B]
    table_ptr,  # [B, blocks], None = k and v are contiguous caches
    acc_ptr,  # [B, H, num_splits, E]
    m_ptr,  # [B, H, num_splits]
    l_ptr,  # [B, H, num_splits]
    flags_ptr,  # [B, G]
    scale,
    num_tokens,  # the cache's extent, not a live length
    num_pages,
    width,
    num_selected,
    budget,
    sink_pages,
    local_pages,
    num_splits,
    kv_heads,
    group_size,
    stride_list,
    stride_tb,
    stride_qb,
    stride_qh,
    stride_qd,
    stride_kb,
    stride_kg,
    stride_kn,
    stride_kd,
    stride_vb,
    stride_vg,
    stride_vn,
    stride_ve,
    D: tl.constexpr,
    E: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WHOLE: tl.constexpr,
    CHOOSE: tl.constexpr,  # every split chooses its list's pages; else another kernel does
    P_UNIT: tl.constexpr,
    INTERPRET: tl.constexpr,
    PDL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_PAGES: tl.constexpr,
):
    """Grid (lists · num_splits,) in the order of the lists."""
    pdl_launch(PDL)
    row_list = tl.program_id(0).to(tl.int64) // num_splits
    split = tl.program_id(0) % num_splits
    row = row_list // kv_heads
    kv_head = row_list % kv_heads
    q = load_queries(
        *(q_ptr + row * stride_qb, kv_head * group_size, group_size),
        *(stride_qh, stride_qd, D, INTERPRET, BLOCK_M, BLOCK_D),
    )
    start = 0
    if starts_ptr is not None:
        start = tl.load(starts_ptr + row)
    length = tl.minimum(tl.load(lengths_ptr + row), num_tokens - start)
    pages_ptr += row_list * width
    rule = (num_pages, width, num_selected, budget, sink_pages, local_pages)
    count = count_of(length, rule, PAGE_SIZE)
    if table_ptr is None:
        k_ptr += row * stride_kb
        v_ptr += row * stride_vb
    else:
        table_ptr += row * stride_tb
    k_ptr += kv_head * stride_kg
    v_ptr += kv_head * stride_vg
    offs_m = tl.arange(0, BLOCK_M)
    mask_m = offs_m < group_size
    row_head = row_list * group_size + offs_m
    cache = (k_ptr, v_ptr, stride_kb, stride_kn, stride_kd, stride_vb, stride_vn, stride_ve)
    parts = (None, 0, mask_m)
    num_tiles = (count * PAGE_SIZE + BLOCK_T - 1) // BLOCK_T
    if CHOOSE:
        # All splits of a list write the same.
        choose_pages(
            *(keys_ptr + row_list * stride_list, stride_list, length, pages_ptr, rule),
            *(PAGE_SIZE, True, BLOCK_PAGES),
        )
        tl.store(counts_ptr + row_list, count)
        tl.debug_barrier()
    else:
        wait_for(flags_ptr + row_list)

    lists = (pages_ptr, table_ptr, start, length, count)
    m, l, acc = attend_split(
        *(split, num_splits, num_tiles, q, scale, lists, cache, parts, D, E, PAGE_SIZE, BLOCK_SIZE),
        *(WHOLE, 1, P_UNIT, INTERPRET, BLOCK_M, BLOCK_T, BLOCK_D, BLOCK_E),
    )
    store_split(
        *(acc_ptr, m_ptr, l_ptr, row_head * num_splits + split, mask_m, m, l, acc / P_UNIT),
        *(E, BLOCK_E),
    )
    pdl_wait(PDL)  # who waits for this kernel's end waits for the earlier ones' too
