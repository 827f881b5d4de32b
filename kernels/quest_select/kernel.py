"""Quest's select in Triton: a page's metadata when it fills, the bound score, the top-k.

A list's pages are scored in blocks by many programs; the last of them to finish picks the pages.
What is selected equals the torch policy's choice wherever the scores are equal.
"""

# ruff: noqa: E741

import triton
import triton.language as tl

from sparse_eval.kernels.sparse_decode.kernel import locate

INT_MAX = tl.constexpr(2**31 - 1)
FLOAT_MAX = tl.constexpr(3.4028234663852886e38)


SIZES = ["num_pages", "width", "num_selected", "budget", "sink_pages", "local_pages", "num_blocks"]


@triton.jit(do_not_specialize=[*SIZES, "group_size"])
def select_kernel(
    q_ptr,  # [B, H, D]
    k_ptr,  # [batch or block, G, token, D]
    starts_ptr,  # [B], None = 0
    lengths_ptr,  # [B]
    table_ptr,  # [B, blocks], None = k is a contiguous cache
    mid_ptr,  # [B, G, num_pages, D]
    half_ptr,  # [B, G, num_pages, D]
    scores_ptr,  # [B, G, num_pages]
    arrived_ptr,  # [B, G], 0 before and after
    pages_ptr,  # [B, G, width]
    counts_ptr,  # [B, G]
    scale,
    num_pages,
    width,
    num_selected,
    budget,
    sink_pages,
    local_pages,
    num_blocks,
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
    D: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    GROUP_SUM: tl.constexpr,
    UPDATE: tl.constexpr,
    INTERPRET: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_PAGES: tl.constexpr,
):
    """Grid (num_blocks, G, B)."""
    block = tl.program_id(0)
    kv_head = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    num_kv_heads = tl.num_programs(1)
    length = tl.load(lengths_ptr + row)
    tensors = (q_ptr, k_ptr, starts_ptr, table_ptr, mid_ptr, half_ptr, scores_ptr)
    q_strides = (stride_qb, stride_qh, stride_qd)
    k_strides = (stride_kb, stride_kg, stride_kn, stride_kd)
    score_block(
        *(row, kv_head, num_kv_heads, block, length, tensors, scale, num_pages, group_size),
        *(stride_tb, q_strides, k_strides, stride_mb, D, PAGE_SIZE, BLOCK_SIZE, GROUP_SUM),
        *(UPDATE, INTERPRET, BLOCK_M, BLOCK_D, BLOCK_P, BLOCK_TOKENS),
    )
    row_list = row * num_kv_heads + kv_head
    tl.debug_barrier()  # every thread's scores are written before this program is counted
    if tl.atomic_add(arrived_ptr + row_list, 1, sem="acq_rel") == num_blocks - 1:
        tl.store(arrived_ptr + row_list, 0)
        rule = (num_pages, width, num_selected, budget, sink_pages, local_pages)
        choose_pages(
            *(row_list, length, scores_ptr, pages_ptr, counts_ptr, rule, PAGE_SIZE, BLOCK_PAGES)
        )


