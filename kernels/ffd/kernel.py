"""Top-δ selection in Triton: scan the packed keys against the pseudo-max, and list the kept pages.

Every program walks a range of pages and says how many it keeps; the counts of the programs before
it tell it where its ids go. So one launch leaves ascending lists, and equal input equal lists.
"""

import triton
import triton.language as tl

from sparse_eval.kernels.sparse_decode.kernel import locate, pdl_launch, pdl_wait
from sparse_eval.kernels.thumbnail.kernel import (
    SLACK_ROUNDING,
    load_planes,
    page_integers,
    pages_scores,
    planes_norm,
    score_keys,
    sum_query,
    sum_threshold,
    sums_error,
    token_sums,
)

RULE = ["num_pages", "num_tokens", "group_size", "sink_pages", "local_pages", "codes_batch"]


@triton.jit(do_not_specialize=RULE)
def scan_kernel(
    q_ptr,  # [B, H, D]
    codes_ptr,  # [B or 1, G, num_pages · PAGE_SIZE, C]
    step_ptr,  # [B or 1, G, num_pages · PAGE_SIZE] or [B or 1, G, num_pages, D]
    k_ptr,  # [batch or block, G, token, D], read with EXACT alone
    starts_ptr,  # [B], None = 0
    lengths_ptr,  # [B]
    table_ptr,  # [B, blocks], None = k is a contiguous cache
    flags_ptr,  # [B, G, num_pages] uint8: a visible page is read
    sums_ptr,  # [B, G, programs] int32, 0: one more than how many of a program's pages are
    pages_ptr,  # [B, G, num_pages] int32
    counts_ptr,  # [B, G] int32
    scale,
    delta,
    reach,  # error of a coordinate, in steps, at most
    num_pages,
    num_tokens,  # k's extent
    group_size,
    sink_pages,
    local_pages,
    stride_tb,
    stride_qb,
    stride_qh,
    stride_qd,
    stride_kb,
    stride_kg,
    stride_kn,
    stride_kd,
    codes_batch,  # 0 over a batch of one, else G
    D: tl.constexpr,
    C: tl.constexpr,
    BITS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CHANNEL: tl.constexpr,
    EXACT: tl.constexpr,  # the pseudo-max is of exact scores, the others are raised by their bound
    WHOLE: tl.constexpr,  # no tile passes the capacity, no channel is masked
    INTERPRET: tl.constexpr,
    PDL: tl.constexpr,
    CHAINED: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_F: tl.constexpr,  # forced tokens a step of the pseudo-max takes
    BLOCK_N: tl.constexpr,  # tokens of a tile: whole pages
    BLOCK_SUMS: tl.constexpr,
    BLOCK_PAGES: tl.constexpr,  # pages that a step of listing takes
):
    """Grid (programs, G, B)."""
    pdl_launch(PDL)
    program = tl.program_id(0)
    kv_head = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    offs_h = tl.arange(0, BLOCK_H)
    offs_c = tl.arange(0, BLOCK_C)
    mask_h, mask_c = offs_h < group_size, offs_c < C
    head = (kv_head * group_size + offs_h).to(tl.int64)
    q_ptr += row * stride_qb + head[None, :] * stride_qh
    planes = load_planes(
        *(q_ptr, stride_qd, D, C, BITS, offs_c[:, None], mask_c[:, None] & mask_h[None, :])
    )  # [BLOCK_C, BLOCK_H]
    length = tl.load(lengths_ptr + row)
    start = (row * 0).to(tl.int32)
    if starts_ptr is not None:
        start = tl.load(starts_ptr + row)
    length = tl.maximum(tl.minimum(length, num_tokens - start), 0)
    num_visible = tl.minimum((length + PAGE_SIZE - 1) // PAGE_SIZE, num_pages)
    num_full = tl.minimum(length // PAGE_SIZE, num_pages)
    cache = row * codes_batch + kv_head
    codes_ptr += cache * num_pages * PAGE_SIZE * C
    if CHANNEL:
        step_ptr += cache * num_pages * D
    else:
        step_ptr += cache * num_pages * PAGE_SIZE
    TILE_PAGES: tl.constexpr = BLOCK_N // PAGE_SIZE
    num_tiles = (num_visible + TILE_PAGES - 1) // TILE_PAGES
    tile = program * num_tiles // tl.num_programs(0)
    end = (program + 1) * num_tiles // tl.num_programs(0)
    cached = (codes_ptr, step_ptr, num_full)
    # What the kernel before this one writes is the page that has just filled, if one has.
    if CHAINED:  # noqa: SIM102
        if length % PAGE_SIZE == 0:
            pdl_wait(CHAINED)
    # These loads do not wait for the query.
    first_local = tl.maximum(num_visible - local_pages, 0)
    sinks = tl.minimum(sink_pages, num_visible) * PAGE_SIZE
    forced = sinks + (num_visible - first_local) * PAGE_SIZE
    places = (sinks, first_local * PAGE_SIZE, forced)
    at = 0
    if not CHANNEL:
        step = token_steps(tile, cached, PAGE_SIZE, BLOCK_N)
        if not EXACT:
            x_F, step_F, mask_F = forced_keys(at, places, cached, C, PAGE_SIZE, BLOCK_C, BLOCK_F)
    # A negative scale turns the query about.
    turn = tl.where(scale < 0, -1.0, 1.0)
    if BITS == 2:
        planes = (planes[0] * turn, planes[1] * turn, planes[2] * turn, planes[3] * turn)
    else:
        planes = (planes[0] * turn, planes[1] * turn)  # type: ignore[assignment]
    size = tl.abs(scale)
    slack = tl.zeros([BLOCK_H], tl.float32)
    if EXACT:
        slack += planes_norm(planes, BITS, 0) * size * (reach * SLACK_ROUNDING)
    if not CHANNEL:
        sums = sum_query(planes, BITS)

    if EXACT:
        k_ptr += kv_head.to(tl.int64) * stride_kg
        if table_ptr is None:
            k_ptr += row * stride_kb
        else:
            table_ptr += row * stride_tb
        offs_d = tl.arange(0, BLOCK_D)
        q = tl.load(
            q_ptr + offs_d[:, None] * stride_qd,
            mask=(offs_d < D)[:, None] & mask_h[None, :],
            other=0.0,
        )
        lists = (None, table_ptr, start, length, 0)
        keys = (k_ptr, lists, (stride_kb, stride_kn, stride_kd), q)

    pseudo_max = tl.full([BLOCK_H], float("-inf"), tl.float32)
    if not EXACT and not CHANNEL:
        s = token_sums(x_F, sums, BITS, INTERPRET) * step_F.to(tl.float32)[:, None]
        s = tl.where(mask_F[:, None], s * (sums[4] * size)[None, :], float("-inf"))
        pseudo_max = tl.maximum(pseudo_max, tl.max(s, 0))
        at += BLOCK_F
    while at < forced:
        if EXACT:
            position, mask_F = forced_places(at, places, BLOCK_F)
            s = exact_scores(
                *(position, mask_F, keys, scale, D, PAGE_SIZE, BLOCK_SIZE),
                *(INTERPRET, BLOCK_D, BLOCK_F),
            )
            s = tl.where((mask_F & (position < length))[:, None], s, float("-inf"))
        elif CHANNEL:
            x_F, _, mask_F = forced_keys(at, places, cached, C, PAGE_SIZE, BLOCK_C, BLOCK_F)
            page = tl.where(at < sinks, at, at - sinks + first_local * PAGE_SIZE) // PAGE_SIZE
            at_page = step_ptr + page.to(tl.int64) * D
            integers = page_integers(planes, at_page, C, BITS, offs_c, mask_c)
            none = tl.zeros([BLOCK_H], tl.float32)
            s = score_keys(x_F, 0.0, integers, size, none, BITS, CHANNEL, INTERPRET)
            s = tl.where(mask_F[:, None], s, float("-inf"))
        else:
            x_F, step_F, mask_F = forced_keys(at, places, cached, C, PAGE_SIZE, BLOCK_C, BLOCK_F)
            s = token_sums(x_F, sums, BITS, INTERPRET) * step_F.to(tl.float32)[:, None]
            s = tl.where(mask_F[:, None], s * (sums[4] * size)[None, :], float("-inf"))
        pseudo_max = tl.maximum(pseudo_max, tl.max(s, 0))
        at += BLOCK_F
    threshold = tl.where(mask_h, pseudo_max - delta, float("inf"))

    row_list = row * tl.num_programs(1) + kv_head
    flags_ptr += row_list * num_pages
    pages_ptr += row_list * num_pages
    sums_ptr += row_list * tl.num_programs(0)
    counts_ptr += row_list
    empty = tile * TILE_PAGES
    full = tl.where(program == tl.num_programs(0) - 1, num_pages, end * TILE_PAGES)
    while empty < full:
        slots = empty + tl.arange(0, BLOCK_PAGES)
        tl.store(pages_ptr + slots, -1, mask=slots < full)
        empty += BLOCK_PAGES
    count = tl.zeros([TILE_PAGES], tl.int32)
    pages = (num_visible, num_full, sink_pages, first_local, flags_ptr)
    # Steps are loaded a tile ahead: the pipeline holds only what enters a product.
    if CHANNEL:
        query = (planes, size, size * (reach * SLACK_ROUNDING), threshold)
        s0, s1, s2, s3 = page_steps(tile, cached, D, C, BITS, TILE_PAGES, BLOCK_C)
        if INTERPRET:  # run-time bounds of `for` need Triton 3.9 there
            at_tile = tile
            while at_tile < end:
                steps = (s0, s1, s2, s3)
                s0, s1, s2, s3 = page_steps(at_tile + 1, cached, D, C, BITS, TILE_PAGES, BLOCK_C)
                count += scan_pages(
                    *(at_tile, steps, query, cached, pages, D, C, BITS, PAGE_SIZE, EXACT, WHOLE),
                    *(INTERPRET, BLOCK_C, BLOCK_H, TILE_PAGES),
                )
                at_tile += 1
        else:
            for i in tl.range(tile, end):
                steps = (s0, s1, s2, s3)
                s0, s1, s2, s3 = page_steps(i + 1, cached, D, C, BITS, TILE_PAGES, BLOCK_C)
                count += scan_pages(
                    *(i, steps, query, cached, pages, D, C, BITS, PAGE_SIZE, EXACT, WHOLE),
                    *(INTERPRET, BLOCK_C, BLOCK_H, TILE_PAGES),
                )
    else:
        least = sum_threshold(threshold, sums[4] * size)
        if EXACT:
            slack = slack / tl.where(sums[4] * size > 0.0, sums[4] * size, 1.0)
            slack += sums_error(D, BITS)
        query = (sums, slack, least)  # type: ignore[assignment]
        if INTERPRET:
            at_tile = tile
            while at_tile < end:
                next_step = token_steps(at_tile + 1, cached, PAGE_SIZE, BLOCK_N)
                count += scan_tokens(
                    *(at_tile, step, query, cached, pages, C, BITS, PAGE_SIZE, EXACT, WHOLE),
                    *(INTERPRET, BLOCK_C, BLOCK_H, BLOCK_N),
                )
                step = next_step
                at_tile += 1
        else:
            for i in tl.range(tile, end):
                next_step = token_steps(i + 1, cached, PAGE_SIZE, BLOCK_N)
                count += scan_tokens(
                    *(i, step, query, cached, pages, C, BITS, PAGE_SIZE, EXACT, WHOLE),
                    *(INTERPRET, BLOCK_C, BLOCK_H, BLOCK_N),
                )
                step = next_step
    first, last = tile * TILE_PAGES, tl.minimum(end * TILE_PAGES, num_visible)
    list_pages(
        *(first, last, tl.sum(count, 0), num_pages, flags_ptr, sums_ptr, pages_ptr, counts_ptr),
        *(INTERPRET, CHAINED, BLOCK_SUMS, BLOCK_PAGES),
    )


@triton.jit
def list_pages(
    first,
    last,
    count,
    num_pages,
    flags_ptr,
    sums_ptr,
    pages_ptr,
    counts_ptr,
    INTERPRET: tl.constexpr,
    CHAINED: tl.constexpr,
    BLOCK_SUMS: tl.constexpr,
    BLOCK_PAGES: tl.constexpr,
):
    """Writes the ids of a program's kept pages, which are `count` of [first, last).

    It emptied the slots first .. last before: the id in slot s is s or more, so it is of this
    program or of a later one, and a later one writes after it has seen this one's count. Programs
    wait for lower ones alone, which started before them."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    pdl_wait(
        CHAINED
    )  # who waits for this kernel has waited for the one before it, which set sums to 0
    tl.debug_barrier()
    tl.atomic_xchg(sums_ptr + program, count + 1, sem="release")
    slot, at = 0, 0
    while at < program:
        other = at + tl.arange(0, BLOCK_SUMS)
        is_before = other < program
        sums = tl.load(sums_ptr + other, mask=is_before, other=1, volatile=True)
        while tl.min(sums, 0) == 0:
            sums = tl.load(sums_ptr + other, mask=is_before, other=1, volatile=True)
        slot += tl.sum(sums - 1, 0)
        at += BLOCK_SUMS
    if not INTERPRET:
        tl.inline_asm_elementwise(
            "fence.acq_rel.gpu; mov.b32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )
    tl.debug_barrier()
    if program == programs - 1:
        tl.store(counts_ptr, slot + count)
    while first < last:
        page = first + tl.arange(0, BLOCK_PAGES)
        keep = tl.load(flags_ptr + page, mask=page < last, other=0).to(tl.int32)
        before = tl.cumsum(keep, 0) - keep
        tl.store(pages_ptr + slot + before, page, mask=keep > 0)
        slot += tl.sum(keep, 0)
        first += BLOCK_PAGES


@triton.jit
def either(a, b):
    return a | b


@triton.jit
def forced_places(at, places, BLOCK_F: tl.constexpr):
    """Positions number at .. at + BLOCK_F of the forced pages' tokens, and which there are."""
    sinks, first_local, forced = places
    offs_f = at + tl.arange(0, BLOCK_F)
    position = tl.where(offs_f < sinks, offs_f, offs_f - sinks + first_local)
    return position, offs_f < forced


@triton.jit
def forced_keys(
    at,
    places,
    cached,
    C: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    """Codes [BLOCK_F, BLOCK_C] and steps of the forced full pages' tokens, and which there are."""
    codes_ptr, step_ptr, num_full = cached
    offs_c = tl.arange(0, BLOCK_C)
    position, mask = forced_places(at, places, BLOCK_F)
    mask &= position < num_full * PAGE_SIZE
    x_ptrs = codes_ptr + position.to(tl.int64)[:, None] * C + offs_c
    x = tl.load(x_ptrs, mask=mask[:, None] & (offs_c < C), other=0)
    step = tl.load(step_ptr + position, mask=mask, other=0.0)
    return x, step, mask


@triton.jit
def token_steps(tile, cached, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """The steps of a tile's tokens, in the keys' dtype; 0 beyond the full pages."""
    offs_n = tl.arange(0, BLOCK_N)
    mask = offs_n < cached[2] * PAGE_SIZE - tile * BLOCK_N
    return tl.load(cached[1] + tile.to(tl.int64) * BLOCK_N + offs_n, mask=mask, other=0.0)


@triton.jit
def page_steps(
    tile,
    cached,
    D: tl.constexpr,
    C: tl.constexpr,
    BITS: tl.constexpr,
    TILE_PAGES: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """The steps of a tile's pages, plane by plane [TILE_PAGES, BLOCK_C]; four, of 4 bits two."""
    offs_p, offs_c = tl.arange(0, TILE_PAGES), tl.arange(0, BLOCK_C)
    mask = (offs_p < cached[2] - tile * TILE_PAGES)[:, None] & (offs_c < C)[None, :]
    ptrs = cached[1] + tile.to(tl.int64) * (TILE_PAGES * D)
    ptrs += offs_p[:, None] * D + offs_c[None, :]
    s0 = tl.load(ptrs, mask=mask, other=0.0)
    s1 = tl.load(ptrs + C, mask=mask, other=0.0)
    if BITS == 2:
        s2 = tl.load(ptrs + 2 * C, mask=mask, other=0.0)
        s3 = tl.load(ptrs + 3 * C, mask=mask, other=0.0)
    else:
        s2 = s0
        s3 = s1
    return s0, s1, s2, s3


@triton.jit
def scan_tokens(
    tile,
    step,
    query,
    cached,
    pages,
    C: tl.constexpr,
    BITS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    EXACT: tl.constexpr,
    WHOLE: tl.constexpr,
    INTERPRET: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Rule token: stores the flags of a tile's pages; returns them as int32."""
    codes_ptr, _, num_full = cached
    offs_n, offs_c = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_C)
    # the one wide number: lanes add narrow offsets
    x_ptrs = codes_ptr + tile.to(tl.int64) * (BLOCK_N * C)
    x_ptrs += offs_n[:, None] * C + offs_c[None, :]
    if WHOLE:
        x = tl.load(x_ptrs)  # [BLOCK_N, BLOCK_C]
    else:
        mask = offs_n < num_full * PAGE_SIZE - tile * BLOCK_N
        x = tl.load(x_ptrs, mask=mask[:, None] & (offs_c < C)[None, :], other=0)
    sums, slack, least = query
    total = token_sums(x, sums, BITS, INTERPRET)
    if EXACT:
        total += slack[None, :]
    # negative where a score is no lower than the threshold: one fused operation, whose sign counts
    left = (least[None, :] - total * step.to(tl.float32)[:, None]).to(tl.int32, bitcast=True)
    above = tl.reshape(left, [BLOCK_N // PAGE_SIZE, PAGE_SIZE * BLOCK_H])
    if INTERPRET:  # noqa: SIM108
        above = tl.min(above, 1)
    else:
        above = tl.reduce(above, 1, either)
    return flag_pages(tile, above < 0, pages, BLOCK_N // PAGE_SIZE)


@triton.jit
def scan_pages(
    tile,
    steps,
    query,
    cached,
    pages,
    D: tl.constexpr,
    C: tl.constexpr,
    BITS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    EXACT: tl.constexpr,
    WHOLE: tl.constexpr,
    INTERPRET: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_H: tl.constexpr,
    TILE_PAGES: tl.constexpr,
):
    """Rule channel: stores the flags of a tile's pages; returns them as int32."""
    codes_ptr, _, num_full = cached
    offs_p, offs_t = tl.arange(0, TILE_PAGES), tl.arange(0, PAGE_SIZE)
    offs_c = tl.arange(0, BLOCK_C)
    token = (offs_p[:, None] * PAGE_SIZE + offs_t[None, :])[:, :, None]
    x_ptrs = codes_ptr + tile.to(tl.int64) * (TILE_PAGES * PAGE_SIZE * C)
    x_ptrs += token * C + offs_c[None, None, :]
    if WHOLE:
        x = tl.load(x_ptrs)  # [TILE_PAGES, PAGE_SIZE, BLOCK_C]
    else:
        mask = (offs_p < num_full - tile * TILE_PAGES)[:, None] & (offs_c < C)[None, :]
        x = tl.load(x_ptrs, mask=mask[:, None, :], other=0)
    planes, scale, width, threshold = query
    s = pages_scores(x, planes, steps, scale, width, D, BITS, EXACT, INTERPRET)
    above = tl.reshape(s - threshold[None, None, :], [TILE_PAGES, PAGE_SIZE * BLOCK_H])
    return flag_pages(tile, tl.max(above, 1) >= 0, pages, TILE_PAGES)


@triton.jit
def flag_pages(tile, above, pages, TILE_PAGES: tl.constexpr):
    """Stores whether each page of a tile is read: it has a token not below the threshold, or is
    forced."""
    num_visible, num_full, sink_pages, first_local, flags_ptr = pages
    page = tile * TILE_PAGES + tl.arange(0, TILE_PAGES)
    is_forced = (page < sink_pages) | (page >= first_local)
    keep = (above & (page < num_full)) | is_forced
    keep = (keep & (page < num_visible)).to(tl.int32)
    tl.store(flags_ptr + page, keep.to(tl.uint8), mask=page < num_visible)
    return keep


@triton.jit
def exact_scores(
    position,
    mask,
    keys,
    scale,
    D: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    INTERPRET: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    """scale · q·k of the keys at these positions, less what float32 can have added:
    [BLOCK_F, heads]; anything outside the mask."""
    k_ptr, lists, strides, q = keys
    stride_kb, stride_kn, stride_kd = strides
    offs_d = tl.arange(0, BLOCK_D)
    block, token, read = locate(position, lists, PAGE_SIZE, BLOCK_SIZE)
    k = tl.load(
        k_ptr + (block * stride_kb + token * stride_kn)[:, None] + offs_d * stride_kd,
        mask=(mask & read)[:, None] & (offs_d < D),
        other=0.0,
    )
    if INTERPRET:
        k = k.to(tl.float32)
        q = q.to(tl.float32)
    largest = tl.max(tl.abs(k.to(tl.float32)), 1) * (D * 2.0**-22)
    error = largest[:, None] * (tl.sum(tl.abs(q.to(tl.float32)), 0) * tl.abs(scale))[None, :]
    return tl.dot(k, q, input_precision="ieee") * scale - error
