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
)

INT_MIN = tl.constexpr(-(2**31))
UINT_MAX = tl.constexpr(2**32 - 1)
FLOAT_MAX = tl.constexpr(3.4028234663852886e38)


@triton.jit(
    do_not_specialize=[
        *("num_tokens", "num_pages", "tiles_per_list", "num_lists", "kv_heads", "group_size")
    ]
)
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
    num_tokens,  # the cache's extent, not a live length
    num_pages,
    tiles_per_list,
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
    UPDATE: tl.constexpr,  # write the metadata of the pages that just filled
    INTERPRET: tl.constexpr,
    PDL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
):
    """Grid: any number of programs; each takes every so many-th tile of all lists' tiles in the
    order of the lists, then of the pages that just filled.

    Such a page is the newest: it is forced, so nobody needs its score."""
    pdl_wait(PDL)
    pdl_launch(PDL)
    program = tl.program_id(0)
    stride = tl.num_programs(0)
    num_tiles = num_lists * tiles_per_list
    query = (q_ptr, stride_qb, stride_qh, stride_qd, kv_heads, group_size, scale)
    boxes = (mid_ptr, half_ptr, scales_ptr, stride_mb, keys_ptr, stride_list)
    rows = (starts_ptr, lengths_ptr, num_tokens)
    sizes = (rows, num_pages, tiles_per_list, num_tiles)
    tile = program
    # Found while the tile before it is read: a load within an iteration would stop its pipeline.
    num_full = full_pages_of(tile, sizes, kv_heads, PAGE_SIZE)
    if INTERPRET:  # run-time bounds of `for` need Triton 3.9 there
        while tile < num_tiles:
            score_tile(
                *(tile, num_full, query, boxes, sizes, D, GROUP_SUM, INTERPRET),
                *(BLOCK_M, BLOCK_D, BLOCK_P),
            )
            tile += stride
            num_full = full_pages_of(tile, sizes, kv_heads, PAGE_SIZE)
    else:
        for i in tl.range(tile, num_tiles, stride):
            score_tile(
                *(i, num_full, query, boxes, sizes, D, GROUP_SUM, INTERPRET),
                *(BLOCK_M, BLOCK_D, BLOCK_P),
            )
            num_full = full_pages_of(i + stride, sizes, kv_heads, PAGE_SIZE)
    if UPDATE:
        rounds = (tl.maximum(num_tiles - program, 0) + stride - 1) // stride
        row_list = program + rounds * stride - num_tiles
        while row_list < num_lists:
            row = (row_list // kv_heads).to(tl.int64)
            kv_head = row_list % kv_heads
            length = length_of(row, rows)
            page = length // PAGE_SIZE - 1
            if (page >= 0) & (page < num_pages) & (length % PAGE_SIZE == 0):
                meta = row * stride_mb + kv_head.to(tl.int64) * num_pages * D
                write_metadata(
                    *(row, kv_head, page, length, k_ptr, starts_ptr, table_ptr),
                    *(meta, mid_ptr, half_ptr, scales_ptr),
                    *(stride_tb, (stride_kb, stride_kg, stride_kn, stride_kd)),
                    *(D, PAGE_SIZE, BLOCK_SIZE, BLOCK_D, BLOCK_TOKENS),
                )
            row_list += stride


@triton.jit
def length_of(row, rows, mask=True):
    """A row's live tokens, as far as its cache reaches."""
    starts_ptr, lengths_ptr, num_tokens = rows
    start = 0
    if starts_ptr is not None:
        start = tl.load(starts_ptr + row, mask=mask, other=0)
    return tl.minimum(tl.load(lengths_ptr + row, mask=mask, other=0), num_tokens - start)


@triton.jit
def full_pages_of(tile, sizes, kv_heads, PAGE_SIZE: tl.constexpr):
    """Full pages of the row that a tile belongs to."""
    rows, num_pages, tiles_per_list, num_tiles = sizes
    length = length_of(tile // tiles_per_list // kv_heads, rows, tile < num_tiles)
    return tl.minimum(tl.maximum(length, 0) // PAGE_SIZE, num_pages)


@triton.jit
def score_tile(
    tile,
    num_full,
    query,
    boxes,
    sizes,
    D: tl.constexpr,
    GROUP_SUM: tl.constexpr,
    INTERPRET: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Stores the keys of BLOCK_P pages of one list."""
    q_ptr, stride_qb, stride_qh, stride_qd, kv_heads, group_size, scale = query
    mid_ptr, half_ptr, scales_ptr, stride_mb, keys_ptr, stride_list = boxes
    _, num_pages, tiles_per_list, _ = sizes
    row_list = tile // tiles_per_list
    row = (row_list // kv_heads).to(tl.int64)
    kv_head = row_list % kv_heads
    q = load_queries(
        *(q_ptr + row * stride_qb, kv_head * group_size, group_size),
        *(stride_qh, stride_qd, D, False, BLOCK_M, BLOCK_D),
    )
    meta = row * stride_mb + kv_head.to(tl.int64) * num_pages * D
    keys_ptr += row_list.to(tl.int64) * stride_list
    offs_d = tl.arange(0, BLOCK_D)
    offs_p = tile % tiles_per_list * BLOCK_P + tl.arange(0, BLOCK_P)
    mask_m = tl.arange(0, BLOCK_M) < group_size
    offs_meta = offs_p.to(tl.int64)[:, None] * D + offs_d
    mask_meta = (offs_p < num_full)[:, None] & (offs_d < D)
    mid = tl.load(mid_ptr + meta + offs_meta, mask=mask_meta, other=0.0)  # [BLOCK_P, BLOCK_D]
    half = tl.load(half_ptr + meta + offs_meta, mask=mask_meta, other=0.0)
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
        scales_ptr += meta // D * 2
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
CHOOSE_SIZES = [*RULE, "num_tokens"]


@triton.jit(do_not_specialize=CHOOSE_SIZES)
def choose_kernel(
    keys_ptr,  # [B, G, stride_list]
    starts_ptr,  # [B], None = 0
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
    num_tokens,  # the cache's extent
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
    length = length_of(row, (starts_ptr, lengths_ptr, num_tokens))
    rule = (num_pages, width, num_selected, budget, sink_pages, local_pages)
    if not POLL:
        pdl_wait(PDL)
    count = choose_pages(
        *(keys_ptr + row_list * stride_list, stride_list, length),
        *(pages_ptr + row_list * width, rule, PAGE_SIZE, POLL, BLOCK_PAGES),
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
def forced_of(length, rule, PAGE_SIZE: tl.constexpr):
    """Pages of a row; of these the first num_sinks and those from first_local on are forced."""
    num_pages, _, _, _, sink_pages, local_pages = rule
    num_visible = tl.minimum((length + PAGE_SIZE - 1) // PAGE_SIZE, num_pages)
    first_local = tl.maximum(num_visible - local_pages, 0)
    return num_visible, tl.minimum(sink_pages, first_local), first_local


@triton.jit
def choose_pages(
    keys_ptr,
    stride_list,  # what may be read from keys_ptr on, a multiple of 16
    length,
    pages_ptr,
    rule,
    PAGE_SIZE: tl.constexpr,
    POLL: tl.constexpr,  # wait until no key is 0
    BLOCK_PAGES: tl.constexpr,
):
    """Writes a list: the forced pages and the best of the others, ascending; ties to the lowest
    id. Returns its count.

    The threshold is cornered three or four ways a round, and the rounds end as soon as it parts the
    wanted number of pages from the rest."""
    width = rule[1]
    offs = tl.arange(0, BLOCK_PAGES)
    num_visible, num_sinks, first_local = forced_of(length, rule, PAGE_SIZE)
    is_open = (offs >= num_sinks) & (offs < first_local)
    num_open = first_local - num_sinks
    count = count_of(length, rule, PAGE_SIZE)
    # In whole vectors: what is not open is masked after.
    key = tl.load(keys_ptr + offs, mask=offs < stride_list, volatile=POLL)
    lo = tl.min(tl.where(is_open, key, UINT_MAX), 0)
    if POLL:
        while lo == 0:
            key = tl.load(keys_ptr + offs, mask=offs < stride_list, volatile=True)
            lo = tl.min(tl.where(is_open, key, UINT_MAX), 0)
    hi = tl.max(tl.where(is_open, key, 0), 0) + 1
    # Forced pages count as the highest, none is as high; what is not visible as the lowest.
    key = tl.where(is_open, key, tl.where(offs < num_visible, UINT_MAX, 0))
    # num_lo keys are >= lo, never fewer than count; num_hi are >= hi, always fewer.
    has_choice = count > num_visible - num_open
    num_lo = num_visible
    num_hi = num_visible - num_open
    while (hi - lo > 1) & (num_lo > count) & has_choice:
        part = tl.maximum((hi - lo) // (4 if BLOCK_PAGES <= 1024 else 3), 1)
        t1 = lo + part
        t2 = tl.minimum(t1 + part, hi - 1)
        if BLOCK_PAGES <= 1024:
            # Three counts in one sum: fewer than 2^10 keys are > lo.
            t3 = tl.minimum(t2 + part, hi - 1)
            counts = (key >= t1).to(tl.int32) + ((key >= t2).to(tl.int32) << 10)
            counts = tl.sum(counts + ((key >= t3).to(tl.int32) << 20), 0)
            n1 = counts & 0x3FF
            n2 = (counts >> 10) & 0x3FF
            n3 = counts >> 20
        else:  # two: there are fewer than 2^15 pages
            counts = tl.sum((key >= t1).to(tl.int32) + ((key >= t2).to(tl.int32) << 16), 0)
            n1 = counts & 0xFFFF
            n2 = counts >> 16
            t3 = hi
            n3 = num_hi
        if n3 >= count:
            lo = t3
            num_lo = n3
        elif n2 >= count:
            lo = t2
            num_lo = n2
            hi = t3
            num_hi = n3
        elif n1 >= count:
            lo = t1
            num_lo = n1
            hi = t2
            num_hi = n2
        else:
            hi = t1
            num_hi = n1

    # Either everything from lo up is kept, or the keys that equal lo fill what is left.
    has_ties = (num_lo > count) & has_choice
    keep = key >= tl.where(has_choice, tl.where(has_ties, hi, lo), UINT_MAX)
    if has_ties:
        tied = key == lo
        # One scan counts both kinds: pages up to this one that are above, and that are tied.
        before = tl.cumsum(keep.to(tl.int32) + (tied.to(tl.int32) << 16), 0)
        num_tied = tl.minimum((before >> 16) - tied.to(tl.int32), count - num_hi)
        slot = (before & 0xFFFF) - keep.to(tl.int32) + num_tied
        keep = keep | (tied & (num_tied < count - num_hi))
    else:
        slot = tl.cumsum(keep.to(tl.int32), 0) - keep.to(tl.int32)
    # In one number, for the way to the layout of the store.
    place = tl.where(keep, (slot << 16) + offs, -1)
    tl.store(pages_ptr + (place >> 16), place & 0xFFFF, mask=place >= 0)
    if count < width:
        tl.store(pages_ptr + offs, -1, mask=(offs >= count) & (offs < width))
    return count


@triton.jit(do_not_specialize=["num_tokens", "num_pages"])
def update_kernel(
    k_ptr,
    starts_ptr,
    lengths_ptr,
    table_ptr,
    mid_ptr,
    half_ptr,
    scales_ptr,
    num_tokens,  # the cache's extent
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
    """Grid (B, G): the metadata of each row's newest full page, where there is room for it."""
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    length = length_of(row, (starts_ptr, lengths_ptr, num_tokens))
    page = length // PAGE_SIZE - 1
    if (length >= PAGE_SIZE) & (page < num_pages):
        meta = row * stride_mb + kv_head.to(tl.int64) * num_pages * D
        write_metadata(
            *(row, kv_head, page, length, k_ptr, starts_ptr, table_ptr),
            *(meta, mid_ptr, half_ptr, scales_ptr),
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
    meta,  # where the list's metadata starts
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
    offs = meta + page.to(tl.int64) * D + offs_d
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
        scales_ptr += 2 * (meta // D + page.to(tl.int64))
        tl.store(scales_ptr, scale)
        tl.store(scales_ptr + 1, half_scale.to(tl.float32))


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
    """The smallest number of dtype that is >= x (float64, >= 0): the next larger bits, if so."""
    y = nearest(x.to(tl.float32), dtype)
    if dtype == tl.float32:
        above = (y.to(tl.int32, bitcast=True) + 1).to(tl.float32, bitcast=True)
    else:
        above = (y.to(tl.int16, bitcast=True) + 1).to(dtype, bitcast=True)
    return tl.where(y.to(tl.float32).to(tl.float64) < x, above, y)
