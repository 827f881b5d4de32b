"""Decode attention in Triton with keys of a thumbnail and its residual: 10 bits read instead of 16.

Splits, running softmax and merge are sparse_decode's. A page that has not filled is in neither
tensor: the last split reads its exact keys.
"""

# ruff: noqa: E741

import triton
import triton.language as tl

from sparse_eval.kernels.sparse_decode.kernel import (
    LOG2E,
    add_weighted,
    attend_tile,
    pdl_launch,
    pdl_wait,
)
from sparse_eval.kernels.thumbnail.kernel import (
    byte_dot,
    code_plane,
    integer_planes,
    load_planes,
    split_bytes,
)

SIZES = ["num_tokens", "num_pages", "num_slots", "num_splits", "group_size", "codes_batch"]


@triton.jit(do_not_specialize=SIZES)
def attend_residual_kernel(
    q_ptr,  # [B, H, D]
    k_ptr,  # [batch or block, G, token, D], read where a page has not filled
    v_ptr,  # [batch or block, G, token, E]
    codes_ptr,  # [B or 1, G, num_pages · PAGE_SIZE, C]
    step_ptr,  # [B or 1, G, num_pages · PAGE_SIZE] or [B or 1, G, num_pages, D]
    residual_ptr,  # [B or 1, G, num_pages · PAGE_SIZE, D]
    pages_ptr,  # [B, G, num_slots]
    counts_ptr,  # [B, G]
    starts_ptr,  # [B], None = 0
    lengths_ptr,  # [B]
    table_ptr,  # [B, blocks], None = k and v are contiguous caches
    acc_ptr,  # [B, H, num_splits, E]
    m_ptr,  # [B, H, num_splits]
    l_ptr,  # [B, H, num_splits]
    scale,
    unit,  # the residual's step, in thumbnail steps
    num_tokens,  # the cache's extent
    num_pages,  # the thumbnail's
    num_slots,
    num_splits,
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
    codes_batch,
    D: tl.constexpr,
    E: tl.constexpr,
    C: tl.constexpr,
    BITS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CHANNEL: tl.constexpr,
    P_UNIT: tl.constexpr,
    INTERPRET: tl.constexpr,
    PDL: tl.constexpr,
    CHAINED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Grid (B, G, num_splits). Stores m, l, acc as sparse_decode's attend_split_kernel does."""
    pdl_launch(PDL)
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    row_list = row * tl.num_programs(1) + kv_head
    k_ptr += kv_head.to(tl.int64) * stride_kg
    v_ptr += kv_head.to(tl.int64) * stride_vg
    if table_ptr is None:
        k_ptr += row * stride_kb
        v_ptr += row * stride_vb
    else:
        table_ptr += row * stride_tb
    cache = row * codes_batch + kv_head
    codes_ptr += cache * num_pages * PAGE_SIZE * C
    residual_ptr += cache * num_pages * PAGE_SIZE * D
    step_ptr += cache * num_pages * (D if CHANNEL else PAGE_SIZE)

    start = 0
    if starts_ptr is not None:
        start = tl.load(starts_ptr + row)
    length = tl.minimum(tl.load(lengths_ptr + row), num_tokens - start)
    packed = tl.minimum(length // PAGE_SIZE, num_pages) * PAGE_SIZE  # tokens
    offs_m = tl.arange(0, BLOCK_M)
    offs_c = tl.arange(0, BLOCK_C)
    offs_d = tl.arange(0, BLOCK_D)
    offs_e = tl.arange(0, BLOCK_E)
    mask_m = offs_m < group_size
    head = (kv_head * group_size + offs_m).to(tl.int64)
    row_head = row_list * group_size + offs_m
    q_ptrs = q_ptr + row * stride_qb + head[:, None] * stride_qh
    planes = load_planes(
        *(q_ptrs, stride_qd, D, C, BITS, offs_c[None, :], mask_m[:, None] & (offs_c < C))
    )  # [BLOCK_M, BLOCK_C]
    q = tl.load(q_ptrs + offs_d * stride_qd, mask=mask_m[:, None] & (offs_d < D), other=0.0)
    whole = q.to(tl.float32)  # [BLOCK_M, BLOCK_D]
    if INTERPRET:  # its bfloat16 arithmetic is wrong
        q = whole
    integers = integer_planes(planes, BITS, 1)
    high, low, _ = split_bytes(whole / integers[2][:, None])

    pdl_wait(CHAINED)
    pages_ptr += row_list * num_slots
    count = tl.minimum(tl.load(counts_ptr + row_list), num_slots)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.full([BLOCK_M], 0.0, tl.float32)
    acc = tl.full([BLOCK_M, BLOCK_E], 0.0, tl.float32)
    query = (planes, whole, integers, high, low, scale, unit)
    lists = (pages_ptr, table_ptr, start, packed, count)
    cached = (codes_ptr, step_ptr, residual_ptr, v_ptr, stride_vb, stride_vn, stride_ve)
    num_tiles = (count * PAGE_SIZE + BLOCK_T - 1) // BLOCK_T
    tile = split * num_tiles // num_splits
    end = (split + 1) * num_tiles // num_splits
    if INTERPRET:  # run-time bounds of `for` need Triton 3.9 there
        while tile < end:
            m, l, acc = residual_tile(
                *(tile, m, l, acc, query, lists, cached, D, E, C, BITS, PAGE_SIZE, BLOCK_SIZE),
                *(CHANNEL, P_UNIT, INTERPRET, BLOCK_T, BLOCK_C, BLOCK_D, BLOCK_E),
            )
            tile += 1
    else:
        for i in tl.range(tile, end):
            m, l, acc = residual_tile(
                *(i, m, l, acc, query, lists, cached, D, E, C, BITS, PAGE_SIZE, BLOCK_SIZE),
                *(CHANNEL, P_UNIT, INTERPRET, BLOCK_T, BLOCK_C, BLOCK_D, BLOCK_E),
            )

    # The partial page, if the list ends with it, as a cache of its own.
    last = tl.load(pages_ptr + count - 1, mask=count > 0, other=-1)
    is_read = (split == num_splits - 1) & (last * PAGE_SIZE == packed)
    rest = (None, table_ptr, start + packed, length - packed, 0)
    keys = (k_ptr, v_ptr, stride_kb, stride_kn, stride_kd, stride_vb, stride_vn, stride_ve)
    tile = 0
    end = tl.where(is_read, (length - packed + BLOCK_T - 1) // BLOCK_T, 0)
    while tile < end:
        m, l, acc = attend_tile(
            *(tile, m, l, acc, q, scale, rest, keys, (None, 0, mask_m), D, E, PAGE_SIZE),
            *(BLOCK_SIZE, False, 1, P_UNIT, INTERPRET, BLOCK_T, BLOCK_D, BLOCK_E),
        )
        tile += 1

    offs_split = row_head * num_splits + split
    tl.store(m_ptr + offs_split, m, mask=mask_m)
    tl.store(l_ptr + offs_split, l, mask=mask_m)
    acc_ptrs = acc_ptr + offs_split[:, None] * E + offs_e
    tl.store(acc_ptrs, acc / P_UNIT, mask=mask_m[:, None] & (offs_e < E))


@triton.jit
def residual_tile(
    tile,
    m,
    l,
    acc,
    query,
    lists,
    cached,
    D: tl.constexpr,
    E: tl.constexpr,
    C: tl.constexpr,
    BITS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CHANNEL: tl.constexpr,
    P_UNIT: tl.constexpr,
    INTERPRET: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """The running softmax (m, l, acc) after BLOCK_T more tokens of the list."""
    planes, whole, integers, high, low, scale, unit = query
    pages_ptr, table_ptr, start, packed, count = lists
    codes_ptr, step_ptr, residual_ptr, v_ptr, stride_vb, stride_vn, stride_ve = cached
    first = tile * BLOCK_T
    offs_t = tl.arange(0, BLOCK_T)
    offs_c = tl.arange(0, BLOCK_C)
    offs_d = tl.arange(0, BLOCK_D)
    offs_e = tl.arange(0, BLOCK_E)
    if PAGE_SIZE % BLOCK_T == 0:  # one page a tile: a scalar, which needs no pipeline stage
        slot = first // PAGE_SIZE
        page = tl.load(pages_ptr + slot, mask=slot < count, other=-1)
        position = page * PAGE_SIZE + first % PAGE_SIZE + offs_t
    else:
        slot = (first + offs_t) // PAGE_SIZE
        page = tl.load(pages_ptr + slot, mask=slot < count, other=-1)
        position = page * PAGE_SIZE + (first + offs_t) % PAGE_SIZE
    read = (position >= 0) & (position < packed)
    at = position.to(tl.int64)
    x = tl.load(
        codes_ptr + at[:, None] * C + offs_c, mask=read[:, None] & (offs_c < C), other=0
    )  # [BLOCK_T, BLOCK_C]
    r = tl.load(
        residual_ptr + at[:, None] * D + offs_d, mask=read[:, None] & (offs_d < D), other=0
    )  # [BLOCK_T, BLOCK_D]
    token = start + position
    if table_ptr is None:
        block = token * 0
    else:
        block = tl.load(table_ptr + token // BLOCK_SIZE, mask=read, other=0)
        token = token % BLOCK_SIZE
    place = block.to(tl.int64) * stride_vb + token.to(tl.int64) * stride_vn
    v = tl.load(
        v_ptr + place[:, None] + offs_e * stride_ve,
        mask=read[:, None] & (offs_e < E),
        other=0.0,
    )  # [BLOCK_T, BLOCK_E]
    if INTERPRET:
        v = v.to(tl.float32)
    if CHANNEL:
        page_steps = step_ptr + tl.maximum(page, 0).to(tl.int64) * D
        s = load_planes(page_steps, 1, D, C, BITS, offs_c[None, :], (offs_c < C)[None, :])
        if BITS == 2:
            scaled = (planes[0] * s[0], planes[1] * s[1], planes[2] * s[2], planes[3] * s[3])
        else:
            scaled = (planes[0] * s[0], planes[1] * s[1])
        integers = integer_planes(scaled, BITS, 1)
        step_D = tl.load(page_steps + offs_d, mask=offs_d < D, other=0.0).to(tl.float32)
        high, low, _ = split_bytes(whole * step_D[None, :] / integers[2][:, None])
        step = tl.full([BLOCK_T], 1.0, tl.float32)
    else:
        step = tl.load(step_ptr + at, mask=read, other=0.0).to(tl.float32)

    plane_high, plane_low, q_unit, total = integers
    codes = transposed_products(x, plane_high, plane_low, BITS, INTERPRET)
    signed = signed_bytes(r, INTERPRET)
    zero = tl.zeros([whole.shape[0], BLOCK_T], tl.int32)
    fine = byte_dot(high, tl.trans(signed), zero, INTERPRET) * 256
    fine += byte_dot(low, tl.trans(signed), zero, INTERPRET)
    s = codes.to(tl.float32) + fine.to(tl.float32) * unit
    s += (total * (0.5 - (1 << (BITS - 1)) + 0.5 * unit))[:, None]
    s = s * (q_unit * scale)[:, None] * step[None, :]
    s = tl.where(read[None, :], s, float("-inf"))  # [BLOCK_M, BLOCK_T]

    m_new = tl.maximum(m, tl.max(s, 1))
    base = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.exp2((s - base[:, None]) * LOG2E)
    alpha = tl.exp2((m - base) * LOG2E)
    l = l * alpha + tl.sum(p, 1)
    acc = add_weighted(acc * alpha[:, None], p * P_UNIT, v)
    return m_new, l, acc


@triton.jit
def transposed_products(x, high, low, BITS: tl.constexpr, INTERPRET: tl.constexpr):
    """Σ integer · code of each head and key of x [T, C], as int32 [heads, T]; exact."""
    c0 = tl.trans(code_plane(x, 0, BITS, INTERPRET))
    c1 = tl.trans(code_plane(x, 1, BITS, INTERPRET))
    zero = tl.zeros([high[0].shape[0], x.shape[0]], tl.int32)
    h = byte_dot(high[1], c1, byte_dot(high[0], c0, zero, INTERPRET), INTERPRET)
    l = byte_dot(low[1], c1, byte_dot(low[0], c0, zero, INTERPRET), INTERPRET)
    if BITS == 2:
        c2 = tl.trans(code_plane(x, 2, BITS, INTERPRET))
        c3 = tl.trans(code_plane(x, 3, BITS, INTERPRET))
        h = byte_dot(high[3], c3, byte_dot(high[2], c2, h, INTERPRET), INTERPRET)
        l = byte_dot(low[3], c3, byte_dot(low[2], c2, l, INTERPRET), INTERPRET)
    return h * 256 + l


@triton.jit
def signed_bytes(r, INTERPRET: tl.constexpr):
    """r - 128 of uint8 as int8."""
    if INTERPRET:
        signed = (r.to(tl.int32) - 128).to(tl.int8)
    else:
        signed = tl.inline_asm_elementwise(
            "xor.b32 $0, $1, 0x80808080;", "=r,r", [r], dtype=tl.int8, is_pure=True, pack=4
        )
    return signed
