"""Quest's select in Triton: a page's metadata when it fills, the bound score, the top-k.

Many programs score a list's pages, one picks them. What is selected equals the torch policy's
choice wherever the scores are equal.
"""

# ruff: noqa: E741

import triton
import triton.language as tl

from sparse_eval.kernels.sparse_decode.kernel import (
    load_queries,
    locate,
    pdl_launch,
    pdl_wait,
    signal,
    wait_for,
)

INT_MIN = tl.constexpr(-(2**31))
UINT_MAX = tl.constexpr(2**32 - 1)
FLOAT_MAX = tl.constexpr(3.4028234663852886e38)


@triton.jit(do_not_specialize=["num_pages", "num_blocks", "num_lists", "kv_heads", "group_size"])
def score_kernel(
    q_ptr,  # [B, H, D]
    k_ptr,  # [batch or block, G, token, D]
    starts_ptr,  # [B], None = 0
    lengths_ptr,  # [B]
    table_ptr,  # [B, blocks], None = k is a contiguous cache
    mid_ptr,  # [B or 1, G, num_pages, D]
    half_ptr,  # [B or 1, G, num_pages, D]
    scales_ptr,  # [B or 1, G, num_pages, 2] float32 of mid and half in 8 bits, None = not in 8 bits
    keys_ptr,  # [B, G, stride_list] uint32; what is not a full page stays unwritten
    scale,
    num_pages,
    num_blocks,
    num_lists,
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
    stride_mb,
    D: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    GROUP_SUM: tl.constexpr,
    UPDATE: tl.constexpr,  # num_lists programs more, for the page that just filled
    INTERPRET: tl.constexpr,
    PDL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
):
    """Grid (lists · (num_blocks + UPDATE),), scores first, in the order of the lists.

    The page that just filled is the newest: it is forced, so nobody needs its score."""
    pdl_launch(PDL)
    program = tl.program_id(0)
    if program < num_lists * num_blocks:
        row_list = program // num_blocks
        row = (row_list // kv_heads).to(tl.int64)
        kv_head = row_list % kv_heads
        block = program % num_blocks
        q = load_queries(
            *(q_ptr + row * stride_qb, kv_head * group_size, group_size),
            *(stride_qh, stride_qd, D, False, BLOCK_M, BLOCK_D),
        )
        num_full = tl.minimum(tl.load(lengths_ptr + row) // PAGE_SIZE, num_pages)
        meta = row * stride_mb + kv_head.to(tl.int64) * num_pages * D
        if scales_ptr is not None:
            scales_ptr += meta // D * 2
        box = (mid_ptr + meta, half_ptr + meta, scales_ptr)
        keys_ptr += row_list.to(tl.int64) * stride_list
        pages = (keys_ptr, box, num_full)
        num_tiles = (num_full + BLOCK_P - 1) // BLOCK_P
        tile = block * num_tiles // num_blocks
        end = (block + 1) * num_tiles // num_blocks
        options = (q, group_size, scale, pages)
        if INTERPRET:  # run-time bounds of `for` need Triton 3.9 there
            while tile < end:
                score_tile(tile, *options, D, GROUP_SUM, INTERPRET, BLOCK_M, BLOCK_D, BLOCK_P)
                tile += 1
        else:
            for i in tl.range(tile, end):
                score_tile(i, *options, D, GROUP_SUM, INTERPRET, BLOCK_M, BLOCK_D, BLOCK_P)
    elif UPDATE:
        row_list = program - num_lists * num_blocks
        row = (row_list // kv_heads).to(tl.int64)
        kv_head = row_list % kv_heads
        length = tl.load(lengths_ptr + row)
        page = length // PAGE_SIZE - 1
        if (page >= 0) & (page < num_pages) & (length % PAGE_SIZE == 0):
            meta = row * stride_mb + kv_head.to(tl.int64) * num_pages * D
            if scales_ptr is not None:
                scales_ptr += meta // D * 2
            write_metadata(
                *(row, kv_head, page, length, k_ptr, starts_ptr, table_ptr),
                *(mid_ptr + meta, half_ptr + meta, scales_ptr),
                *(
                    stride_tb,
                    (stride_kb, stride_kg, stride_kn, stride_kd),
                    D,
                    PAGE_SIZE,
                    BLOCK_SIZE,
                ),
                *(BLOCK_D, BLOCK_TOKENS),
            )


@triton.jit
def score_tile(
    tile,
    q,
    group_size,
    scale,
    pages,
    D: tl.constexpr,
    GROUP_SUM: tl.constexpr,
    INTERPRET: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Stores the keys of BLOCK_P pages."""
    keys_ptr, box, num_full = pages
    mid_ptr, half_ptr, scales_ptr = box
    offs_d = tl.arange(0, BLOCK_D)
    offs_p = tile * BLOCK_P + tl.arange(0, BLOCK_P)
    mask_m = tl.arange(0, BLOCK_M) < group_size
    offs_meta = offs_p.to(tl.int64)[:, None] * D + offs_d
    mask_meta = (offs_p < num_full)[:, None] & (offs_d < D)
    mid = tl.load(mid_ptr + offs_meta, mask=mask_meta, other=0.0)  # [BLOCK_P, BLOCK_D]
    half = tl.load(half_ptr + offs_meta, mask=mask_meta, other=0.0)
    if INTERPRET:
        mid = mid.to(tl.float32)
        half = half.to(tl.float32)
    elif scales_ptr is not None:  # whole numbers up to 255 are exact in every float dtype
        mid = mid.to(q.dtype)
        half = half.to(q.dtype)
    q = q.to(mid.dtype)
    s = tl.dot(q, tl.trans(mid), input_precision="ieee")
    if scales_ptr is None:
        s = tl.dot(tl.abs(q), tl.trans(half), s, input_precision="ieee") * scale
    else:
        mask_p = offs_p < num_full
        mid_scale = tl.load(scales_ptr + 2 * offs_p, mask=mask_p, other=0.0)
        half_scale = tl.load(scales_ptr + 2 * offs_p + 1, mask=mask_p, other=0.0)
        spread = tl.dot(tl.abs(q), tl.trans(half), input_precision="ieee")
        s = (s * mid_scale + spread * half_scale) * scale
    shared = share_in_group(s, mask_m[:, None], 0, GROUP_SUM)
    tl.store(keys_ptr + offs_p, key_of(shared), mask=offs_p < num_full)


@triton.jit
def key_of(s):
    """uint32 in the order of the scores: -0 equals 0, NaN is lowest, none is 0 or UINT_MAX."""
    s = tl.where(s == s, tl.minimum(tl.maximum(s, -FLOAT_MAX), FLOAT_MAX), -FLOAT_MAX)
    bits = tl.where(s == 0.0, 0.0, s).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) | INT_MIN)).to(tl.uint32, bitcast=True)


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
    keys_ptr,  # [B, G, stride_list]
    lengths_ptr,  # [B]
    pages_ptr,  # [B, G, width]
    counts_ptr,  # [B, G]
    flags_ptr,  # [B, G]: set when a list is chosen, None = nobody is told
    num_pages,
    width,
    num_selected,
    budget,
    sink_pages,
    local_pages,
    stride_list,
    PAGE_SIZE: tl.constexpr,
    POLL: tl.constexpr,  # wait for a list's keys, not for the whole score kernel; set its flag
    PDL: tl.constexpr,
    BLOCK_PAGES: tl.constexpr,
):
    """Grid (G, B): each list's pages, as soon as its scores are there."""
    pdl_launch(PDL)
    row = tl.program_id(1).to(tl.int64)
    row_list = row * tl.num_programs(0) + tl.program_id(0)
    length = tl.load(lengths_ptr + row)
    rule = (num_pages, width, num_selected, budget, sink_pages, local_pages)
    if not POLL:
        pdl_wait(PDL)
    count = choose_pages(
        *(keys_ptr + row_list * stride_list, length, pages_ptr + row_list * width, rule),
        *(PAGE_SIZE, POLL, BLOCK_PAGES),
    )
    tl.store(counts_ptr + row_list, count)
    if POLL:
        signal(flags_ptr + row_list)
        pdl_wait(PDL)  # who waits for this kernel's end waits for the score kernel's too


@triton.jit
def count_of(length, rule, PAGE_SIZE: tl.constexpr):
    """Pages that a row of this length reads."""
    num_pages, width, num_selected, budget, _, _ = rule
    num_visible = tl.minimum((length + PAGE_SIZE - 1) // PAGE_SIZE, num_pages)
    count = tl.where(length <= budget, width, tl.minimum(num_selected, width))
    return tl.minimum(count, num_visible)


@triton.jit
def choose_pages(
    keys_ptr,
    length,
    pages_ptr,
    rule,
    PAGE_SIZE: tl.constexpr,
    POLL: tl.constexpr,  # wait until no key is 0
    BLOCK_PAGES: tl.constexpr,
):
    """Writes a list: the forced pages and the best of the others, ascending; ties to the lowest
    id. Returns its count.

    The threshold is cornered three ways a round, and the rounds end as soon as it parts the wanted
    number of pages from the rest."""
    num_pages, width, num_selected, budget, sink_pages, local_pages = rule
    offs = tl.arange(0, BLOCK_PAGES)
    num_visible = tl.minimum((length + PAGE_SIZE - 1) // PAGE_SIZE, num_pages)
    first_local = tl.maximum(num_visible - local_pages, 0)
    num_sinks = tl.minimum(sink_pages, first_local)
    is_open = (offs >= num_sinks) & (offs < first_local)
    num_open = first_local - num_sinks
    count = count_of(length, rule, PAGE_SIZE)
    wanted = count - (num_visible - num_open)
    if POLL:
        key = tl.load(keys_ptr + offs, mask=is_open, other=UINT_MAX, volatile=True)
        while tl.min(key, 0) == 0:
            key = tl.load(keys_ptr + offs, mask=is_open, other=UINT_MAX, volatile=True)
    else:
        key = tl.load(keys_ptr + offs, mask=is_open, other=UINT_MAX)
    # num_lo keys are >= lo, never fewer than wanted; num_hi are >= hi, always fewer.
    lo = tl.min(key, 0)
    key = tl.where(is_open, key, 0)
    hi = tl.max(key, 0) + 1
    num_lo = num_open
    num_hi = 0
    while (hi - lo > 1) & (num_lo > wanted) & (wanted > 0):
        third = (hi - lo) // 3
        t1 = lo + third
        t2 = tl.minimum(hi - third, hi - 1)
        # Both counts in one sum: there are fewer than 2^15 pages.
        both = (key >= t1).to(tl.int32) + ((key >= t2).to(tl.int32) << 16)
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
    # No key is as large as UINT_MAX.
    at_least = tl.where(wanted > 0, tl.where(has_ties, hi, lo), UINT_MAX)
    above = is_open & (key >= at_least)
    tied = is_open & (key == tl.where(has_ties, lo, UINT_MAX))
    above = above | (offs < num_sinks) | ((offs >= first_local) & (offs < num_visible))
    room = wanted - num_hi
    # One scan counts both kinds: pages before this one that are above, and that are tied.
    before = tl.cumsum(above.to(tl.int32) + (tied.to(tl.int32) << 16), 0)
    num_above = (before & 0xFFFF) - above.to(tl.int32)
    num_tied = (before >> 16) - tied.to(tl.int32)
    keep = above | (tied & (num_tied < room))
    slot = num_above + tl.where(has_ties, tl.minimum(num_tied, room), 0)
    tl.store(pages_ptr + slot, offs, mask=keep)
    tl.store(pages_ptr + offs, -1, mask=(offs >= count) & (offs < width))
    return count


@triton.jit(do_not_specialize=["num_pages"])
def update_kernel(
    k_ptr,
    starts_ptr,
    lengths_ptr,
    table_ptr,
    mid_ptr,
    half_ptr,
    scales_ptr,
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
        if scales_ptr is not None:
            scales_ptr += meta // D * 2
        write_metadata(
            *(row, kv_head, length // PAGE_SIZE - 1, length, k_ptr, starts_ptr, table_ptr),
            *(mid_ptr + meta, half_ptr + meta, scales_ptr),
            *(stride_tb, (stride_kb, stride_kg, stride_kn, stride_kd), D, PAGE_SIZE, BLOCK_SIZE),
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
    scales_ptr,
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
    offs = page.to(tl.int64) * D + offs_d
    mask_d = offs_d < D
    center = (lo + hi) * 0.5
    if scales_ptr is None:
        mid = nearest(center.to(tl.float32), mid_ptr.dtype.element_ty)
        center = mid.to(tl.float32).to(tl.float64)
        half = round_up(tl.maximum(hi - center, center - lo), mid_ptr.dtype.element_ty)
        tl.store(mid_ptr + offs, mid, mask=mask_d)
        tl.store(half_ptr + offs, half, mask=mask_d)
    else:
        scale = tl.max(tl.where(mask_d, tl.abs(center), 0.0), 0) / 127
        scale = positive(scale.to(tl.float32))
        code = tl.floor(center / scale.to(tl.float64) + 0.5)
        center = code * scale.to(tl.float64)
        half = tl.maximum(hi - center, center - lo)
        largest = tl.max(tl.where(mask_d, half, 0.0), 0)
        half_scale = positive(round_up(largest / 255, tl.float32)).to(tl.float64)
        half_code = tl.ceil(half / half_scale)
        half_code = tl.where(half_code * half_scale < half, half_code + 1, half_code)
        tl.store(mid_ptr + offs, code.to(tl.int32).to(tl.int8), mask=mask_d)
        tl.store(half_ptr + offs, half_code.to(tl.int32).to(tl.uint8), mask=mask_d)
        tl.store(scales_ptr + 2 * page.to(tl.int64), scale)
        tl.store(scales_ptr + 2 * page.to(tl.int64) + 1, half_scale.to(tl.float32))


@triton.jit
def positive(scale):
    """1 in place of 0: a page of equal keys has no width."""
    return tl.where(scale == 0.0, 1.0, scale)


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
