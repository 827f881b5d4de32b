"""Decode attention in Triton over page lists of any lengths, by exact or by refined keys.

Top-δ keeps many pages for one head and few for another, so the tiles of all lists are laid end to
end and every program takes an equal share: it may begin in one list and end in another. Piece
(program w, list i) is stored at w + i, which no other piece has, and the merge finds a list's
pieces from the counts alone. Refined keys (refined.py) are of full pages; the page that has not
filled is read exactly.
"""

# ruff: noqa: E741

import triton
import triton.language as tl

from sparse_eval.kernels.ffd.refined import residual_tile, steps_at
from sparse_eval.kernels.sparse_decode.kernel import (
    LOG2E,
    attend_loaded,
    attend_tile,
    log_sum,
    pdl_launch,
    pdl_wait,
    place_of,
)
from sparse_eval.kernels.thumbnail.kernel import (
    integer_planes,
    load_planes,
    split_bytes,
)

SIZES = ["num_tokens", "num_pages", "num_slots", "num_lists", "kv_heads", "group_size"]


@triton.jit
def tiles_of(counts_ptr, num_lists, num_slots, page_size, tile_tokens, BLOCK_L: tl.constexpr):
    """Tiles and pages of each list, [BLOCK_L]."""
    lists = tl.arange(0, BLOCK_L)
    # not from the L1, which may hold what an earlier kernel wrote there
    counts = tl.load(counts_ptr + lists, mask=lists < num_lists, other=0, cache_modifier=".cg")
    counts = tl.minimum(counts, num_slots)
    return (counts * page_size + tile_tokens - 1) // tile_tokens, counts


