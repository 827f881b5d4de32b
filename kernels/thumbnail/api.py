"""The one door to thumbnails: pack keys, extend in place, score queries; checks, then a backend."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sparse_eval.kernels.sparse_decode.api import check_backend
from sparse_eval.kernels.sparse_decode.reference import extent_of, live_lengths
from sparse_eval.kernels.thumbnail import reference
from sparse_eval.kernels.thumbnail.format import (
    BITS,
    MAX_TRITON_PAGE_SIZE,
    RULES,
    Residual,
    Thumbnail,
    can_use_triton,
    unit_of,
)


def pack_thumbnail(
    k: Tensor,
    *,
    page_size: int,
    bits: int = 2,
    rule: str = "token",
    coverage: float = 1.0,
    capacity: int | None = None,
    backend: str = "torch",
) -> Thumbnail:
    """The thumbnail of k's full pages: [B, G, N, D], whose N // page_size first pages are packed.

    rule: a step per token and KV head ("token"), or per channel and page ("channel"); step =
    coverage · largest magnitude / 2^(bits-1), rounded up in k's dtype. capacity: tokens to make
    room for, N if None; pages that are not packed hold zeros. A NaN
    coordinate makes its step NaN; the kernel passes over it and gives it the lowest level.
    Raises ValueError on wrong arguments."""
    check_format(k, page_size, bits, rule, coverage)
    check_thumbnail_backend(backend, k[0], page_size)
    capacity = k.shape[2] if capacity is None else capacity
    if not isinstance(capacity, int) or isinstance(capacity, bool) or capacity < k.shape[2]:
        raise ValueError(f"capacity must be an integer >= {k.shape[2]} tokens, got {capacity!r}")
    pages, num_full = -(-capacity // page_size), k.shape[2] // page_size
    codes = torch.zeros(
        *(*k.shape[:2], pages * page_size, k.shape[3] * bits // 8),
        dtype=torch.uint8,
        device=k.device,
    )
    per_page = (page_size,) if rule == "token" else (1, k.shape[3])
    shape = (*k.shape[:2], pages * per_page[0], *per_page[1:])
    packed = Thumbnail(codes, k.new_zeros(shape), page_size, bits, rule, float(coverage))
    if num_full:
        fill(packed, None, k[:, :, : num_full * page_size], backend)
    return packed


def pack_residual(k: Tensor, thumbnail: Thumbnail, *, backend: str = "torch") -> Residual:
    """What `thumbnail` leaves of the full pages of k [B, G, N, D], N at most its capacity.

    Room for as many tokens as the thumbnail has; each error is at most half a residual step."""
    check_keys(k, thumbnail)
    check_thumbnail_backend(backend, k[0], thumbnail.page_size)
    shape = (*thumbnail.codes.shape[:3], thumbnail.head_dim)
    codes = torch.zeros(shape, dtype=torch.uint8, device=k.device)
    residual = Residual(codes, unit_of(thumbnail))
    full = min(k.shape[2], thumbnail.num_tokens) // thumbnail.page_size * thumbnail.page_size
    if full:
        fill(thumbnail, residual, k[:, :, :full], backend)
    return residual


def fill(thumbnail: Thumbnail, residual: Residual | None, k: Tensor, backend: str) -> None:
    """Packs whole pages of k into the first ones of the thumbnail, or of its residual if given."""
    t, num_tokens = thumbnail, k.shape[2]
    if backend == "triton":
        from sparse_eval.kernels.thumbnail.launch import pack_triton

        pages = num_tokens // t.page_size
        is_first = residual is None
        pack_triton(t, residual, k, None, None, None, num_pages=pages, write_codes=is_first)
        return
    num_steps = num_tokens if t.rule == "token" else num_tokens // t.page_size
    if residual is None:
        form = (t.page_size, t.bits, t.rule, t.coverage)
        t.codes[:, :, :num_tokens], t.step[:, :, :num_steps] = reference.pack_reference(k, *form)
        return
    part = t.with_tensors(t.codes[:, :, :num_tokens], t.step[:, :, :num_steps])
    residual.codes[:, :, :num_tokens] = reference.pack_residual_reference(k, part, residual.unit)


def extend_thumbnail(
    thumbnail: Thumbnail,
    k: Tensor,
    starts: Tensor | None,
    lengths: Tensor,
    *,
    residual: Residual | None = None,
    block_table: Tensor | None = None,
    fresh: bool = False,
    backend: str = "torch",
) -> None:
    """Writes each row's newest full page in place, and the residual's if given.

    fresh: only where the row's newest token has filled it, which is enough once per new token.

    k, starts, lengths, block_table as in sparse_decode; rows without a full page are left alone.
    Page p of row b is [starts + p · page_size, …), so a thumbnail's token 0 is a row's first. A
    length beyond the cache's extent counts as its end. Raises ValueError on wrong arguments."""
    check_keys(k, thumbnail)
    check_thumbnail_backend(backend, k[0], thumbnail.page_size)
    full = extent_of(k, block_table) // thumbnail.page_size * thumbnail.page_size
    check_cache(thumbnail, k, starts, lengths, block_table, full)
    if residual is not None:
        check_residual(thumbnail, residual)
    if backend == "triton":
        from sparse_eval.kernels.thumbnail.launch import pack_triton

        pack_triton(thumbnail, residual, k, starts, lengths, block_table, fresh=fresh)
        return
    codes = None if residual is None else residual.codes
    lengths = live_lengths(lengths, starts, extent_of(k, block_table))
    reference.extend_reference(
        *(thumbnail, codes, unit_of(thumbnail), k, starts, lengths, block_table, fresh)
    )