@triton.jit(do_not_specialize=["num_pages"])
def update_kernel(
    k_ptr,
    starts_ptr,
    lengths_ptr,
    table_ptr,
    mid_ptr,
    half_ptr,
    num_pages,
    stride_tb,
    stride_kb,
    stride_kg,
    stride_kn,
    stride_kd,
    stride_mb,
    D: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
):
    """Grid (B, G): the metadata of each row's newest full page."""
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    length = tl.load(lengths_ptr + row)
    if length >= PAGE_SIZE:
        meta = row * stride_mb + kv_head.to(tl.int64) * num_pages * D
        write_metadata(
            *(row, kv_head, length // PAGE_SIZE - 1, length, k_ptr, starts_ptr, table_ptr),
            *(mid_ptr + meta, half_ptr + meta, stride_tb),
            *((stride_kb, stride_kg, stride_kn, stride_kd), D, PAGE_SIZE, BLOCK_SIZE),
            *(BLOCK_D, BLOCK_TOKENS),
        )


@triton.jit
def score_block(
    row,
    kv_head,
    num_kv_heads,
    block,
    length,
    tensors,
    scale,
    num_pages,
    group_size,
    stride_tb,
    q_strides,
    k_strides,
    stride_mb,
    D: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    GROUP_SUM: tl.constexpr,
    UPDATE: tl.constexpr,
    INTERPRET: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
):
    """Scores of BLOCK_P pages of one KV head; the newest page's metadata first, if it just filled."""
    q_ptr, k_ptr, starts_ptr, table_ptr, mid_ptr, half_ptr, scores_ptr = tensors
    stride_qb, stride_qh, stride_qd = q_strides
    num_full = length // PAGE_SIZE
    first = block * BLOCK_P
    if first < num_full:
        meta = row * stride_mb + kv_head.to(tl.int64) * num_pages * D
        mid_ptr += meta
        half_ptr += meta
        newest = num_full - 1
        if UPDATE:
            if (num_full * PAGE_SIZE == length) & (newest // BLOCK_P == block):
                write_metadata(
                    *(row, kv_head, newest, length, k_ptr, starts_ptr, table_ptr),
                    *(mid_ptr, half_ptr, stride_tb, k_strides, D, PAGE_SIZE, BLOCK_SIZE),
                    *(BLOCK_D, BLOCK_TOKENS),
                )
                tl.debug_barrier()
        offs_m = tl.arange(0, BLOCK_M)
        offs_d = tl.arange(0, BLOCK_D)
        offs_p = first + tl.arange(0, BLOCK_P)
        mask_m = offs_m < group_size
        head = (kv_head * group_size + offs_m).to(tl.int64)
        q = tl.load(
            q_ptr + row * stride_qb + head[:, None] * stride_qh + offs_d * stride_qd,
            mask=mask_m[:, None] & (offs_d < D),
            other=0.0,
        )  # [BLOCK_M, BLOCK_D]
        offs_meta = offs_p.to(tl.int64)[:, None] * D + offs_d
        mask_meta = (offs_p < num_full)[:, None] & (offs_d < D)
        mid = tl.load(mid_ptr + offs_meta, mask=mask_meta, other=0.0)  # [BLOCK_P, BLOCK_D]
        half = tl.load(half_ptr + offs_meta, mask=mask_meta, other=0.0)
        if INTERPRET:
            mid = mid.to(tl.float32)
            half = half.to(tl.float32)
        q = q.to(mid.dtype)
        s = tl.dot(q, tl.trans(mid), input_precision="ieee")
        s = tl.dot(tl.abs(q), tl.trans(half), s, input_precision="ieee") * scale
        if GROUP_SUM:
            shared = tl.sum(tl.where(mask_m[:, None], s, 0.0), 0)
        else:
            shared = tl.max(tl.where(mask_m[:, None], s, float("-inf")), 0)
        scores = scores_ptr + (row * num_kv_heads + kv_head) * num_pages
        tl.store(scores + offs_p, shared, mask=offs_p < num_full)


@triton.jit
def write_metadata(
    row,
    kv_head,
    page,
    length,
    k_ptr,
    starts_ptr,
    table_ptr,
    mid_ptr,
    half_ptr,
    stride_tb,
    k_strides,
    D: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
):
    """Middle and half-width of a full page's key box, rounded as the torch policy rounds them."""
    stride_kb, stride_kg, stride_kn, stride_kd = k_strides
    k_ptr += kv_head.to(tl.int64) * stride_kg
    if table_ptr is None:
        k_ptr += row * stride_kb
    else:
        table_ptr += row * stride_tb
    start = 0
    if starts_ptr is not None:
        start = tl.load(starts_ptr + row)
    offs_d = tl.arange(0, BLOCK_D)
    offs_t = tl.arange(0, BLOCK_TOKENS)
    lists = (None, table_ptr, start, length, 0)
    block, token, _ = locate(page * PAGE_SIZE + offs_t, lists, PAGE_SIZE, BLOCK_SIZE)
    mask = (offs_t < PAGE_SIZE)[:, None] & (offs_d < D)
    keys = tl.load(
        k_ptr + (block * stride_kb + token * stride_kn)[:, None] + offs_d * stride_kd,
        mask=mask,
        other=0.0,
    ).to(tl.float32)
    lo = tl.min(tl.where(mask, keys, float("inf")), 0).to(tl.float64)
    hi = tl.max(tl.where(mask, keys, float("-inf")), 0).to(tl.float64)
    mid = nearest(((lo + hi) * 0.5).to(tl.float32), mid_ptr.dtype.element_ty)
    center = mid.to(tl.float32).to(tl.float64)
    half = round_up(tl.maximum(hi - center, center - lo), mid_ptr.dtype.element_ty)
    offs = page.to(tl.int64) * D + offs_d
    tl.store(mid_ptr + offs, mid, mask=offs_d < D)
    tl.store(half_ptr + offs, half, mask=offs_d < D)


@triton.jit
def nearest(x, dtype: tl.constexpr):
    """float32 x in dtype; bfloat16 by its bits, which the interpreter would truncate."""
    if dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        y = bits.to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        y = x.to(dtype)
    return y


@triton.jit
def round_up(x, dtype: tl.constexpr):
    """The smallest number of dtype that is >= x (float64, >= 0): the next larger bits, if need be."""
    y = nearest(x.to(tl.float32), dtype)
    if dtype == tl.float32:
        above = (y.to(tl.int32, bitcast=True) + 1).to(tl.float32, bitcast=True)
    else:
        above = (y.to(tl.int16, bitcast=True) + 1).to(dtype, bitcast=True)
    return tl.where(y.to(tl.float32).to(tl.float64) < x, above, y)


@triton.jit
def choose_pages(
    row_list,
    length,
    scores_ptr,
    pages_ptr,
    counts_ptr,
    rule,
    PAGE_SIZE: tl.constexpr,
    BLOCK_PAGES: tl.constexpr,
):
    """The forced pages and the best of the others, ascending; ties to the lowest id.

    Scores become integers of the same order; the threshold is cornered four ways a round, and the
    rounds end as soon as it parts the wanted number of pages from the rest."""
    num_pages, width, num_selected, budget, sink_pages, local_pages = rule
    offs = tl.arange(0, BLOCK_PAGES)
    num_visible = tl.minimum((length + PAGE_SIZE - 1) // PAGE_SIZE, num_pages)
    visible = offs < num_visible
    forced = visible & ((offs < sink_pages) | (offs >= num_visible - local_pages))
    open_ = visible & (forced == 0)
    count = tl.where(length <= budget, width, tl.minimum(num_selected, width))
    count = tl.minimum(count, num_visible)
    wanted = count - tl.sum(forced.to(tl.int32), 0)

    # .cg: written by other programs of this launch
    s = tl.load(
        scores_ptr + row_list * num_pages + offs, mask=open_, other=0.0, cache_modifier=".cg"
    )
    s = tl.where(s == s, tl.minimum(tl.maximum(s, -FLOAT_MAX), FLOAT_MAX), -FLOAT_MAX)
    bits = tl.where(s == 0.0, 0.0, s).to(tl.int32, bitcast=True)  # -0 ties with 0
    key = bits ^ ((bits >> 31) & INT_MAX)
    key = tl.where(open_, key, -INT_MAX - 1)
    lo = tl.min(tl.where(open_, key, INT_MAX), 0).to(tl.int64)
    hi = tl.max(key, 0).to(tl.int64) + 1
    num_lo = tl.sum(open_.to(tl.int32), 0)  # keys >= lo: never fewer than wanted
    while (hi - lo > 1) & (num_lo != wanted) & (wanted > 0):
        quarter = (hi - lo) // 4
        t1 = lo + quarter
        t2 = lo + (hi - lo) // 2
        t3 = hi - 1 - quarter
        n1, n2, n3 = tl.reduce(
            (
                (key >= t1.to(tl.int32)).to(tl.int32),
                (key >= t2.to(tl.int32)).to(tl.int32),
                (key >= t3.to(tl.int32)).to(tl.int32),
            ),
            0,
            add3,
        )
        if n3 >= wanted:
            lo = t3
            num_lo = n3
        elif n2 >= wanted:
            lo = t2
            num_lo = n2
            hi = t3
        elif n1 >= wanted:
            lo = t1
            num_lo = n1
            hi = t2
        else:
            hi = t1

    last = tl.where(wanted > 0, lo, INT_MAX).to(tl.int32)
    above = forced | (open_ & (key > last))
    tied = open_ & (key == last)
    room = count - tl.sum(above.to(tl.int32), 0)
    # One scan counts both kinds: pages before this one that are above, and that are tied.
    before = tl.cumsum(above.to(tl.int32) + (tied.to(tl.int32) << 16), 0)
    num_above = (before & 0xFFFF) - above.to(tl.int32)
    num_tied = (before >> 16) - tied.to(tl.int32)
    keep = above | (tied & (num_tied < room))
    slot = num_above + tl.minimum(num_tied, room)
    pages = pages_ptr + row_list * width
    tl.store(pages + slot, offs, mask=keep)
    tl.store(pages + offs, -1, mask=(offs >= count) & (offs < width))
    tl.store(counts_ptr + row_list, count)


@triton.jit
def add3(a1, a2, a3, b1, b2, b3):
    return a1 + b1, a2 + b2, a3 + b3
