"""The one door to Quest's selection: checks, then the backend that was asked for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparse_eval.kernels.quest_select.reference import (
    quest_select_reference,
    update_metadata_reference,
)
from sparse_eval.kernels.sparse_decode.api import (
    TRITON_DTYPES,
    check_backend,
    check_numbers,
    check_rows,
)
from sparse_eval.kernels.sparse_decode.reference import extent_of, live_lengths

GROUP_RULES = ("max", "sum")
MAX_PAGES = 2**15 - 1
"""Pages of a row that the triton backend can rank: one program holds all their scores."""


def can_select(group: str, num_pages: int) -> bool:
    """Whether the triton backend has this group rule and room for this many pages."""
    return group in GROUP_RULES and num_pages <= MAX_PAGES


def quest_select(
    q: Tensor,
    k: Tensor,
    mid: Tensor,
    half: Tensor,
    starts: Tensor | None,
    lengths: Tensor,
    *,
    page_size: int,
    budget: int,
    sink_pages: int,
    local_pages: int,
    group: str,
    scale: float,
    backend: str,
    update: bool = False,
    block_table: Tensor | None = None,
    scales: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The pages each KV head reads: the forced ones and those with the best bound.

    q: [B, H, D]. mid, half: [B or 1, G, P, D], the middle and half-width of each full page's key
    box; P pages of capacity; in 8 bits (int8 and uint8) with scales [B or 1, G, P, 2] float32, by
    which each page's mid and half are multiplied. k, starts, lengths, block_table as in
    sparse_decode: a length counts as far as the cache and P pages reach. k is read only with
    `update`, which first writes the metadata of a page that has just filled. budget: tokens; a row
    of no more is read whole, others read budget // page_size pages. group: a page's score is the
    max or the sum over its group's heads of scale · (q·mid + |q|·half).
    Returns pages [B, G, W] int32, ascending, -1 = empty, W = min(⌈budget / page_size⌉, P), and
    counts [B, G] int32. Waits for nothing. Raises ValueError on wrong arguments.
    """
    options: dict[str, Any] = {
        "page_size": page_size,
        "budget": budget,
        "sink_pages": sink_pages,
        "local_pages": local_pages,
        "group": group,
        "scale": scale,
    }
    check_select(
        *(q, k, mid, half, starts, lengths),
        backend=backend,
        block_table=block_table,
        scales=scales,
        **options,
    )
    if backend == "torch":
        if update:
            update_metadata_reference(k, mid, half, scales, starts, lengths, page_size, block_table)
        live = live_lengths(lengths, starts, extent_of(k, block_table))
        return quest_select_reference(q, mid, half, scales, live, **options)
    from sparse_eval.kernels.quest_select.launch import quest_select_triton

    return quest_select_triton(
        *(q, k, mid, half, starts, lengths),
        update=update,
        block_table=block_table,
        scales=scales,
        **options,
    )


def update_metadata(
    k: Tensor,
    mid: Tensor,
    half: Tensor,
    starts: Tensor | None,
    lengths: Tensor,
    *,
    page_size: int,
    backend: str,
    block_table: Tensor | None = None,
    scales: Tensor | None = None,
) -> None:
    """Writes the metadata of each row's newest full page in place; rows without one are left.

    Arguments as in quest_select. [mid - half, mid + half] covers every key of the page: half is
    rounded up from the rounded mid."""
    check_metadata(k, mid, half, scales, page_size, paged=block_table is not None)
    rows = len(lengths) if lengths.dim() else 0
    check_rows(rows, k.device, starts, lengths, block_table)
    check_batches(rows, k, mid, paged=block_table is not None)
    check_backend(backend, k[0], k)
    check_metadata_dtype(backend, mid)
    if backend == "torch":
        update_metadata_reference(k, mid, half, scales, starts, lengths, page_size, block_table)
        return
    from sparse_eval.kernels.quest_select.launch import update_metadata_triton

    update_metadata_triton(
        *(k, mid, half, starts, lengths),
        page_size=page_size,
        block_table=block_table,
        scales=scales,
    )