def unpack(thumbnail: Thumbnail) -> Tensor:
    """The levels that the codes stand for: [B, G, N, D] in float32 (float64 for float64 keys).

    Packed again they give the same levels, up to a step's rounding, where coverage is
    2^(bits-1) / (2^(bits-1) - ½), and at coverage 1 the same codes, of smaller steps."""
    return reference.unpack_reference(thumbnail)


def unpack_residual(residual: Residual, thumbnail: Thumbnail) -> Tensor:
    """The residual's levels; unpack(thumbnail) plus this is the key in about 8 + bits bits."""
    return reference.unpack_residual_reference(residual.codes, residual.unit, thumbnail)


def thumbnail_scores(
    q: Tensor, thumbnail: Thumbnail, scale: float, *, backend: str = "torch"
) -> Tensor:
    """scale · q·k_quant per query head and token of capacity: [B, H, N] float32.

    q: [B, H, D]; the thumbnail's batch is B or 1. What is not packed scores 0: mask it. backend
    torch gives float64 for float64 keys; triton rounds the query to 15 bits of a power of two."""
    check_query(q, thumbnail, scale)
    check_thumbnail_backend(backend, q, thumbnail.page_size)
    if backend == "triton":
        from sparse_eval.kernels.thumbnail.launch import scores_triton

        return scores_triton(q, thumbnail, scale)
    return reference.scores_reference(q, thumbnail, scale)


def score_error_bound(q: Tensor, thumbnail: Thumbnail, scale: float) -> Tensor:
    """At least |scale · q·k - score| of each head and token: [B, H, N] float32 (float64 for
    float64 keys), the score being backend torch's, its rounding included.

    The L1 norm of q times the largest error of a coordinate (rule channel: channel by channel)."""
    check_query(q, thumbnail, scale)
    return reference.bound_reference(q, thumbnail, scale)


