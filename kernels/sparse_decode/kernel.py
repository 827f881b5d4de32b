"""Decode attention over page lists in Triton: cut each list into splits, attend, merge.

One program attends one split of one list for all query heads that share it, so a page is loaded
once per group. Source of splits and merge: flash-decoding (Dao et al. 2023,
https://crfm.stanford.edu/2023/10/12/flashdecoding.html); of the running softmax: Milakov and
Gimelshein 2018, https://arxiv.org/abs/1805.02867.
"""

# ruff: noqa: E741

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

INTERPRETED: bool = triton.knobs.runtime.interpret
LOG2E = tl.constexpr(1.4426950408889634)


SIZES = [
    "num_tokens",
    "num_slots",
    "num_splits",
    "num_parts",
    "heads_per_list",
    "lists_per_kv_head",
]


@triton.jit(do_not_specialize=SIZES)
def attend_split_kernel(
    q_ptr,  # [B, H, D]
    k_ptr,  # [batch or block, G, token, D]
    v_ptr,  # [batch or block, G, token, E]
    pages_ptr,  # [B, S, num_slots], None = dense
    counts_ptr,  # [B, S]
    starts_ptr,  # [B], None = 0
    lengths_ptr,  # [B]
    table_ptr,  # [B, blocks], None = k and v are contiguous caches
    acc_ptr,  # [B, H, num_splits, E]
    m_ptr,  # [B, H, num_splits]
    l_ptr,  # [B, H, num_splits]
    part_ptr,  # [B, H, num_parts], None = page LSE not asked for
    scale,
    num_tokens,  # the cache's extent, not a live length
    num_slots,
    num_splits,
    num_parts,
    heads_per_list,
    lists_per_kv_head,
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
    BLOCK_SIZE: tl.constexpr,  # tokens per block of the pool
    ONE_BLOCK: tl.constexpr,  # every tile lies in one block of the pool
    PART: tl.constexpr,  # tokens per stored part of a page's LSE; divides page and tile
    P_UNIT: tl.constexpr,  # weights enter the dot times P_UNIT, clear of fp16's floor
    INTERPRET: tl.constexpr,
    PDL: tl.constexpr,  # the merge is launched as a programmatic dependent of this kernel
    CHAINED: tl.constexpr,  # and this kernel as one of the kernel that writes the lists
    BLOCK_M: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Grid (B, S, num_splits). Stores m = max s, l = Σ exp(s - m), acc = Σ exp(s - m)·v."""
    pdl_launch(PDL)
    row = tl.program_id(0).to(tl.int64)
    list_id = tl.program_id(1)
    split = tl.program_id(2)
    row_list = row * tl.num_programs(1) + list_id
    kv_head = (list_id // lists_per_kv_head).to(tl.int64)
    k_ptr += kv_head * stride_kg
    v_ptr += kv_head * stride_vg
    if table_ptr is None:
        k_ptr += row * stride_kb
        v_ptr += row * stride_vb
    else:
        table_ptr += row * stride_tb

    start = 0
    if starts_ptr is not None:
        start = tl.load(starts_ptr + row)
    length = tl.minimum(tl.load(lengths_ptr + row), num_tokens - start)
    pdl_wait(CHAINED)
    count = num_slots
    walk = length  # tokens to walk, the unread rest of a partial page included
    if pages_ptr is not None:
        pages_ptr += row_list * num_slots
        count = tl.minimum(tl.load(counts_ptr + row_list), num_slots)
        walk = count * PAGE_SIZE

    offs_m = tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    offs_e = tl.arange(0, BLOCK_E)
    mask_m = offs_m < heads_per_list
    head = (list_id * heads_per_list + offs_m).to(tl.int64)
    row_head = row_list * heads_per_list + offs_m
    q = tl.load(
        q_ptr + row * stride_qb + head[:, None] * stride_qh + offs_d * stride_qd,
        mask=mask_m[:, None] & (offs_d < D),
        other=0.0,
    )  # [BLOCK_M, BLOCK_D]
    if INTERPRET:  # its bfloat16 arithmetic is wrong
        q = q.to(tl.float32)
    if part_ptr is not None:
        part_ptr += row_head[:, None] * num_parts

    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.full([BLOCK_M], 0.0, tl.float32)
    acc = tl.full([BLOCK_M, BLOCK_E], 0.0, tl.float32)
    lists = (pages_ptr, table_ptr, start, length, count)
    cache = (k_ptr, v_ptr, stride_kb, stride_kn, stride_kd, stride_vb, stride_vn, stride_ve)
    parts = (part_ptr, num_parts, mask_m)
    num_tiles = (tl.maximum(walk, 0) + BLOCK_T - 1) // BLOCK_T
    # No split takes more than one tile more than another.
    tile = split * num_tiles // num_splits
    end = (split + 1) * num_tiles // num_splits
    if INTERPRET:  # run-time bounds of `for` need Triton 3.9 there
        while tile < end:
            m, l, acc = attend_tile(
                *(tile, m, l, acc, q, scale, lists, cache, parts, D, E, PAGE_SIZE, BLOCK_SIZE),
                *(ONE_BLOCK, PART, P_UNIT, INTERPRET, BLOCK_T, BLOCK_D, BLOCK_E),
            )
            tile += 1
    else:
        for i in tl.range(tile, end):
            m, l, acc = attend_tile(
                *(i, m, l, acc, q, scale, lists, cache, parts, D, E, PAGE_SIZE, BLOCK_SIZE),
                *(ONE_BLOCK, PART, P_UNIT, INTERPRET, BLOCK_T, BLOCK_D, BLOCK_E),
            )

    offs_split = row_head * num_splits + split
    tl.store(m_ptr + offs_split, m, mask=mask_m)
    tl.store(l_ptr + offs_split, l, mask=mask_m)
    acc_ptrs = acc_ptr + offs_split[:, None] * E + offs_e
    tl.store(acc_ptrs, acc / P_UNIT, mask=mask_m[:, None] & (offs_e < E))


@triton.jit
def pdl_launch(PDL: tl.constexpr):
    """Let the next kernel of the stream take its place; it waits for this one's end by itself."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def pdl_wait(PDL: tl.constexpr):
    """Wait for the end of the kernel before this one, and for all it wrote."""
    if PDL:
        gdc_wait()


@triton.jit
def attend_tile(
    tile,
    m,
    l,
    acc,
    q,
    scale,
    lists,
    cache,
    parts,
    D: tl.constexpr,
    E: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ONE_BLOCK: tl.constexpr,
    PART: tl.constexpr,
    P_UNIT: tl.constexpr,
    INTERPRET: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """The running softmax (m, l, acc) after BLOCK_T more tokens of the list."""
    k_ptr, v_ptr, stride_kb, stride_kn, stride_kd, stride_vb, stride_vn, stride_ve = cache
    offs_t = tile * BLOCK_T + tl.arange(0, BLOCK_T)
    offs_d = tl.arange(0, BLOCK_D)
    offs_e = tl.arange(0, BLOCK_E)
    block, token, read = locate(
        offs_t, tile * BLOCK_T, lists, PAGE_SIZE, BLOCK_SIZE, ONE_BLOCK, BLOCK_T
    )
    k = tl.load(
        k_ptr + (block * stride_kb + token * stride_kn)[:, None] + offs_d * stride_kd,
        mask=read[:, None] & (offs_d < D),
        other=0.0,
    )  # [BLOCK_T, BLOCK_D]
    v = tl.load(
        v_ptr + (block * stride_vb + token * stride_vn)[:, None] + offs_e * stride_ve,
        mask=read[:, None] & (offs_e < E),
        other=0.0,
    )  # [BLOCK_T, BLOCK_E]
    if INTERPRET:
        k = k.to(tl.float32)
        v = v.to(tl.float32)
    s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    s = tl.where(read, s, float("-inf"))  # [BLOCK_M, BLOCK_T]

    part_ptr, num_parts, mask_m = parts
    if part_ptr is not None:
        offs_part = tile * (BLOCK_T // PART) + tl.arange(0, BLOCK_T // PART)
        mask_part = mask_m[:, None] & (offs_part < num_parts)
        tl.store(part_ptr + offs_part, lse_of_parts(s, PART), mask=mask_part)

    m_new = tl.maximum(m, tl.max(s, 1))
    base = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.exp2((s - base[:, None]) * LOG2E)
    alpha = tl.exp2((m - base) * LOG2E)
    l = l * alpha + tl.sum(p, 1)
    acc = add_weighted(acc * alpha[:, None], p * P_UNIT, v)
    return m_new, l, acc


@triton.jit
def locate(
    offs_t,
    first,
    lists,
    PAGE_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ONE_BLOCK: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Where each token of a list's tile lies (block, token in it; block 0 in a contiguous cache),
    and whether it is read: in a valid slot, and live. offs_t = first + arange(BLOCK_T)."""
    pages_ptr, table_ptr, start, length, count = lists
    lowest = first  # position of the tile's first token, where one page holds the tile
    if pages_ptr is None:
        position = offs_t
        read = position < length
    else:
        if PAGE_SIZE % BLOCK_T == 0:  # one slot a tile: a scalar, which needs no pipeline stage
            slot = first // PAGE_SIZE
            page = tl.load(pages_ptr + slot, mask=slot < count, other=-1)
            lowest = page * PAGE_SIZE + first % PAGE_SIZE
            page += tl.zeros([BLOCK_T], tl.int32)
            position = lowest + tl.arange(0, BLOCK_T)
        else:
            slot = offs_t // PAGE_SIZE
            page = tl.load(pages_ptr + slot, mask=slot < count, other=-1)
            position = page * PAGE_SIZE + offs_t % PAGE_SIZE
        read = (page >= 0) & (page <= length // PAGE_SIZE) & (position < length)
    token = start + position
    if table_ptr is None:
        block = token * 0
    elif ONE_BLOCK:  # one block a tile: a scalar again
        is_read = (lowest >= 0) & (lowest < length)
        block = tl.load(table_ptr + lowest // BLOCK_SIZE, mask=is_read, other=0)
        block += tl.zeros([BLOCK_T], tl.int32)
        token = token % BLOCK_SIZE
    else:
        block = tl.load(table_ptr + token // BLOCK_SIZE, mask=read, other=0)
        token = token % BLOCK_SIZE
    return block.to(tl.int64), token.to(tl.int64), read


@triton.jit
def add_weighted(acc, p, v):
    """acc + p @ v. 16-bit p enters in two pieces, so that only the output is rounded: rounding p
    once adds 20 to 40 % to its rms error (random tensors of 16 to 4096 tokens)."""
    if v.dtype == tl.float32:
        acc = tl.dot(p, v, acc, input_precision="ieee")
    else:
        high = p.to(v.dtype)
        low = (p - high.to(tl.float32)).to(v.dtype)
        acc = tl.dot(low, v, tl.dot(high, v, acc))
    return acc


@triton.jit
def lse_of_parts(s, PART: tl.constexpr):
    """Log-sum-exp of each PART neighbouring columns: [BLOCK_M, BLOCK_T // PART]."""
    if PART == 1:
        lse = s
    else:
        s = tl.reshape(s, [s.shape[0], s.shape[1] // PART, PART])
        m = tl.max(s, 2)
        base = tl.where(m == float("-inf"), 0.0, m)
        lse = log_sum(base, tl.sum(tl.exp2((s - base[:, :, None]) * LOG2E), 2))
    return lse


@triton.jit
def log_sum(base, l):
    """base + log(l); -inf where nothing was read."""
    return tl.where(l == 0.0, float("-inf"), base + tl.log(tl.where(l == 0.0, 1.0, l)))


@triton.jit(do_not_specialize=["num_splits"])
def merge_splits_kernel(
    acc_ptr,  # [B · H, num_splits, E]
    m_ptr,  # [B · H, num_splits]
    l_ptr,  # [B · H, num_splits]
    out_ptr,  # [B · H, E]
    lse_ptr,  # [B · H]
    num_splits,
    E: tl.constexpr,
    PDL: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Grid (B · H, E / BLOCK_E). An empty split weighs 0; a row of empty ones gives 0 and -inf."""
    row_head = tl.program_id(0).to(tl.int64)
    offs_e = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    mask_e = offs_e < E
    split = tl.arange(0, BLOCK_SPLITS)
    mask_split = split < num_splits
    offs_split = row_head * num_splits + split
    pdl_wait(PDL)
    m_split = tl.load(m_ptr + offs_split, mask=mask_split, other=float("-inf"))
    l_split = tl.load(l_ptr + offs_split, mask=mask_split, other=0.0)
    acc = tl.load(
        acc_ptr + offs_split[:, None] * E + offs_e,
        mask=mask_split[:, None] & mask_e,
        other=0.0,
    )  # [BLOCK_SPLITS, BLOCK_E]

    m = tl.max(m_split, 0)
    base = tl.where(m == float("-inf"), 0.0, m)
    weight = tl.exp2((m_split - base) * LOG2E)
    l = tl.sum(weight * l_split, 0)
    out = tl.sum(weight[:, None] * acc, 0) / tl.where(l == 0.0, 1.0, l)
    tl.store(out_ptr + row_head * E + offs_e, out.to(out_ptr.dtype.element_ty), mask=mask_e)
    if tl.program_id(1) == 0:
        tl.store(lse_ptr + row_head, log_sum(base, l))