@triton.jit
def share(part, parts, total):
    """Where part number `part` of `parts` equal ones of a total begins."""
    return (part.to(tl.int64) * total // tl.maximum(parts, 1)).to(tl.int32)


@triton.jit(do_not_specialize=[*SIZES, "codes_batch"])
def attend_lists_kernel(
    q_ptr,  # [B, H, D]
    k_ptr,  # [batch or block, G, token, D]
    v_ptr,  # [batch or block, G, token, E]
    codes_ptr,  # [B or 1, G, num_pages · PAGE_SIZE, C]
    step_ptr,  # [B or 1, G, num_pages · PAGE_SIZE] or [B or 1, G, num_pages, D]
    residual_ptr,  # [B or 1, G, num_pages · PAGE_SIZE, D], None = exact keys, and no codes
    pages_ptr,  # [B, G, num_slots]
    counts_ptr,  # [B, G]
    starts_ptr,  # [B], None = 0
    lengths_ptr,  # [B]
    table_ptr,  # [B, blocks], None = k and v are contiguous caches
    acc_ptr,  # [programs + num_lists, group_size, E]
    m_ptr,  # [programs + num_lists, group_size]
    l_ptr,  # [programs + num_lists, group_size]
    scale,
    unit,  # the residual's step, in thumbnail steps
    num_tokens,  # the cache's extent
    num_pages,  # the thumbnail's
    num_slots,
    num_lists,  # B · G
    kv_heads,
    group_size,
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
    codes_batch,  # 0 over a batch of one, else G
    D: tl.constexpr,
    E: tl.constexpr,
    C: tl.constexpr,
    BITS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CHANNEL: tl.constexpr,
    WHOLE: tl.constexpr,  # every tile lies in one page, and in one block of the pool
    P_UNIT: tl.constexpr,
    STACKED: tl.constexpr,  # a group of eight heads or fewer, twice: add_stacked
    INTERPRET: tl.constexpr,
    PDL: tl.constexpr,
    CHAINED: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Grid (programs,). Stores m = max s, l = Σ exp(s - m), acc = Σ exp(s - m)·v per piece."""
    program = tl.program_id(0)
    offs_m = tl.arange(0, BLOCK_M)
    offs_c = tl.arange(0, BLOCK_C)
    offs_d = tl.arange(0, BLOCK_D)
    offs_e = tl.arange(0, BLOCK_E)
    ROWS: tl.constexpr = 8 if STACKED else BLOCK_M
    if STACKED:
        offs_m = offs_m % 8
    mask_m = offs_m < group_size
    offs_r = tl.arange(0, ROWS)
    mask_r = offs_r < group_size

    pdl_wait(CHAINED)
    pdl_launch(PDL)  # the lists stand: the merge reads their counts before it waits
    tiles, counts = tiles_of(counts_ptr, num_lists, num_slots, PAGE_SIZE, BLOCK_T, BLOCK_L)
    ends = tl.cumsum(tiles, 0)
    total = tl.sum(tiles, 0)
    workers = tl.minimum(tl.num_programs(0), total)  # so that each has a tile, or there is none
    at = share(tl.minimum(program, workers), workers, total)
    stop = share(tl.minimum(program + 1, workers), workers, total)
    list_id = tl.sum((ends <= at).to(tl.int32), 0)  # the list that tile `at` lies in
    while at < stop:
        is_this = tl.arange(0, BLOCK_L) == list_id
        list_end = tl.sum(tl.where(is_this, ends, 0), 0)
        list_start = list_end - tl.sum(tl.where(is_this, tiles, 0), 0)
        until = tl.minimum(stop, list_end)
        row = (list_id // kv_heads).to(tl.int64)
        kv_head = (list_id % kv_heads).to(tl.int64)
        start = 0
        if starts_ptr is not None:
            start = tl.load(starts_ptr + row)
        length = tl.minimum(tl.load(lengths_ptr + row), num_tokens - start)
        count = tl.sum(tl.where(is_this, counts, 0), 0)
        row_pages = pages_ptr + list_id.to(tl.int64) * num_slots
        k_head = k_ptr + kv_head * stride_kg
        v_head = v_ptr + kv_head * stride_vg
        if table_ptr is None:
            k_head += row * stride_kb
            v_head += row * stride_vb
        head = kv_head * group_size + offs_m
        q_ptrs = q_ptr + row * stride_qb + head[:, None] * stride_qh
        q = tl.load(q_ptrs + offs_d * stride_qd, mask=mask_m[:, None] & (offs_d < D), other=0.0)
        whole = q.to(tl.float32)  # [BLOCK_M, BLOCK_D]
        if INTERPRET:  # its bfloat16 arithmetic is wrong
            q = whole
        m = tl.full([ROWS], float("-inf"), tl.float32)
        l = tl.full([ROWS], 0.0, tl.float32)
        acc = tl.full([BLOCK_M, BLOCK_E], 0.0, tl.float32)
        keys = (k_head, v_head, stride_kb, stride_kn, stride_kd, stride_vb, stride_vn, stride_ve)
        parts = (None, 0, mask_m)
        if residual_ptr is None:
            lists = (
                row_pages,
                None if table_ptr is None else table_ptr + row * stride_tb,
                start,
                length,
                count,
            )
            tile = at - list_start
            # A tile's place is found while the tile before it is read: ids are loads themselves.
            if WHOLE:
                place, block = place_of(tile, lists, PAGE_SIZE, BLOCK_SIZE, True, BLOCK_T)
            else:
                place = positions(tile, row_pages, count, PAGE_SIZE, BLOCK_T, False)
                block = 0
            if INTERPRET:  # run-time bounds of `for` need Triton 3.9 there
                while tile < until - list_start:
                    if WHOLE:
                        m, l, acc = attend_tile(
                            *(tile, place, block, m, l, acc, q, scale, lists, keys, parts, D, E),
                            *(PAGE_SIZE, BLOCK_SIZE, True, 1, P_UNIT, STACKED, INTERPRET),
                            *(BLOCK_T, BLOCK_D, BLOCK_E),
                        )
                        place, block = place_of(
                            *(tile + 1, lists, PAGE_SIZE, BLOCK_SIZE, True, BLOCK_T)
                        )
                    else:
                        m, l, acc = exact_tile(
                            *(place, m, l, acc, q, scale, lists, keys, parts, D, E, BLOCK_SIZE),
                            *(P_UNIT, STACKED, INTERPRET, BLOCK_D, BLOCK_E),
                        )
                        place = positions(tile + 1, row_pages, count, PAGE_SIZE, BLOCK_T, False)
                    tile += 1
            else:
                for i in tl.range(tile, until - list_start):
                    if WHOLE:
                        m, l, acc = attend_tile(
                            *(i, place, block, m, l, acc, q, scale, lists, keys, parts, D, E),
                            *(PAGE_SIZE, BLOCK_SIZE, True, 1, P_UNIT, STACKED, INTERPRET),
                            *(BLOCK_T, BLOCK_D, BLOCK_E),
                        )
                        place, block = place_of(
                            *(i + 1, lists, PAGE_SIZE, BLOCK_SIZE, True, BLOCK_T)
                        )
                    else:
                        m, l, acc = exact_tile(
                            *(place, m, l, acc, q, scale, lists, keys, parts, D, E, BLOCK_SIZE),
                            *(P_UNIT, STACKED, INTERPRET, BLOCK_D, BLOCK_E),
                        )
                        place = positions(i + 1, row_pages, count, PAGE_SIZE, BLOCK_T, False)
        else:
            packed = tl.minimum(length // PAGE_SIZE, num_pages) * PAGE_SIZE  # tokens
            cache = row * codes_batch + kv_head
            codes = codes_ptr + cache * num_pages * PAGE_SIZE * C
            residuals = residual_ptr + cache * num_pages * PAGE_SIZE * D
            steps = step_ptr + cache * num_pages * (D if CHANNEL else PAGE_SIZE)
            planes = load_planes(
                *(q_ptrs, stride_qd, D, C, BITS, offs_c[None, :]),
                mask_m[:, None] & (offs_c < C),
            )  # [BLOCK_M, BLOCK_C]
            integers = integer_planes(planes, BITS, 1)
            high, low, _ = split_bytes(whole / integers[2][:, None])
            if STACKED:
                is_high = tl.arange(0, BLOCK_M)[:, None] < 8
                high = tl.where(is_high, high, low)
                stack0 = tl.where(is_high, integers[0][0], integers[1][0])
                stack1 = tl.where(is_high, integers[0][1], integers[1][1])
                if BITS == 2:
                    stack2 = tl.where(is_high, integers[0][2], integers[1][2])
                    stack3 = tl.where(is_high, integers[0][3], integers[1][3])
                    stacked = (stack0, stack1, stack2, stack3)
                else:
                    stacked = (stack0, stack1)  # type: ignore[assignment]
                # unit and sum of each head: rows 8 to 15 are rows 0 to 7
                unit_H = tl.max(tl.reshape(integers[2], [2, 8]), 0)
                sum_H = tl.max(tl.reshape(integers[3], [2, 8]), 0)
                integers = (stacked, stacked, unit_H, sum_H)
            query = (planes, whole, integers, high, low, scale, unit)
            lists = (
                row_pages,
                None if table_ptr is None else table_ptr + row * stride_tb,
                start,
                packed,
                count,
            )
            cached = (codes, steps, residuals, v_head, stride_vb, stride_vn, stride_ve)
            tile = at - list_start
            place = positions(tile, row_pages, count, PAGE_SIZE, BLOCK_T, WHOLE)
            step = steps_at(place, steps, packed, CHANNEL, BLOCK_T)
            if INTERPRET:
                while tile < until - list_start:
                    tile += 1
                    next_place = positions(tile, row_pages, count, PAGE_SIZE, BLOCK_T, WHOLE)
                    next_step = steps_at(next_place, steps, packed, CHANNEL, BLOCK_T)
                    m, l, acc = residual_tile(
                        *(place, m, l, acc, step, query, lists, cached, D, E, C, BITS, PAGE_SIZE),
                        *(BLOCK_SIZE, CHANNEL, WHOLE, P_UNIT, STACKED, INTERPRET),
                        *(BLOCK_T, BLOCK_C, BLOCK_D, BLOCK_E),
                    )
                    step = next_step
                    place = next_place
            else:
                for i in tl.range(tile, until - list_start):
                    next_place = positions(i + 1, row_pages, count, PAGE_SIZE, BLOCK_T, WHOLE)
                    next_step = steps_at(next_place, steps, packed, CHANNEL, BLOCK_T)
                    m, l, acc = residual_tile(
                        *(place, m, l, acc, step, query, lists, cached, D, E, C, BITS, PAGE_SIZE),
                        *(BLOCK_SIZE, CHANNEL, WHOLE, P_UNIT, STACKED, INTERPRET),
                        *(BLOCK_T, BLOCK_C, BLOCK_D, BLOCK_E),
                    )
                    step = next_step
                    place = next_place
            # The partial page, if the list ends here and with it, as a cache of its own.
            last = tl.load(row_pages + count - 1, mask=count > 0, other=-1)
            is_read = (until == list_end) & (last * PAGE_SIZE == packed)
            rest = (
                None,
                None if table_ptr is None else table_ptr + row * stride_tb,
                start + packed,
                length - packed,
                0,
            )
            tile = 0
            end = tl.where(is_read, (length - packed + BLOCK_T - 1) // BLOCK_T, 0)
            while tile < end:
                m, l, acc = attend_tile(
                    *(tile, 0, 0, m, l, acc, q, scale, rest, keys, parts, D, E, PAGE_SIZE),
                    *(BLOCK_SIZE, False, 1, P_UNIT, STACKED, INTERPRET, BLOCK_T, BLOCK_D, BLOCK_E),
                )
                tile += 1
        piece = (program + list_id).to(tl.int64) * group_size + offs_r
        tl.store(m_ptr + piece, m, mask=mask_r)
        tl.store(l_ptr + piece, l, mask=mask_r)
        if STACKED:
            acc = tl.sum(tl.reshape(acc, [2, 8, BLOCK_E]), 0)
        acc_ptrs = acc_ptr + piece[:, None] * E + offs_e
        tl.store(acc_ptrs, acc / P_UNIT, mask=mask_r[:, None] & (offs_e < E))
        at = until
        list_id += 1


@triton.jit
def exact_tile(
    position,  # [BLOCK_T] in the row; negative where nothing is read
    m,
    l,
    acc,
    q,
    scale,
    lists,
    keys,
    parts,
    D: tl.constexpr,
    E: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    P_UNIT: tl.constexpr,
    STACKED: tl.constexpr,
    INTERPRET: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """The running softmax (m, l, acc) after the tokens at these positions."""
    _, table_ptr, start, length, _ = lists
    k_ptr, v_ptr, stride_kb, stride_kn, stride_kd, stride_vb, stride_vn, stride_ve = keys
    offs_d = tl.arange(0, BLOCK_D)
    offs_e = tl.arange(0, BLOCK_E)
    read = (position >= 0) & (position < length)
    token = start + position
    if table_ptr is None:
        offs_k = token.to(tl.int64) * stride_kn
        offs_v = token.to(tl.int64) * stride_vn
    else:
        block = tl.load(table_ptr + token // BLOCK_SIZE, mask=read, other=0).to(tl.int64)
        token = token % BLOCK_SIZE
        offs_k = block * stride_kb + token.to(tl.int64) * stride_kn
        offs_v = block * stride_vb + token.to(tl.int64) * stride_vn
    k = tl.load(
        k_ptr + offs_k[:, None] + offs_d * stride_kd,
        mask=read[:, None] & (offs_d < D),
        other=0.0,
    )  # [BLOCK_T, BLOCK_D]
    v = tl.load(
        v_ptr + offs_v[:, None] + offs_e * stride_ve,
        mask=read[:, None] & (offs_e < E),
        other=0.0,
    )  # [BLOCK_T, BLOCK_E]
    return attend_loaded(0, m, l, acc, q, k, v, read, scale, parts, 1, P_UNIT, STACKED, INTERPRET)


@triton.jit
def positions(
    tile,
    pages_ptr,
    count,
    PAGE_SIZE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    FIRST: tl.constexpr,
):
    """Positions in the row of a tile's tokens, or of the FIRST of them where a tile lies in one
    page; negative in empty slots."""
    first = tile * BLOCK_T
    if FIRST:
        page = tl.load(pages_ptr + first // PAGE_SIZE, mask=first // PAGE_SIZE < count, other=-1)
        position = page * PAGE_SIZE + first % PAGE_SIZE
    else:
        token = first + tl.arange(0, BLOCK_T)
        page = tl.load(pages_ptr + token // PAGE_SIZE, mask=token // PAGE_SIZE < count, other=-1)
        position = page * PAGE_SIZE + token % PAGE_SIZE
    return position


MERGE = ["num_programs", "num_lists", "num_slots", "group_size", "page_size", "tile_tokens"]


@triton.jit(do_not_specialize=MERGE)
def merge_pieces_kernel(
    acc_ptr,  # [num_programs + num_lists, group_size, E]
    m_ptr,  # [num_programs + num_lists, group_size]
    l_ptr,  # [num_programs + num_lists, group_size]
    counts_ptr,  # [num_lists]
    out_ptr,  # [num_lists · group_size, E]
    lse_ptr,  # [num_lists · group_size]
    num_programs,  # of attend_lists_kernel
    num_lists,
    num_slots,
    group_size,
    page_size,
    tile_tokens,  # of attend_lists_kernel
    E: tl.constexpr,
    PDL: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_P: tl.constexpr,  # pieces a step takes
    BLOCK_E: tl.constexpr,
):
    """Grid (num_lists · group_size, E / BLOCK_E). A list without pieces gives 0 and -inf."""
    row_head = tl.program_id(0).to(tl.int64)
    list_id = tl.program_id(0) // group_size
    offs_e = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    mask_e = offs_e < E
    # the counts stand since the kernel that this one waits for let it start
    tiles, _ = tiles_of(counts_ptr, num_lists, num_slots, page_size, tile_tokens, BLOCK_L)
    lists = tl.arange(0, BLOCK_L)
    total = tl.maximum(tl.sum(tiles, 0), 1).to(tl.int64)
    start = tl.sum(tl.where(lists < list_id, tiles, 0), 0)
    num_tiles = tl.sum(tl.where(lists == list_id, tiles, 0), 0)
    # tile t is of the last program whose share begins at or before it
    workers = tl.minimum(num_programs, total)
    first = (((start + 1).to(tl.int64) * workers - 1) // total).to(tl.int32)
    last = (((start + num_tiles).to(tl.int64) * workers - 1) // total).to(tl.int32)
    piece = first + list_id
    end = tl.where(num_tiles > 0, last + list_id + 1, piece)

    m = float("-inf")
    l = 0.0
    acc = tl.zeros([BLOCK_E], tl.float32)
    pdl_wait(PDL)
    while piece < end:
        offs_p = piece + tl.arange(0, BLOCK_P)
        mask_p = offs_p < end
        at = offs_p.to(tl.int64) * group_size + row_head % group_size
        m_piece = tl.load(m_ptr + at, mask=mask_p, other=float("-inf"))
        l_piece = tl.load(l_ptr + at, mask=mask_p, other=0.0)
        x = tl.load(
            acc_ptr + at[:, None] * E + offs_e, mask=mask_p[:, None] & mask_e, other=0.0
        )  # [BLOCK_P, BLOCK_E]
        m_new = tl.maximum(m, tl.max(m_piece, 0))
        base = tl.where(m_new == float("-inf"), 0.0, m_new)
        weight = tl.exp2((m_piece - base) * LOG2E)
        alpha = tl.exp2((m - base) * LOG2E)
        l = l * alpha + tl.sum(weight * l_piece, 0)
        acc = acc * alpha + tl.sum(weight[:, None] * x, 0)
        m = m_new
        piece += BLOCK_P
    base = tl.where(m == float("-inf"), 0.0, m)
    out = acc / tl.where(l == 0.0, 1.0, l)
    tl.store(out_ptr + row_head * E + offs_e, out.to(out_ptr.dtype.element_ty), mask=mask_e)
    if tl.program_id(1) == 0:
        tl.store(lse_ptr + row_head, log_sum(base, l))
