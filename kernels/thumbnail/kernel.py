"""Thumbnails in Triton: pack pages, and score packed keys with integer products.

A query is rounded once to 15-bit integers of a power of two and split into two signed bytes, so
that a score is two exact byte products and codes never become floats: four codes of a byte plane
come out of a register by one mask.
"""

import triton
import triton.language as tl

from sparse_eval.kernels.quest_select.kernel import round_up
from sparse_eval.kernels.sparse_decode.kernel import locate, pdl_launch, pdl_wait

# Added to a small float, it leaves the nearest integer in the low bits: 1.5 · 2^23.
ROUND = tl.constexpr(12582912.0)
ROUND_BITS = tl.constexpr(0x4B400000)
# More than float32 loses of a sum of up to 256 magnitudes.
SLACK_ROUNDING = tl.constexpr(1 + 2.0**-14)


@triton.jit
def four_bytes(x, ASM: tl.constexpr):
    """An instruction or two on the bytes of x, four to a register: int8."""
    return tl.inline_asm_elementwise(ASM, "=r,r", [x], dtype=tl.int8, is_pure=True, pack=4)


@triton.jit
def code_plane(x, PLANE: tl.constexpr, BITS: tl.constexpr, INTERPRET: tl.constexpr):
    """Codes number PLANE of each byte, as int8."""
    if INTERPRET:
        code = ((x >> (PLANE * BITS)) & ((1 << BITS) - 1)).to(tl.int8)
    elif BITS == 4:
        if PLANE == 0:
            code = four_bytes(x, "and.b32 $0, $1, 0x0F0F0F0F;")
        else:
            code = four_bytes(x, "{.reg .b32 t; shr.u32 t, $1, 4; and.b32 $0, t, 0x0F0F0F0F;}")
    elif PLANE == 0:
        code = four_bytes(x, "and.b32 $0, $1, 0x03030303;")
    elif PLANE == 1:
        code = four_bytes(x, "{.reg .b32 t; shr.u32 t, $1, 2; and.b32 $0, t, 0x03030303;}")
    elif PLANE == 2:
        code = four_bytes(x, "{.reg .b32 t; shr.u32 t, $1, 4; and.b32 $0, t, 0x03030303;}")
    else:
        code = four_bytes(x, "{.reg .b32 t; shr.u32 t, $1, 6; and.b32 $0, t, 0x03030303;}")
    return code


@triton.jit
def upper_plane(x, PLANE: tl.constexpr, BITS: tl.constexpr, INTERPRET: tl.constexpr):
    """Codes number PLANE of each byte as int8, in its upper half: one mask, after one shift for all
    planes of the lower half. Odd planes (and all of 4 bits) lie at a byte's top, whose first bit is
    a sign: half their range is taken off. Even planes of 2 bits lie below, a quarter as heavy."""
    if INTERPRET:
        high = x.to(tl.int32) << (4 if PLANE * BITS < 4 else 0)
        if BITS == 4:
            high = (high & 0xF0) ^ 128
        elif PLANE % 2 == 1:
            high = (high & 0xC0) ^ 128
        else:
            high = high & 0x30
        code = high.to(tl.int8)
    elif BITS == 4:
        if PLANE == 0:
            code = four_bytes(
                x, "{.reg .b32 t; shl.b32 t, $1, 4; lop3.b32 $0, t, 0xF0F0F0F0, 0x80808080, 0x6A;}"
            )
        else:
            code = four_bytes(x, "lop3.b32 $0, $1, 0xF0F0F0F0, 0x80808080, 0x6A;")
    elif PLANE == 0:
        code = four_bytes(x, "{.reg .b32 t; shl.b32 t, $1, 4; and.b32 $0, t, 0x30303030;}")
    elif PLANE == 1:
        code = four_bytes(
            x, "{.reg .b32 t; shl.b32 t, $1, 4; lop3.b32 $0, t, 0xC0C0C0C0, 0x80808080, 0x6A;}"
        )
    elif PLANE == 2:
        code = four_bytes(x, "and.b32 $0, $1, 0x30303030;")
    else:
        code = four_bytes(x, "lop3.b32 $0, $1, 0xC0C0C0C0, 0x80808080, 0x6A;")
    return code