def check_select(
    q: Tensor,
    k: Tensor,
    mid: Tensor,
    half: Tensor,
    starts: Tensor | None,
    lengths: Tensor,
    *,
    page_size: int,
    budget: int,
    sink_pages: int,
    local_pages: int,
    group: str,
    scale: float,
    backend: str,
    block_table: Tensor | None = None,
    scales: Tensor | None = None,
) -> None:
    check_metadata(k, mid, half, scales, page_size, paged=block_table is not None)
    check_numbers(k, page_size, scale, paged=block_table is not None)
    if group not in GROUP_RULES:
        raise ValueError(f"group must be one of {', '.join(GROUP_RULES)}, got {group!r}")
    for name, value, least in (
        ("sink_pages", sink_pages, 0),
        ("local_pages", local_pages, 1),
        ("budget", budget, (sink_pages + local_pages) * page_size),
    ):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"{name} must be an integer >= {least}, got {value!r}")
    if q.dim() != 3 or q.shape[2] != mid.shape[3] or q.shape[1] % mid.shape[1]:
        raise ValueError(
            f"q must be [B, a multiple of {mid.shape[1]} heads, {mid.shape[3]}], got "
            f"{list(q.shape)}"
        )
    check_rows(len(q), k.device, starts, lengths, block_table)
    check_batches(len(q), k, mid, paged=block_table is not None)
    check_backend(backend, q, k)
    check_metadata_dtype(backend, mid)
    if backend == "triton" and mid.shape[2] > MAX_PAGES:
        raise ValueError(
            f"backend 'triton' ranks up to {MAX_PAGES} pages a row, got {mid.shape[2]}; use larger "
            "pages or backend 'torch'"
        )


def check_batches(rows: int, k: Tensor, mid: Tensor, *, paged: bool) -> None:
    batches = {"mid and half": len(mid)} | ({} if paged else {"k": len(k)})
    for name, batch in batches.items():
        if batch not in (1, rows):
            raise ValueError(f"{name} must have batch {rows} (the rows') or 1, got {batch}")


def check_metadata_dtype(backend: str, mid: Tensor) -> None:
    if backend == "triton" and mid.dtype not in (*TRITON_DTYPES, torch.int8):
        raise ValueError(f"backend 'triton' takes metadata of up to 32 bits, got {mid.dtype}")


def check_metadata(
    k: Tensor,
    mid: Tensor,
    half: Tensor,
    scales: Tensor | None,
    page_size: int,
    *,
    paged: bool,
) -> None:
    if k.dim() != 4 or not k.is_floating_point():
        raise ValueError(f"k must be 4-D and of a float dtype, got {k.dtype} {list(k.shape)}")
    check_numbers(k, page_size, 1.0, paged=paged)
    wanted = (k.shape[1], k.shape[3])
    if mid.dim() != 4 or mid.shape != half.shape or (mid.shape[1], mid.shape[3]) != wanted:
        raise ValueError(
            f"mid and half must both be [B or 1, {wanted[0]}, pages, {wanted[1]}], got "
            f"{list(mid.shape)} and {list(half.shape)}"
        )
    if scales is not None:
        if (mid.dtype, half.dtype, scales.dtype) != (torch.int8, torch.uint8, torch.float32):
            raise ValueError(
                "with scales mid, half and scales must be int8, uint8 and float32, got "
                f"{mid.dtype}, {half.dtype}, {scales.dtype}"
            )
        if scales.shape != (*mid.shape[:3], 2):
            raise ValueError(f"scales must be {[*mid.shape[:3], 2]}, got {list(scales.shape)}")
    elif mid.dtype != half.dtype or not mid.is_floating_point():
        raise ValueError(
            f"mid and half must share a float dtype (or have scales), got {mid.dtype}, {half.dtype}"
        )
    if not all(x is None or x.is_contiguous() for x in (mid, half, scales)):
        raise ValueError("mid, half and scales must be contiguous: they are written in place")
