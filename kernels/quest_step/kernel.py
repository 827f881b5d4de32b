"""One decode step of Quest in one launch: metadata, bound score, top-k, attention, merge.

Work items are handed out by ticket in this order: every block of scores, then every split of
attention. The last block of a list to finish picks its pages and opens its gate; splits wait at
their list's gate; the last split of a list merges it. A program waits only for items with smaller
tickets, which are running or done, so it never waits for a program that has no multiprocessor.
"""

# ruff: noqa: E741

import triton
import triton.language as tl

from sparse_eval.kernels.quest_select.kernel import choose_pages, score_block
from sparse_eval.kernels.sparse_decode.kernel import LOG2E, attend_split, log_sum, store_split

SIZES = [
    "num_tokens",
    "num_pages",
    "width",
    "num_selected",
    "budget",
    "sink_pages",
    "local_pages",
    "num_blocks",
    "num_splits",
    "num_lists",
    "num_kv_heads",
    "group_size",
]


@triton.jit(do_not_specialize=SIZES)
def step_kernel(
    q_ptr,  # [B, H, D]
    k_ptr,  # [batch or block, G, token, D]
    v_ptr,  # [batch or block, G, token, E]
    starts_ptr,  # [B], None = 0
    lengths_ptr,  # [B]
    table_ptr,  # [B, blocks], None = k and v are contiguous caches
    mid_ptr,  # [B, G, num_pages, D]
    half_ptr,  # [B, G, num_pages, D]
    scores_ptr,  # [B, G, num_pages]
    pages_ptr,  # [B, G, width]
    counts_ptr,  # [B, G]
    acc_ptr,  # [B, H, num_splits, E]
    m_ptr,  # [B, H, num_splits]
    l_ptr,  # [B, H, num_splits]
    out_ptr,  # [B, H, E]
    lse_ptr,  # [B, H]
    ticket_ptr,  # [2]: tickets given, lists merged; 0 before and after, like the next three
    arrived_ptr,  # [B · G] blocks scored
    gate_ptr,  # [B · G] 1: the list's pages are there
    merged_ptr,  # [B · G] splits attended
    scale,
    num_tokens,
    num_pages,
    width,
    num_selected,
    budget,
    sink_pages,
    local_pages,
    num_blocks,
    num_splits,
    num_lists,  # B · G
    num_kv_heads,
    group_size,
    stride_tb,
    stride_qb,
    stride_qh,
    stride_qd,
    stride_kb,
    stride_kg,
    stride_kn,
    stride_kd,
    stride_mb,
    stride_vb,
    stride_vg,
    stride_vn,
    stride_ve,
    D: tl.constexpr,
    E: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    GROUP_SUM: tl.constexpr,
    UPDATE: tl.constexpr,
    P_UNIT: tl.constexpr,
    INTERPRET: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_PAGES: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    BLOCK_GROUP: tl.constexpr,
    CHUNK_E: tl.constexpr,
):
    """Grid (B · G · (num_blocks + num_splits),)."""
    ticket = tl.atomic_add(ticket_ptr, 1, sem="relaxed")
    num_scored = num_lists * num_blocks
    is_score = ticket < num_scored
    item = tl.where(is_score, ticket, ticket - num_scored)
    per_list = tl.where(is_score, num_blocks, num_splits)
    row_list = (item // per_list).to(tl.int64)
    part = item % per_list
    row = row_list // num_kv_heads
    kv_head = (row_list % num_kv_heads).to(tl.int32)
    k_strides = (stride_kb, stride_kg, stride_kn, stride_kd)
    if is_score:
        length = tl.load(lengths_ptr + row)
        tensors = (q_ptr, k_ptr, starts_ptr, table_ptr, mid_ptr, half_ptr, scores_ptr)
        q_strides = (stride_qb, stride_qh, stride_qd)
        score_block(
            *(row, kv_head, num_kv_heads, part, length, tensors, scale, num_pages, group_size),
            *(stride_tb, q_strides, k_strides, stride_mb, D, PAGE_SIZE, BLOCK_SIZE, GROUP_SUM),
            *(UPDATE, INTERPRET, BLOCK_M, BLOCK_D, BLOCK_P, BLOCK_TOKENS),
        )
        tl.debug_barrier()  # every thread's scores are written before this program is counted
        if tl.atomic_add(arrived_ptr + row_list, 1, sem="acq_rel") == num_blocks - 1:
            rule = (num_pages, width, num_selected, budget, sink_pages, local_pages)
            choose_pages(
                *(row_list, length, scores_ptr, pages_ptr, counts_ptr, rule, PAGE_SIZE),
                BLOCK_PAGES,
            )
            tl.debug_barrier()
            tl.atomic_xchg(gate_ptr + row_list, 1, sem="release")
    else:
        while tl.atomic_add(gate_ptr + row_list, 0, sem="acquire") == 0:
            pass
        tensors = (q_ptr, k_ptr, v_ptr, pages_ptr, counts_ptr, starts_ptr, lengths_ptr, table_ptr)
        sizes = (num_tokens, width, 0, group_size, 1, num_splits)
        m, l, acc = attend_split(
            *(row, kv_head, num_kv_heads, part, tensors, None, scale, sizes, stride_tb),
            *(stride_qb, stride_qh, stride_qd, k_strides),
            *((stride_vb, stride_vg, stride_vn, stride_ve), D, E, PAGE_SIZE, BLOCK_SIZE, 1),
            *(P_UNIT, INTERPRET, BLOCK_M, BLOCK_T, BLOCK_D, BLOCK_E),
        )
        store_split(
            *(m, l, acc, m_ptr, l_ptr, acc_ptr, row_list, part, num_splits, group_size),
            *(E, P_UNIT, BLOCK_M, BLOCK_E),
        )
        tl.debug_barrier()
        if tl.atomic_add(merged_ptr + row_list, 1, sem="acq_rel") == num_splits - 1:
            merge_list(
                *(acc_ptr, m_ptr, l_ptr, out_ptr, lse_ptr, row_list, num_splits, group_size),
                *(E, BLOCK_SPLITS, BLOCK_GROUP, CHUNK_E),
            )
            # Everybody is through this list's gate.
            tl.store(arrived_ptr + row_list, 0)
            tl.store(gate_ptr + row_list, 0)
            tl.store(merged_ptr + row_list, 0)
            if tl.atomic_add(ticket_ptr + 1, 1, sem="relaxed") == num_lists - 1:
                tl.store(ticket_ptr, 0)
                tl.store(ticket_ptr + 1, 0)


@triton.jit
def merge_list(
    acc_ptr,
    m_ptr,
    l_ptr,
    out_ptr,
    lse_ptr,
    row_list,
    num_splits,
    group_size,
    E: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    BLOCK_GROUP: tl.constexpr,
    CHUNK_E: tl.constexpr,
):
    """The splits of all heads of one list, merged in the order of the splits."""
    offs_s = tl.arange(0, BLOCK_SPLITS)
    offs_h = tl.arange(0, BLOCK_GROUP)
    head = row_list * group_size + offs_h
    mask = (offs_s < num_splits)[:, None] & (offs_h < group_size)
    offs = head * num_splits + offs_s[:, None]  # [BLOCK_SPLITS, BLOCK_GROUP]
    # .cg: written by other programs of this launch
    m_split = tl.load(m_ptr + offs, mask=mask, other=float("-inf"), cache_modifier=".cg")
    l_split = tl.load(l_ptr + offs, mask=mask, other=0.0, cache_modifier=".cg")
    m = tl.max(m_split, 0)
    base = tl.where(m == float("-inf"), 0.0, m)
    weight = tl.exp2((m_split - base) * LOG2E)
    l = tl.sum(weight * l_split, 0)
    tl.store(lse_ptr + head, log_sum(base, l), mask=offs_h < group_size)
    weight = weight / tl.where(l == 0.0, 1.0, l)
    for first in tl.static_range(0, E, CHUNK_E):
        offs_e = first + tl.arange(0, CHUNK_E)
        mask_e = offs_e < E
        acc = tl.load(
            acc_ptr + offs[:, :, None] * E + offs_e,
            mask=mask[:, :, None] & mask_e,
            other=0.0,
            cache_modifier=".cg",
        )  # [BLOCK_SPLITS, BLOCK_GROUP, CHUNK_E]
        out = tl.sum(acc * weight[:, :, None], 0)
        tl.store(
            out_ptr + head[:, None] * E + offs_e,
            out.to(out_ptr.dtype.element_ty),
            mask=(offs_h < group_size)[:, None] & mask_e,
        )