@triton.jit
def byte_dot(x, y, acc, INTERPRET: tl.constexpr):
    """acc + x @ y of int8 in int32."""
    if INTERPRET:  # its int8 products are taken in int8
        z = tl.dot(x.to(tl.float32), y.to(tl.float32), input_precision="ieee")
        acc += z.to(tl.int32)
    else:
        acc = tl.dot(x, y, acc, out_dtype=tl.int32)
    return acc


@triton.jit
def load_planes(
    row_ptrs, stride, D: tl.constexpr, C: tl.constexpr, BITS: tl.constexpr, offs_c, mask
):
    """float32 values of channels offs_c + i · C for each plane i, as a tuple; 0 outside."""
    p0 = tl.load(row_ptrs + offs_c * stride, mask=mask, other=0.0).to(tl.float32)
    p1 = tl.load(row_ptrs + (offs_c + C) * stride, mask=mask, other=0.0).to(tl.float32)
    if BITS == 2:
        p2 = tl.load(row_ptrs + (offs_c + 2 * C) * stride, mask=mask, other=0.0).to(tl.float32)
        p3 = tl.load(row_ptrs + (offs_c + 3 * C) * stride, mask=mask, other=0.0).to(tl.float32)
        planes = (p0, p1, p2, p3)
    else:
        planes = (p0, p1)  # type: ignore[assignment]
    return planes


@triton.jit
def planes_max(planes, BITS: tl.constexpr, AXIS: tl.constexpr):
    """The largest magnitude over the channels, which lie along AXIS."""
    m = tl.maximum(tl.abs(planes[0]), tl.abs(planes[1]))
    if BITS == 2:
        m = tl.maximum(m, tl.maximum(tl.abs(planes[2]), tl.abs(planes[3])))
    return tl.max(m, AXIS)


@triton.jit
def planes_norm(planes, BITS: tl.constexpr, AXIS: tl.constexpr):
    """The sum of magnitudes over the channels."""
    m = tl.abs(planes[0]) + tl.abs(planes[1])
    if BITS == 2:
        m += tl.abs(planes[2]) + tl.abs(planes[3])
    return tl.sum(m, AXIS)


@triton.jit
def integer_planes(planes, BITS: tl.constexpr, AXIS: tl.constexpr):
    """Planes as integers below 2^14 in magnitude: (high bytes, low bytes, unit, sum), where
    plane = unit · (256 · high + low) up to half a unit, and sum is that of the integers. unit is a
    power of two per head, so what has few bits stays exact."""
    exponent = planes_max(planes, BITS, AXIS).to(tl.int32, bitcast=True) >> 23
    exponent = tl.minimum(tl.maximum(exponent, 15), 254)
    unit = ((exponent - 13) << 23).to(tl.float32, bitcast=True)
    inverse = tl.expand_dims(((267 - exponent) << 23).to(tl.float32, bitcast=True), AXIS)
    h0, l0, sum0 = split_bytes(planes[0] * inverse)
    h1, l1, sum1 = split_bytes(planes[1] * inverse)
    total = sum0 + sum1
    if BITS == 2:
        h2, l2, sum2 = split_bytes(planes[2] * inverse)
        h3, l3, sum3 = split_bytes(planes[3] * inverse)
        total += sum2 + sum3
        high = (h0, h1, h2, h3)
        low = (l0, l1, l2, l3)
    else:
        high = (h0, h1)  # type: ignore[assignment]
        low = (l0, l1)  # type: ignore[assignment]
    return high, low, unit, tl.sum(total, AXIS).to(tl.float32)


@triton.jit
def split_bytes(x):
    """x, below 2^15 in magnitude, rounded to 256 · high + low of signed bytes; and as int32.

    128 enters with the float sum, so that each byte stored is an integer operation's: a float's own
    low byte is stored as that float converted to a byte by the ptxas of Triton 3.6 (F2IP), where
    bytes are stored one by one."""
    bits = (x + (ROUND + 128)).to(tl.int32, bitcast=True)
    low = bits - 128
    return (bits >> 8).to(tl.int8), low.to(tl.int8), low - ROUND_BITS


