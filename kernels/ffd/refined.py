"""Refined keys in Triton: a tile's scores by codes and residual, as integer products.

A refined key is k_quant + k_res of a thumbnail and its residual, 10 bits read instead of 16.
"""

# ruff: noqa: E741

import triton
import triton.language as tl

from sparse_eval.kernels.sparse_decode.kernel import run_softmax
from sparse_eval.kernels.thumbnail.kernel import (
    byte_dot,
    code_plane,
    four_bytes,
    integer_planes,
    load_planes,
    split_bytes,
)


@triton.jit
def steps_at(place, step_ptr, packed, CHANNEL: tl.constexpr, BLOCK_T: tl.constexpr):
    """Rule token: the steps of a tile's tokens, in float32. Loaded a tile ahead: the pipeline holds
    only what enters a product."""
    step = tl.zeros([BLOCK_T], tl.float32)
    if not CHANNEL:
        if len(place.shape) == 0:
            step_ptr += place.to(tl.int64)
            offs = tl.arange(0, BLOCK_T)
            ptrs = step_ptr + offs
            is_packed = (place + offs >= 0) & (place + offs < packed)
        else:
            ptrs = step_ptr + place.to(tl.int64)
            is_packed = (place >= 0) & (place < packed)
        step += tl.load(ptrs, mask=is_packed, other=0.0).to(tl.float32)
    return step


@triton.jit
def residual_tile(
    place,  # position in the row of each token, or of a WHOLE tile's first; negative: not read
    m,
    l,
    acc,
    step,  # [BLOCK_T], of this tile
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
    WHOLE: tl.constexpr,
    P_UNIT: tl.constexpr,
    STACKED: tl.constexpr,
    INTERPRET: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """The running softmax (m, l, acc) after the tokens at these positions, by refined keys."""
    planes, whole, integers, high, low, scale, unit = query
    _, table_ptr, start, packed, _ = lists
    codes_ptr, step_ptr, residual_ptr, v_ptr, stride_vb, stride_vn, stride_ve = cached
    offs_c = tl.arange(0, BLOCK_C)
    offs_d = tl.arange(0, BLOCK_D)
    offs_e = tl.arange(0, BLOCK_E)
    offs_t = tl.arange(0, BLOCK_T)
    if WHOLE:  # the one wide number: lanes add narrow offsets
        read = (place + offs_t >= 0) & (place + offs_t < packed)
        first = tl.maximum(place, 0)
        x_ptrs = codes_ptr + first.to(tl.int64) * C + (offs_t[:, None] * C + offs_c)
        r_ptrs = residual_ptr + first.to(tl.int64) * D + (offs_t[:, None] * D + offs_d)
        token = start + first
    else:
        read = (place >= 0) & (place < packed)
        x_ptrs = codes_ptr + place.to(tl.int64)[:, None] * C + offs_c
        r_ptrs = residual_ptr + place.to(tl.int64)[:, None] * D + offs_d
        token = start + place
    x = tl.load(x_ptrs, mask=read[:, None] & (offs_c < C), other=0)  # [BLOCK_T, BLOCK_C]
    r = tl.load(r_ptrs, mask=read[:, None] & (offs_d < D), other=0)  # [BLOCK_T, BLOCK_D]
    if table_ptr is not None:
        is_any = (place >= 0) & (place < packed)
        block = tl.load(table_ptr + token // BLOCK_SIZE, mask=is_any, other=0)
        at = block.to(tl.int64) * stride_vb + (token % BLOCK_SIZE).to(tl.int64) * stride_vn
    else:
        at = token.to(tl.int64) * stride_vn
    if WHOLE:
        v_ptrs = v_ptr + at + ((offs_t.to(tl.int64) * stride_vn)[:, None] + offs_e * stride_ve)
    else:
        v_ptrs = v_ptr + at[:, None] + offs_e * stride_ve
    # [BLOCK_T, BLOCK_E]
    v = tl.load(v_ptrs, mask=read[:, None] & (offs_e < E), other=0.0)
    if INTERPRET:
        v = v.to(tl.float32)
    if CHANNEL:
        if WHOLE:
            page = tl.maximum(place, 0) // PAGE_SIZE
        else:  # the tile's one page
            page = tl.maximum(tl.max(place, 0), 0) // PAGE_SIZE
        page_steps = step_ptr + page.to(tl.int64) * D
        s = load_planes(page_steps, 1, D, C, BITS, offs_c[None, :], (offs_c < C)[None, :])
        if BITS == 2:
            scaled = (planes[0] * s[0], planes[1] * s[1], planes[2] * s[2], planes[3] * s[3])
        else:
            scaled = (planes[0] * s[0], planes[1] * s[1])  # type: ignore[assignment]
        integers = integer_planes(scaled, BITS, 1)
        step_D = tl.load(page_steps + offs_d, mask=offs_d < D, other=0.0).to(tl.float32)
        high, low, _ = split_bytes(whole * step_D[None, :] / integers[2][:, None])
        step = tl.full([BLOCK_T], 1.0, tl.float32)

    plane_high, plane_low, q_unit, total = integers
    signed = signed_bytes(r, INTERPRET)
    zero = tl.zeros([whole.shape[0], BLOCK_T], tl.int32)
    if STACKED:
        codes = stacked_products(x, plane_high, BITS, INTERPRET)
        fine = both_halves(byte_dot(high, tl.trans(signed), zero, INTERPRET))
    else:
        codes = transposed_products(x, plane_high, plane_low, BITS, INTERPRET)
        fine = byte_dot(high, tl.trans(signed), zero, INTERPRET) * 256
        fine += byte_dot(low, tl.trans(signed), zero, INTERPRET)
    s = codes.to(tl.float32) + fine.to(tl.float32) * unit
    s += (total * (0.5 - (1 << (BITS - 1)) + 0.5 * unit))[:, None]
    s = s * (q_unit * scale)[:, None] * step[None, :]
    s = tl.where(read[None, :], s, float("-inf"))  # [BLOCK_M, BLOCK_T]

    return run_softmax(s, m, l, acc, v, P_UNIT, STACKED)


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
def stacked_products(x, bytes_, BITS: tl.constexpr, INTERPRET: tl.constexpr):
    """transposed_products where rows 0 to 7 hold the high bytes and rows 8 to 15 the low ones:
    [8, T]."""
    z = tl.zeros([16, x.shape[0]], tl.int32)
    for i in tl.static_range(8 // BITS):
        z = byte_dot(bytes_[i], tl.trans(code_plane(x, i, BITS, INTERPRET)), z, INTERPRET)
    return both_halves(z)


@triton.jit
def both_halves(z):
    """256 · rows 0 to 7 of z [16, T] plus rows 8 to 15."""
    weight = tl.where(tl.arange(0, 16)[:, None] < 8, 256, 1)
    return tl.sum(tl.reshape(z * weight, [2, 8, z.shape[1]]), 0)


@triton.jit
def signed_bytes(r, INTERPRET: tl.constexpr):
    """r - 128 of uint8 as int8."""
    if INTERPRET:
        signed = (r.to(tl.int32) - 128).to(tl.int8)
    else:
        signed = four_bytes(r, "xor.b32 $0, $1, 0x80808080;")
    return signed
