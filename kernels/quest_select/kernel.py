"""Quest's select in Triton: a page's metadata when it fills, the bound score, the top-k.

Many programs score a list's pages, one picks them. What is selected equals the torch policy's
choice wherever the scores are equal.
"""

# ruff: noqa: E741

import triton
import triton.language as tl

from sparse_eval.kernels.sparse_decode.kernel import locate, pdl_launch, pdl_wait

INT_MAX = tl.constexpr(2**31 - 1)
FLOAT_MAX = tl.constexpr(3.4028234663852886e38)


@triton.jit(do_not_specialize=["num_pages", "num_blocks", "group_size"])
def score_kernel(
    q_ptr,  # [B, H, D]
    k_ptr,  # [batch or block, G, token, D]
    starts_ptr,  # [B], None = 0
    lengths_ptr,  # [B]
    table_ptr,  # [B, blocks], None = k is a contiguous cache
    mid_ptr,  # [B or 1, G, num_pages, D]
    half_ptr,  # [B or 1, G, num_pages, D]
    scores_ptr,  # [B, G, num_pages] float32; what is not a full page stays unwritten
    scale,
    num_pages,
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
    UPDATE: tl.constexpr,  # the grid has one block more: the page that just filled, if one did
    INTERPRET: tl.constexpr,
    PDL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
):
    """Grid (num_blocks + UPDATE, G, B)."""
    pdl_launch(PDL)
    block = tl.program_id(0)
    kv_head = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    offs_m = tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    mask_m = offs_m < group_size
    head = (kv_head * group_size + offs_m).to(tl.int64)
    q = tl.load(
        q_ptr + row * stride_qb + head[:, None] * stride_qh + offs_d * stride_qd,
        mask=mask_m[:, None] & (offs_d < D),
        other=0.0,
    )  # [BLOCK_M, BLOCK_D]
    length = tl.load(lengths_ptr + row)
    num_full = tl.minimum(length // PAGE_SIZE, num_pages)
    if UPDATE:
        num_known = tl.where(num_full * PAGE_SIZE == length, num_full - 1, num_full)
    else:
        num_known = num_full
    scores_ptr += (row * tl.num_programs(1) + kv_head) * num_pages
    meta = row * stride_mb + kv_head.to(tl.int64) * num_pages * D
    mid_ptr += meta
    half_ptr += meta
    if block < num_blocks:
        num_tiles = (num_known + BLOCK_P - 1) // BLOCK_P
        tile = block * num_tiles // num_blocks
        end = (block + 1) * num_tiles // num_blocks
        pages = (scores_ptr, mid_ptr, half_ptr, num_known)
        if INTERPRET:  # run-time bounds of `for` need Triton 3.9 there
            while tile < end:
                score_tile(
                    *(tile, q, mask_m, scale, pages, D, GROUP_SUM, INTERPRET, BLOCK_D, BLOCK_P)
                )
                tile += 1
        else:
            for i in tl.range(tile, end):
                score_tile(*(i, q, mask_m, scale, pages, D, GROUP_SUM, INTERPRET, BLOCK_D, BLOCK_P))
    if UPDATE:
        if (block == num_blocks) & (num_known == num_full - 1) & (num_full > 0):
            mid_D, half_D = write_metadata(
                *(row, kv_head, num_known, length, k_ptr, starts_ptr, table_ptr),
                *(mid_ptr, half_ptr, stride_tb, (stride_kb, stride_kg, stride_kn, stride_kd)),
                *(D, PAGE_SIZE, BLOCK_SIZE, BLOCK_D, BLOCK_TOKENS),
            )
            q32 = q.to(tl.float32)
            mid32 = mid_D.to(tl.float32)
            half32 = half_D.to(tl.float32)
            newest = tl.sum(q32 * mid32 + tl.abs(q32) * half32, 1) * scale  # [BLOCK_M]
            tl.store(scores_ptr + num_known, share_in_group(newest, mask_m, 0, GROUP_SUM))


@triton.jit
def score_tile(
    tile,
    q,
    mask_m,
    scale,
    pages,
    D: tl.constexpr,
    GROUP_SUM: tl.constexpr,
    INTERPRET: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Stores the scores of BLOCK_P pages."""
    scores_ptr, mid_ptr, half_ptr, num_known = pages
    offs_d = tl.arange(0, BLOCK_D)
    offs_p = tile * BLOCK_P + tl.arange(0, BLOCK_P)
    offs_meta = offs_p.to(tl.int64)[:, None] * D + offs_d
    mask_meta = (offs_p < num_known)[:, None] & (offs_d < D)
    mid = tl.load(mid_ptr + offs_meta, mask=mask_meta, other=0.0)  # [BLOCK_P, BLOCK_D]
    half = tl.load(half_ptr + offs_meta, mask=mask_meta, other=0.0)
    if INTERPRET:
        mid = mid.to(tl.float32)
        half = half.to(tl.float32)
    q = q.to(mid.dtype)
    s = tl.dot(q, tl.trans(mid), input_precision="ieee")
    s = tl.dot(tl.abs(q), tl.trans(half), s, input_precision="ieee") * scale
    shared = share_in_group(s, mask_m[:, None], 0, GROUP_SUM)
    tl.store(scores_ptr + offs_p, shared, mask=offs_p < num_known)


@triton.jit
def share_in_group(s, mask, axis: tl.constexpr, GROUP_SUM: tl.constexpr):
    """One score per page from those of a group's heads, the first axis."""
    if GROUP_SUM:
        shared = tl.sum(tl.where(mask, s, 0.0), axis)
    else:
        shared = tl.max(tl.where(mask, s, float("-inf")), axis)
    return shared


RULE = ["num_pages", "width", "num_selected", "budget", "sink_pages", "local_pages"]


@triton.jit(do_not_specialize=RULE)
def choose_kernel(
    scores_ptr,  # [B, G, num_pages]
    lengths_ptr,  # [B]
    pages_ptr,  # [B, G, width]
    counts_ptr,  # [B, G]
    num_pages,
    width,
    num_selected,
    budget,
    sink_pages,
    local_pages,
    PAGE_SIZE: tl.constexpr,
    PDL: tl.constexpr,
    BLOCK_PAGES: tl.constexpr,
):
    """Grid (G, B): the forced pages and the best of the others, ascending; ties to the lowest id.

    Scores become integers of the same order; the threshold is cornered three ways a round, and the
    rounds end as soon as it parts the wanted number of pages from the rest."""
    pdl_launch(PDL)
    row = tl.program_id(1).to(tl.int64)
    row_list = row * tl.num_programs(0) + tl.program_id(0)
    length = tl.load(lengths_ptr + row)
    offs = tl.arange(0, BLOCK_PAGES)
    num_visible = tl.minimum((length + PAGE_SIZE - 1) // PAGE_SIZE, num_pages)
    first_local = tl.maximum(num_visible - local_pages, 0)
    num_sinks = tl.minimum(sink_pages, first_local)
    is_open = (offs >= num_sinks) & (offs < first_local)
    num_open = first_local - num_sinks
    num_forced = num_visible - num_open
    count = tl.where(length <= budget, width, tl.minimum(num_selected, width))
    count = tl.minimum(count, num_visible)
    wanted = count - num_forced

    pdl_wait(PDL)
    s = tl.load(scores_ptr + row_list * num_pages + offs, mask=is_open, other=0.0)
    s = tl.where(s == s, tl.minimum(tl.maximum(s, -FLOAT_MAX), FLOAT_MAX), -FLOAT_MAX)
    bits = tl.where(s == 0.0, 0.0, s).to(tl.int32, bitcast=True)  # -0 ties with 0
    key = bits ^ ((bits >> 31) & INT_MAX)
    key = tl.where(is_open, key, -INT_MAX - 1)
    # num_lo keys are >= lo, never fewer than wanted; num_hi are >= hi, always fewer.
    lo = tl.min(tl.where(is_open, key, INT_MAX), 0).to(tl.int64)
    hi = tl.max(key, 0).to(tl.int64) + 1
    num_lo = num_open
    num_hi = 0
    while (hi - lo > 1) & (num_lo > wanted) & (wanted > 0):
        third = (hi - lo) // 3
        t1 = lo + third
        t2 = tl.minimum(hi - third, hi - 1)
        # Both counts in one sum: there are fewer than 2^15 pages.
        both = (key >= t1.to(tl.int32)).to(tl.int32) + ((key >= t2.to(tl.int32)).to(tl.int32) << 16)
        both = tl.sum(both, 0)
        n1 = both & 0xFFFF
        n2 = both >> 16
        if n2 >= wanted:
            lo = t2
            num_lo = n2
        elif n1 >= wanted:
            lo = t1
            num_lo = n1
            hi = t2
            num_hi = n2
        else:
            hi = t1
            num_hi = n1

    # Either everything from lo up is wanted, or the keys that equal lo fill what is left.
    has_ties = (num_lo > wanted) & (wanted > 0)
    none = tl.maximum(hi, 0) + INT_MAX  # no key is as large
    at_least = tl.where(wanted > 0, tl.where(has_ties, hi, lo), none)
    above = is_open & (key.to(tl.int64) >= at_least)
    tied = is_open & (key.to(tl.int64) == tl.where(has_ties, lo, none))
    above = above | (offs < num_sinks) | ((offs >= first_local) & (offs < num_visible))
    room = wanted - num_hi
    # One scan counts both kinds: pages before this one that are above, and that are tied.
    before = tl.cumsum(above.to(tl.int32) + (tied.to(tl.int32) << 16), 0)
    num_above = (before & 0xFFFF) - above.to(tl.int32)
    num_tied = (before >> 16) - tied.to(tl.int32)
    keep = above | (tied & (num_tied < room))
    slot = num_above + tl.where(has_ties, tl.minimum(num_tied, room), 0)
    pages = pages_ptr + row_list * width
    tl.store(pages + slot, offs, mask=keep)
    tl.store(pages + offs, -1, mask=(offs >= count) & (offs < width))
    tl.store(counts_ptr + row_list, count)


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
    first = page * PAGE_SIZE
    block, token, _ = locate(
        first + offs_t, first, lists, PAGE_SIZE, BLOCK_SIZE, False, BLOCK_TOKENS
    )
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
    return mid, half


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