@triton.jit
def code_products(x, high, low, BITS: tl.constexpr, INTERPRET: tl.constexpr):
    """Σ code · integer of each key of x [N, C] or [pages, N, C] and head, exact: int32 [N, heads]
    or [pages, N, heads]."""
    c0 = code_plane(x, 0, BITS, INTERPRET)
    c1 = code_plane(x, 1, BITS, INTERPRET)
    if len(x.shape) == 3:
        zero = tl.zeros([x.shape[0], x.shape[1], high[0].shape[2]], tl.int32)
    else:
        zero = tl.zeros([x.shape[0], high[0].shape[1]], tl.int32)
    h = byte_dot(c1, high[1], byte_dot(c0, high[0], zero, INTERPRET), INTERPRET)
    l = byte_dot(c1, low[1], byte_dot(c0, low[0], zero, INTERPRET), INTERPRET)  # noqa: E741
    if BITS == 2:
        c2 = code_plane(x, 2, BITS, INTERPRET)
        c3 = code_plane(x, 3, BITS, INTERPRET)
        h = byte_dot(c3, high[3], byte_dot(c2, high[2], h, INTERPRET), INTERPRET)
        l = byte_dot(c3, low[3], byte_dot(c2, low[2], l, INTERPRET), INTERPRET)  # noqa: E741
    return h * 256 + l


