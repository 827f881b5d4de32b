"""The one door to a step over thumbnails: top-δ selection, attention, and both with extension.

Source of the method: Faster Flash Decoding, a write-up of 2-bit key thumbnails and top-δ selection.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from sparse_eval.kernels.ffd.reference import ffd_select_reference, refined_keys
from sparse_eval.kernels.sparse_decode import sparse_decode
from sparse_eval.kernels.sparse_decode.api import check_backend, check_numbers, check_tensors
from sparse_eval.kernels.sparse_decode.reference import (
    extent_of,
    gather_blocks,
    live_lengths,
    sparse_decode_reference,
)
from sparse_eval.kernels.thumbnail import (
    Residual,
    Thumbnail,
    extend_thumbnail,
    score_error_bound,
    thumbnail_scores,
)
from sparse_eval.kernels.thumbnail.api import (
    check_cache,
    check_keys,
    check_query,
    check_residual,
    check_thumbnail_backend,
)
from sparse_eval.kernels.thumbnail.reference import per_token

MAX_DELTA = torch.finfo(torch.float32).max
PSEUDO_MAX = ("thumbnail", "exact")
MIN_TILE = 16
"""Tokens that a product over a tile takes at least; under rule channel a tile is one page's."""


def ffd_select(
    q: Tensor,
    k: Tensor,
    thumbnail: Thumbnail,
    starts: Tensor | None,
    lengths: Tensor,
    *,
    delta: float,
    sink_pages: int,
    local_pages: int,
    scale: float,
    backend: str,
    pseudo_max: str = "thumbnail",
    block_table: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The forced pages and every full page with a token within delta of the pseudo-max.

    q: [B, H, D]; k, starts, lengths, block_table as in sparse_decode. Per query head: the
    pseudo-max is the largest score of the sink and local pages, at most the row's own maximum, so
    that the set can only grow; a token is kept when its score is no lower than pseudo-max - delta
    (in units of scale · q·k); a page is read by a KV head when a head of its group keeps a token.
    pseudo_max: "thumbnail", from thumbnail scores of full pages (no such page: all is read); or
    "exact", from the keys k (read for it alone), each token's score raised by its error bound:
    then every token whose exact score is within delta of the exact maximum is read, also where
    the kernel's or float32's rounding is against it.
    A length beyond the cache's extent counts as its end. NaN scores keep no page and
    are no pseudo-max; keys and queries with NaN differ by backend (docs/kernels.md).
    Returns pages [B, G, P] int32, ascending, -1 = empty, P pages of capacity, counts [B, G] int32.
    Waits for nothing. Raises ValueError on wrong arguments.
    """
    check_select(q, k, thumbnail, starts, lengths, scale, backend, block_table)
    check_rule(delta, sink_pages, local_pages, pseudo_max)
    if backend == "triton":
        from sparse_eval.kernels.ffd.launch import ffd_select_triton

        return ffd_select_triton(
            *(q, k, thumbnail, starts, lengths),
            delta=delta,
            sink_pages=sink_pages,
            local_pages=local_pages,
            scale=scale,
            pseudo_max=pseudo_max,
            block_table=block_table,
        )
    lengths = live_lengths(lengths, starts, extent_of(k, block_table))
    score = thumbnail_scores(q, thumbnail, scale)
    slack = exact = None
    if pseudo_max == "exact":
        slack = score_error_bound(q, thumbnail, scale)
        if block_table is not None:
            k = gather_blocks(k, block_table)
        if starts is not None:
            token = starts.long()[:, None] + torch.arange(k.shape[2], device=k.device)
            token = token.clamp_max(k.shape[2] - 1)[:, None, :, None]
            k = k.expand(len(q), -1, -1, -1)
            k = k.gather(2, token.expand(-1, k.shape[1], -1, k.shape[3]))
        exact = scale * per_token(q, k.double())
    return ffd_select_reference(
        *(score, slack, exact, lengths),
        page_size=thumbnail.page_size,
        num_kv_heads=thumbnail.codes.shape[1],
        delta=delta,
        sink_pages=sink_pages,
        local_pages=local_pages,
    )


def lists_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pages: Tensor,
    counts: Tensor,
    starts: Tensor | None,
    lengths: Tensor,
    *,
    page_size: int,
    scale: float,
    backend: str,
    block_table: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """sparse_decode for lists of very different lengths: pages [B, G, K], counts [B, G].

    Work is shared out by the counts, where sparse_decode cuts every list alike. All else as
    there. Returns out [B, H, E], lse [B, H]."""
    check_tensors(q, k, v, pages, counts, starts, lengths, block_table)
    check_numbers(k, page_size, scale, paged=block_table is not None)
    check_backend(backend, q, v)
    check_lists(k, pages)
    if backend == "torch":
        return sparse_decode(
            *(q, k, v, pages, counts, starts, lengths),
            page_size=page_size,
            scale=scale,
            backend=backend,
            block_table=block_table,
        )
    from sparse_eval.kernels.ffd.launch import lists_decode_triton

    return lists_decode_triton(
        *(q, k, v, None, None, pages, counts, starts, lengths),
        page_size=page_size,
        scale=scale,
        block_table=block_table,
    )


def residual_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    thumbnail: Thumbnail,
    residual: Residual,
    pages: Tensor,
    counts: Tensor,
    starts: Tensor | None,
    lengths: Tensor,
    *,
    scale: float,
    backend: str,
    block_table: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """sparse_decode with k_quant + k_res in place of the keys of full pages.

    pages [B, G, K], counts [B, G] and all else as in sparse_decode; a list that holds the page that
    is not full must end with it, and reads its exact keys. Returns out [B, H, E], lse [B, H]."""
    check_query(q, thumbnail, scale)
    check_keys(k, thumbnail)
    check_thumbnail_backend(backend, q, thumbnail.page_size)
    check_refined(thumbnail, residual, backend)
    check_lists(k, pages)
    page_size = thumbnail.page_size
    check_tensors(q, k, v, pages, counts, starts, lengths, block_table)
    check_numbers(k, page_size, scale, paged=block_table is not None)
    full = extent_of(k, block_table) // page_size * page_size
    check_cache(thumbnail, k, starts, lengths, block_table, full)
    if backend == "triton":
        from sparse_eval.kernels.ffd.launch import lists_decode_triton

        return lists_decode_triton(
            *(q, k, v, thumbnail, residual, pages, counts, starts, lengths),
            page_size=page_size,
            scale=scale,
            block_table=block_table,
        )
    if block_table is not None:
        k, v = gather_blocks(k, block_table), gather_blocks(v, block_table)
    refined = refined_keys(k, thumbnail, residual, starts, lengths)
    values = v.to(refined.dtype).expand(len(refined), -1, -1, -1)
    out, lse, _ = sparse_decode_reference(
        *(q.to(refined.dtype), refined, values, pages, counts, starts, lengths),
        page_size=page_size,
        scale=scale,
    )
    return out.to(q.dtype), lse


def ffd_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    thumbnail: Thumbnail,
    residual: Residual | None,
    starts: Tensor | None,
    lengths: Tensor,
    *,
    delta: float,
    sink_pages: int,
    local_pages: int,
    scale: float,
    backend: str,
    pseudo_max: str = "thumbnail",
    block_table: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A decode step for one new token: pack a page that just filled, select, attend.

    Attends with exact keys, or with k_quant + k_res where a residual is given. Arguments as in
    ffd_select and residual_decode. Returns out [B, H, E], lse [B, H], pages [B, G, P], counts
    [B, G]. Nothing depends on a live length but values: a CUDA graph that holds a step stays right
    while lengths, q, k and v change in place."""
    check_select(q, k, thumbnail, starts, lengths, scale, backend, block_table)
    check_rule(delta, sink_pages, local_pages, pseudo_max)
    check_tensors(q, k, v, None, None, starts, lengths, block_table)
    check_numbers(k, thumbnail.page_size, scale, paged=block_table is not None)
    check_backend(backend, q, v)
    if residual is not None:
        check_refined(thumbnail, residual, backend)
    rule: dict[str, Any] = {
        "delta": delta,
        "sink_pages": sink_pages,
        "local_pages": local_pages,
        "pseudo_max": pseudo_max,
    }
    if backend == "triton":
        from sparse_eval.kernels.ffd.launch import ffd_step_triton

        return ffd_step_triton(
            *(q, k, v, thumbnail, residual, starts, lengths),
            **rule,
            scale=scale,
            block_table=block_table,
        )
    where: dict[str, Any] = {"block_table": block_table, "backend": backend}
    extend_thumbnail(thumbnail, k, starts, lengths, residual=residual, fresh=True, **where)
    where["scale"] = scale
    pages, counts = ffd_select(q, k, thumbnail, starts, lengths, **rule, **where)
    lists = (pages, counts, starts, lengths)
    if residual is None:
        out, lse = lists_decode(q, k, v, *lists, page_size=thumbnail.page_size, **where)
    else:
        out, lse = residual_decode(q, k, v, thumbnail, residual, *lists, **where)
    return out, lse, pages, counts


def check_select(
    q: Tensor,
    k: Tensor,
    thumbnail: Thumbnail,
    starts: Tensor | None,
    lengths: Tensor,
    scale: float,
    backend: str,
    block_table: Tensor | None,
) -> None:
    check_query(q, thumbnail, scale)
    check_keys(k, thumbnail)
    if lengths.dtype != torch.int32 or lengths.shape != q.shape[:1]:
        raise ValueError(
            f"lengths must be int32 [{len(q)}], got {lengths.dtype} {list(lengths.shape)}"
        )
    check_cache(thumbnail, k, starts, lengths, block_table, extent_of(k, block_table))
    check_thumbnail_backend(backend, q, thumbnail.page_size)


def check_lists(k: Tensor, pages: Tensor | None) -> None:
    got = None if pages is None else list(pages.shape)
    if got is None or len(got) != 3 or k.dim() != 4 or got[1] != k.shape[1]:
        raise ValueError(f"pages must be [B, G, K] with k's KV heads, got {got}")


def check_refined(thumbnail: Thumbnail, residual: Residual, backend: str) -> None:
    if backend == "triton" and thumbnail.rule == "channel" and thumbnail.page_size < MIN_TILE:
        raise ValueError(
            f"backend 'triton' attends by residual under rule channel with pages of {MIN_TILE} "
            f"tokens or more, got {thumbnail.page_size}; use backend 'torch'"
        )
    check_residual(thumbnail, residual)


def check_rule(delta: float, sink_pages: int, local_pages: int, pseudo_max: str) -> None:
    is_number = isinstance(delta, (int, float)) and not isinstance(delta, bool)
    if not is_number or not delta >= 0 or (delta > MAX_DELTA and delta != math.inf):
        raise ValueError(f"delta must be a number >= 0 or inf, got {delta!r}")
    for name, value, least in (("sink_pages", sink_pages, 0), ("local_pages", local_pages, 1)):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"{name} must be an integer >= {least}, got {value!r}")
    if pseudo_max not in PSEUDO_MAX:
        raise ValueError(f"pseudo_max must be one of {', '.join(PSEUDO_MAX)}, got {pseudo_max!r}")