def check_format(k: Tensor, page_size: int, bits: int, rule: str, coverage: float) -> None:
    if not isinstance(page_size, int) or isinstance(page_size, bool) or page_size < 1:
        raise ValueError(f"page_size must be an integer >= 1, got {page_size!r}")
    if not isinstance(bits, int) or isinstance(bits, bool) or bits not in BITS:
        raise ValueError(f"bits must be one of {', '.join(map(str, BITS))}, got {bits!r}")
    if rule not in RULES:
        raise ValueError(f"rule must be one of {', '.join(RULES)}, got {rule!r}")
    if (
        not isinstance(coverage, (int, float))
        or isinstance(coverage, bool)
        or not 0 < coverage < math.inf
    ):
        raise ValueError(f"coverage must be a finite number > 0, got {coverage!r}")
    if k.dim() != 4 or not k.is_floating_point() or k.shape[3] % (8 // bits):
        raise ValueError(
            f"k must be float [B, G, N, D] with D a multiple of {8 // bits} for {bits} bits, got "
            f"{k.dtype} {list(k.shape)}"
        )


def check_keys(k: Tensor, thumbnail: Thumbnail) -> None:
    wanted = (thumbnail.codes.shape[1], thumbnail.head_dim)
    if k.dim() != 4 or (k.shape[1], k.shape[3]) != wanted or k.dtype != thumbnail.step.dtype:
        raise ValueError(
            f"k must be {thumbnail.step.dtype} [.., {wanted[0]}, .., {wanted[1]}] as the thumbnail "
            f"is, got {k.dtype} {list(k.shape)}"
        )


def check_cache(
    thumbnail: Thumbnail,
    k: Tensor,
    starts: Tensor | None,
    lengths: Tensor,
    block_table: Tensor | None,
    room: int,
) -> None:
    """Rows, and a thumbnail of at least `room` tokens; shapes alone, never a value."""
    if lengths.dim() != 1:
        raise ValueError(f"lengths must be int32 [B], got {lengths.dtype} {list(lengths.shape)}")
    rows = len(lengths)
    for name, x in (("lengths", lengths), ("starts", starts)):
        if x is not None and (x.dtype != torch.int32 or x.shape != (rows,)):
            raise ValueError(f"{name} must be int32 [{rows}], got {x.dtype} {list(x.shape)}")
    if block_table is None:
        if len(k) not in (1, rows):
            raise ValueError(f"k must have batch {rows} (of lengths) or 1, got {len(k)}")
    else:
        if block_table.dtype != torch.int32 or block_table.dim() != 2:
            raise ValueError(
                f"block_table must be int32 [{rows} or 1, blocks], got {block_table.dtype} "
                f"{list(block_table.shape)}"
            )
        if len(block_table) not in (1, rows):
            raise ValueError(f"block_table must have batch {rows} or 1, got {len(block_table)}")
        if k.shape[2] % thumbnail.page_size:
            raise ValueError(
                f"block_size {k.shape[2]} must be a multiple of page_size {thumbnail.page_size}"
            )
    if len(thumbnail.codes) not in (1, rows):
        raise ValueError(
            f"the thumbnail must have batch {rows} (of lengths) or 1, got {len(thumbnail.codes)}"
        )
    if thumbnail.num_tokens < room:
        raise ValueError(
            f"the thumbnail must have room for {room} tokens or more, which the cache of "
            f"{extent_of(k, block_table)} may hold, got a capacity of {thumbnail.num_tokens}"
        )
    for name, x in (
        ("k", k),
        ("starts", starts),
        ("lengths", lengths),
        ("block_table", block_table),
    ):
        if x is not None and x.device != thumbnail.codes.device:
            raise ValueError(
                f"{name} must be on the thumbnail's device {thumbnail.codes.device}, got {x.device}"
            )


def check_residual(thumbnail: Thumbnail, residual: Residual) -> None:
    shape = (*thumbnail.codes.shape[:3], thumbnail.head_dim)
    if residual.codes.shape != shape or residual.codes.dtype != torch.uint8:
        raise ValueError(
            f"residual must be the thumbnail's, uint8 {list(shape)}, got {residual.codes.dtype} "
            f"{list(residual.codes.shape)}"
        )
    if residual.unit != unit_of(thumbnail):
        raise ValueError(
            f"residual must be the thumbnail's, of unit {unit_of(thumbnail):g} (bits and coverage "
            f"set it), got {residual.unit:g}"
        )
    if residual.codes.device != thumbnail.codes.device:
        raise ValueError(
            f"residual must be on the thumbnail's device {thumbnail.codes.device}, got "
            f"{residual.codes.device}"
        )


def check_query(q: Tensor, thumbnail: Thumbnail, scale: float) -> None:
    batch, kv_heads = thumbnail.codes.shape[:2]
    if q.dim() != 3 or q.shape[2] != thumbnail.head_dim or q.shape[1] % kv_heads:
        raise ValueError(
            f"q must be [B, a multiple of {kv_heads} heads, {thumbnail.head_dim}], got "
            f"{list(q.shape)}"
        )
    if batch not in (1, len(q)):
        raise ValueError(f"the thumbnail must have batch {len(q)} (q's) or 1, got {batch}")
    if not isinstance(scale, (int, float)) or not math.isfinite(scale):
        raise ValueError(f"scale must be a finite number, got {scale!r}")


def check_thumbnail_backend(backend: str, x: Tensor, page_size: int) -> None:
    """x: [.., .., D], of the dtype and device that the kernel would read."""
    check_backend(backend, x, x[None])
    if backend == "triton" and not can_use_triton(page_size):
        raise ValueError(
            f"backend 'triton' takes page sizes that are powers of two up to "
            f"{MAX_TRITON_PAGE_SIZE}, got {page_size}; use backend 'torch'"
        )