@triton.jit
def score_keys(
    x,  # [N, C] codes
    step,  # [N] float32; not used by rule channel
    integers,
    scale,
    slack,  # [heads], added to a score per unit of step
    BITS: tl.constexpr,
    CHANNEL: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Scores of packed keys, [N, heads] float32."""
    high, low, unit, total = integers
    products = code_products(x, high, low, BITS, INTERPRET).to(tl.float32)
    factor = unit * scale
    offset = total * (0.5 - (1 << (BITS - 1))) * factor + slack
    s = products * factor[None, :] + offset[None, :]
    if not CHANNEL:
        s = s * step[:, None]
    return s


@triton.jit
def sum_query(planes, BITS: tl.constexpr):
    """The query [C, heads] as token_sums takes it: (high bytes, low bytes, what their sums start
    at, unit), where a score over its key's step is unit · sum. Integers as in integer_planes, but
    of 13 bits where codes of 2 bits weigh four times as much."""
    exponent = planes_max(planes, BITS, 0).to(tl.int32, bitcast=True) >> 23
    exponent = tl.minimum(tl.maximum(exponent, 15), 254)
    unit = ((exponent - 13) << 23).to(tl.float32, bitcast=True)
    inverse = ((267 - exponent) << 23).to(tl.float32, bitcast=True)[None, :]
    h0, l0, sum0 = split_bytes(planes[0] * inverse)
    if BITS == 2:
        h1, l1, sum1 = split_bytes(planes[1] * (inverse * 0.25))
        h2, l2, sum2 = split_bytes(planes[2] * inverse)
        h3, l3, sum3 = split_bytes(planes[3] * (inverse * 0.25))
        high = (h0, h1, h2, h3)
        low = (l0, l1, l2, l3)
        # A level is its code less 1.5: of 64 · (code - 2) and of 16 · code this is left.
        offset = tl.sum((sum1 + sum3) * 32 - (sum0 + sum2) * 24, 0)
    else:
        h1, l1, sum1 = split_bytes(planes[1] * inverse)
        high = (h0, h1)  # type: ignore[assignment]
        low = (l0, l1)  # type: ignore[assignment]
        offset = tl.sum(sum0 + sum1, 0) * 8  # a level is its code less 7.5, not 8
    first_high, first_low = (offset >> 8) + ROUND_BITS, (offset & 255) + ROUND_BITS
    return high, low, first_high, first_low, unit * (1.0 / 16)


@triton.jit
def token_sums(x, query, BITS: tl.constexpr, INTERPRET: tl.constexpr):
    """Σ integer · level of each key of x [N, C] and head, in the units of sum_query: float32
    [N, heads]. Sums of products start at ROUND's bits and so are floats as they are."""
    high, low, first_high, first_low, _ = query
    h = tl.zeros([x.shape[0], high[0].shape[1]], tl.int32) + first_high[None, :]
    l = tl.zeros([x.shape[0], high[0].shape[1]], tl.int32) + first_low[None, :]  # noqa: E741
    for i in tl.static_range(8 // BITS):
        code = upper_plane(x, i, BITS, INTERPRET)
        h = byte_dot(code, high[i], h, INTERPRET)
        l = byte_dot(code, low[i], l, INTERPRET)  # noqa: E741
    if high[0].shape[0] * (8 // BITS) <= 128:
        wide_h = h.to(tl.float32, bitcast=True)
        wide_l = l.to(tl.float32, bitcast=True)
    else:  # a sum could leave the range in which bits are a float's
        wide_h = (h - ROUND_BITS).to(tl.float32) + ROUND
        wide_l = (l - ROUND_BITS).to(tl.float32) + ROUND
    total = wide_h * 256.0 + (-257.0 * ROUND)
    return total + wide_l


@triton.jit
def sums_error(D: tl.constexpr, BITS: tl.constexpr):
    """At least what token_sums is off by, in its units: 1/16 of sum_query's integers' unit.

    Each integer is off by half a unit (where it has 13 bits by two) and meets the outermost level
    at most; 512 is more than float32 loses of the sum."""
    each: tl.constexpr = 1.5 * (0.5 + 2) / 2 if BITS == 2 else 7.5 * 0.5
    return D * each * 16 + 512


@triton.jit
def sum_threshold(threshold, unit):
    """A score's threshold in units of token_sums times step, a little lower: a score at the
    threshold is kept, and the difference is to be negative there."""
    is_zero = unit == 0.0
    least = threshold / tl.where(is_zero, 1.0, unit)
    least = tl.where(least < float("inf"), least - (tl.abs(least) * 1.2e-7 + 1e-37), least)
    least = tl.where(is_zero & (threshold <= 0.0), float("-inf"), least)
    return tl.where(is_zero & (threshold > 0.0), float("inf"), least)


@triton.jit
def page_integers(planes, step_ptr, C: tl.constexpr, BITS: tl.constexpr, offs_c, mask_c):
    """Rule channel: the query's planes times a page's steps, as integers."""
    s = load_planes(step_ptr, 1, 0, C, BITS, offs_c[:, None], mask_c[:, None])
    if BITS == 2:
        scaled = (planes[0] * s[0], planes[1] * s[1], planes[2] * s[2], planes[3] * s[3])
    else:
        scaled = (planes[0] * s[0], planes[1] * s[1])  # type: ignore[assignment]
    return integer_planes(scaled, BITS, 0)


@triton.jit
def pages_scores(
    x,  # [pages, N, C] codes of whole pages
    planes,  # the query's, [C, heads]
    steps,  # by plane, [pages, C]
    scale,
    width,  # |scale| · reach, where scores are raised by their error bound
    D: tl.constexpr,
    BITS: tl.constexpr,
    RAISE: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Rule channel: scores of several pages, [pages, N, heads] float32."""
    q0 = planes[0][None, :, :] * steps[0].to(tl.float32)[:, :, None]
    q1 = planes[1][None, :, :] * steps[1].to(tl.float32)[:, :, None]
    if BITS == 2:
        q2 = planes[2][None, :, :] * steps[2].to(tl.float32)[:, :, None]
        q3 = planes[3][None, :, :] * steps[3].to(tl.float32)[:, :, None]
        scaled = (q0, q1, q2, q3)
    else:
        scaled = (q0, q1)  # type: ignore[assignment]
    high, low, unit, total = integer_planes(scaled, BITS, 1)
    products = code_products(x, high, low, BITS, INTERPRET).to(tl.float32)
    factor = unit * scale  # [pages, heads]
    offset = total * (0.5 - (1 << (BITS - 1))) * factor
    if RAISE:  # a half unit of each integer times the outermost level; 32: float32's sums
        offset += planes_norm(scaled, BITS, 1) * width
        offset += factor * (D * 0.5 * ((1 << (BITS - 1)) - 0.5) + 32)
    return products * factor[:, None, :] + offset[:, None, :]


@triton.jit(do_not_specialize=["num_tokens", "group_size", "codes_batch"])
def score_kernel(
    q_ptr,  # [B, H, D]
    codes_ptr,  # [B or 1, G, num_tokens, C]
    step_ptr,  # [B or 1, G, num_tokens] or [B or 1, G, pages, D]
    out_ptr,  # [B, H, num_tokens] float32
    scale,
    num_tokens,
    group_size,
    stride_qb,
    stride_qh,
    stride_qd,
    codes_batch,  # 0 over a batch of one, else G
    D: tl.constexpr,
    C: tl.constexpr,
    BITS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    CHANNEL: tl.constexpr,
    INTERPRET: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_N: tl.constexpr,  # tokens a program scores; of one page under rule channel
):
    """Grid (tiles, G, B): scores of every token of capacity."""
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    offs_h = tl.arange(0, BLOCK_H)
    offs_c = tl.arange(0, BLOCK_C)
    offs_n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_h, mask_c = offs_h < group_size, offs_c < C
    head = (kv_head * group_size + offs_h).to(tl.int64)
    planes = load_planes(
        q_ptr + row * stride_qb + head[None, :] * stride_qh,
        *(stride_qd, D, C, BITS, offs_c[:, None], mask_c[:, None] & mask_h[None, :]),
    )
    cache = row * codes_batch + kv_head
    codes_ptr += cache * num_tokens * C
    mask_n = offs_n < num_tokens
    x = tl.load(
        codes_ptr + offs_n.to(tl.int64)[:, None] * C + offs_c,
        mask=mask_n[:, None] & mask_c,
        other=0,
    )
    if CHANNEL:
        page = cache * (num_tokens // PAGE_SIZE) + tile * BLOCK_N // PAGE_SIZE
        integers = page_integers(planes, step_ptr + page * D, C, BITS, offs_c, mask_c)
        step = 0.0
    else:
        integers = integer_planes(planes, BITS, 0)
        step = tl.load(step_ptr + cache * num_tokens + offs_n, mask=mask_n, other=0.0)
        step = step.to(tl.float32)
    no_slack = tl.zeros([BLOCK_H], tl.float32)
    s = score_keys(x, step, integers, scale, no_slack, BITS, CHANNEL, INTERPRET)
    out_ptr += (row * tl.num_programs(1) * group_size + head)[None, :] * num_tokens
    tl.store(out_ptr + offs_n[:, None], s, mask=mask_n[:, None] & mask_h[None, :])


@triton.jit(do_not_specialize=["num_tokens", "extent", "first_page", "num_cleared", "codes_batch"])
def pack_kernel(
    k_ptr,  # [batch or block, G, token, D]
    starts_ptr,  # [B], None = 0
    lengths_ptr,  # [B], None = page number program_id(2) + first_page
    table_ptr,  # [B, blocks], None = a contiguous cache
    codes_ptr,  # [B or 1, G, num_tokens, C]
    step_ptr,  # [B or 1, G, num_tokens] or [B or 1, G, pages, D]
    residual_ptr,  # [B or 1, G, num_tokens, D], None
    cleared_ptr,  # [B, G, num_cleared] int32, to be set to 0; None = nothing is
    coverage,  # of the largest magnitude, over 2^(BITS - 1)
    unit,
    num_tokens,
    extent,  # of k
    first_page,
    num_cleared,
    stride_tb,
    stride_kb,
    stride_kg,
    stride_kn,
    stride_kd,
    codes_batch,
    D: tl.constexpr,
    C: tl.constexpr,
    BITS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CHANNEL: tl.constexpr,
    WRITE_CODES: tl.constexpr,  # False: codes and steps stand, the residual is written
    FRESH: tl.constexpr,  # only pages that a row's newest token has filled
    PDL: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
):
    """Grid (B, G, pages): one page, or each row's newest full page where lengths are given."""
    pdl_wait(PDL)
    pdl_launch(PDL)  # from here on q, k and lengths stand for whoever starts early
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    page = tl.program_id(2) + first_page
    if cleared_ptr is not None:
        cleared_ptr += (row * tl.num_programs(1) + kv_head) * num_cleared
        at = 0
        while at < num_cleared:
            offs = at + tl.arange(0, 256)
            tl.store(cleared_ptr + offs, 0, mask=offs < num_cleared)
            at += 256
    length = num_tokens
    start = 0
    if starts_ptr is not None:
        start = tl.load(starts_ptr + row)
    if lengths_ptr is not None:
        length = tl.minimum(tl.load(lengths_ptr + row), extent - start)
        page = length // PAGE_SIZE - 1
        if FRESH:
            page = tl.where(length % PAGE_SIZE == 0, page, -1)
    k_ptr += kv_head.to(tl.int64) * stride_kg
    if table_ptr is None:
        k_ptr += row * stride_kb
    else:
        table_ptr += row * stride_tb
    if page >= 0:
        offs_t = tl.arange(0, BLOCK_TOKENS)
        offs_c = tl.arange(0, BLOCK_C)
        first = page * PAGE_SIZE
        lists = (None, table_ptr, start, length, 0)
        block, token, _ = locate(first + offs_t, lists, PAGE_SIZE, BLOCK_SIZE)
        mask_t, mask_c = offs_t < PAGE_SIZE, offs_c < C
        mask = mask_t[:, None] & mask_c
        planes = load_planes(
            k_ptr + (block * stride_kb + token * stride_kn)[:, None],
            *(stride_kd, D, C, BITS, offs_c[None, :], mask),
        )
        cache = row * codes_batch + kv_head
        offs_key = cache * num_tokens + first + offs_t
        codes_ptrs = codes_ptr + offs_key[:, None] * C + offs_c
        if residual_ptr is not None:
            residual_ptrs = residual_ptr + offs_key[:, None] * D + offs_c
        if CHANNEL:
            step_ptrs = step_ptr + (cache * (num_tokens // PAGE_SIZE) + page) * D + offs_c
            mask_step = mask_c
        else:
            step_ptrs = step_ptr + offs_key
            mask_step = mask_t
            largest = planes_max(planes, BITS, 1)
            step = new_step(largest, coverage, step_ptrs, mask_step, WRITE_CODES)
        byte = tl.zeros([BLOCK_TOKENS, BLOCK_C], tl.int32)
        for i in tl.static_range(8 // BITS):
            if CHANNEL:
                largest = tl.max(tl.abs(planes[i]), 0)
                place = step_ptrs + i * C
                wide = new_step(largest, coverage, place, mask_step, WRITE_CODES)[None, :]
            else:
                wide = step[:, None]
            code = tl.zeros([BLOCK_TOKENS, BLOCK_C], tl.int32)
            for cell in tl.static_range(1 - (1 << (BITS - 1)), 1 << (BITS - 1)):
                code += (planes[i] >= cell * wide).to(tl.int32)
            byte |= code << (i * BITS)
            if residual_ptr is not None:
                left = planes[i] - (code.to(tl.float32) + (0.5 - (1 << (BITS - 1)))) * wide
                fine = wide * unit
                rest = tl.floor(tl.div_rn(left, tl.where(fine > 0, fine, 1.0)))
                rest = tl.minimum(tl.maximum(rest + 128, 0), 255)
                tl.store(residual_ptrs + i * C, rest.to(tl.uint8), mask=mask)
        if WRITE_CODES:
            tl.store(codes_ptrs, byte.to(tl.uint8), mask=mask)


@triton.jit
def new_step(largest, coverage, ptrs, mask, WRITE: tl.constexpr):
    """The step for a largest magnitude, stored and in float32; without WRITE the stored one."""
    if WRITE:
        step = round_up((largest * coverage).to(tl.float64), ptrs.dtype.element_ty)
        tl.store(ptrs, step, mask=mask)
    else:
        step = tl.load(ptrs, mask=mask, other=0.0)
    return step.to(tl.float32)
