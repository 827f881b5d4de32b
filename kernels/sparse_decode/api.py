"""The one door to decode attention over pages: checks, then the backend that was asked for."""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Sequence
from typing import Literal, overload

import torch
from torch import Tensor

from sparse_eval.kernels.sparse_decode.reference import gather_blocks, sparse_decode_reference

BACKENDS = ("triton", "torch")
TRITON_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_TRITON_HEAD_DIM = 256


@overload
def sparse_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pages: Tensor | None,
    counts: Tensor | None,
    starts: Tensor | None,
    lengths: Tensor,
    *,
    page_size: int,
    scale: float,
    backend: str,
    block_table: Tensor | None = None,
    page_lse: Literal[False] = False,
) -> tuple[Tensor, Tensor]: ...
@overload
def sparse_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pages: Tensor | None,
    counts: Tensor | None,
    starts: Tensor | None,
    lengths: Tensor,
    *,
    page_size: int,
    scale: float,
    backend: str,
    block_table: Tensor | None = None,
    page_lse: Literal[True],
) -> tuple[Tensor, Tensor, Tensor]: ...
@overload
def sparse_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pages: Tensor | None,
    counts: Tensor | None,
    starts: Tensor | None,
    lengths: Tensor,
    *,
    page_size: int,
    scale: float,
    backend: str,
    block_table: Tensor | None = None,
    page_lse: bool,
) -> tuple[Tensor, ...]: ...
def sparse_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pages: Tensor | None,
    counts: Tensor | None,
    starts: Tensor | None,
    lengths: Tensor,
    *,
    page_size: int,
    scale: float,
    backend: str,
    block_table: Tensor | None = None,
    page_lse: bool = False,
) -> tuple[Tensor, ...]:
    """Attention of one query per row over the pages it selected.

    q: [B, H, D]. k, v: [B or 1, G, N, D], [B or 1, G, N, E] (1: every row reads the same cache),
    or with block_table [B or 1, blocks] int32 a pool [num_blocks, G, block_size, D or E] in any
    strides, block_size a multiple of page_size. pages: [B, S, K] int32, ascending, -1 = empty,
    S = G or H, counts: [B, S] int32 slots in use; both None = dense. starts: [B] int32 or
    None = 0. lengths: [B] int32. Page p of row b is [starts + p · page_size, …), cut at
    starts + lengths and at the cache's extent.
    Returns out [B, H, E] in q's dtype (0 where nothing was read) and lse [B, H], natural log
    (-inf there); with page_lse also [B, H, K] per slot of `pages` (dense: per page of the cache's
    extent), -inf for empty slots. Both in float32, float64 where q is.
    Raises ValueError on wrong shapes, types or values, and on a backend that cannot run here.
    """
    check_tensors(q, k, v, pages, counts, starts, lengths, block_table)
    check_numbers(k, page_size, scale, paged=block_table is not None)
    check_backend(backend, q, v)
    if backend == "triton":
        from sparse_eval.kernels.sparse_decode.launch import sparse_decode_triton

        out, lse, lse_pages = sparse_decode_triton(
            *(q, k, v, pages, counts, starts, lengths),
            page_size=page_size,
            scale=scale,
            block_table=block_table,
            page_lse=page_lse,
        )
    else:
        if block_table is not None:
            k, v = gather_blocks(k, block_table), gather_blocks(v, block_table)
        out, lse, lse_pages = sparse_decode_reference(
            *(q, k, v, pages, counts, starts, lengths),
            page_size=page_size,
            scale=scale,
            page_lse=page_lse,
        )
    return (out, lse) if lse_pages is None else (out, lse, lse_pages)


def check_tensors(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pages: Tensor | None,
    counts: Tensor | None,
    starts: Tensor | None,
    lengths: Tensor,
    block_table: Tensor | None,
) -> None:
    """Shapes, dtypes and devices; never a value, which would wait for the GPU."""
    if q.dim() != 3 or k.dim() != 4 or v.dim() != 4:
        raise ValueError(
            f"q must be [B, H, D], k and v 4-D, got {_shape(q)}, {_shape(k)}, {_shape(v)}"
        )
    (rows, heads, head_dim), kv_heads = q.shape, k.shape[1]
    if k.shape[:3] != v.shape[:3] or k.shape[3] != head_dim or 0 in (*k.shape, *v.shape):
        raise ValueError(
            f"k must be [.., .., N >= 1, D = {head_dim}] and v the same up to its head dim, "
            f"got {_shape(k)} and {_shape(v)}"
        )
    if heads % kv_heads or not heads:
        raise ValueError(f"query heads must be a multiple of KV heads ({kv_heads}), got {heads}")
    if not q.is_floating_point() or not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k, v must share a float dtype, got {q.dtype}, {k.dtype}, {v.dtype}")
    if block_table is None and k.shape[0] not in (1, rows):
        raise ValueError(f"k and v must have batch {rows} (q's) or 1, got {k.shape[0]}")
    if (pages is None) != (counts is None):
        raise ValueError("pages and counts go together: give both, or neither for dense attention")
    if not q.device == k.device == v.device:
        raise ValueError(f"k, v must be on q's device {q.device}, got {k.device}, {v.device}")
    lists = [(rows, kv_heads, None), (rows, heads, None)]
    slots = [tuple(pages.shape[:2]) if pages is not None else ()]
    check_integers(q.device, pages=(pages, lists), counts=(counts, slots))
    check_rows(rows, q.device, starts, lengths, block_table)


Shapes = Sequence[tuple[int | None, ...]]


def check_rows(
    rows: int,
    device: torch.device,
    starts: Tensor | None,
    lengths: Tensor,
    block_table: Tensor | None,
) -> None:
    check_integers(
        device,
        lengths=(lengths, [(rows,)]),
        starts=(starts, [(rows,)]),
        block_table=(block_table, [(rows, None), (1, None)]),
    )


def check_integers(device: torch.device, **given: tuple[Tensor | None, Shapes]) -> None:
    """Each tensor that is given is int32, of one of its shapes (None: any size), on the device."""
    for name, (x, shapes) in given.items():
        if x is None:
            continue
        if x.dtype != torch.int32 or not any(_fits(x, shape) for shape in shapes):
            wanted = " or ".join(str(list(shape)).replace("None", "any") for shape in shapes)
            raise ValueError(f"{name} must be int32 {wanted}, got {x.dtype} {_shape(x)}")
        if x.device != device:
            raise ValueError(f"{name} must be on the keys' device {device}, got {x.device}")


def check_numbers(k: Tensor, page_size: int, scale: float, *, paged: bool) -> None:
    if not isinstance(page_size, int) or isinstance(page_size, bool) or page_size < 1:
        raise ValueError(f"page_size must be an integer >= 1, got {page_size!r}")
    if paged and k.shape[2] % page_size:
        raise ValueError(f"block_size {k.shape[2]} must be a multiple of page_size {page_size}")
    if not isinstance(scale, (int, float)) or not math.isfinite(scale):
        raise ValueError(f"scale must be a finite number, got {scale!r}")


def check_backend(backend: str, q: Tensor, v: Tensor) -> None:
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    if backend == "torch":
        return
    if importlib.util.find_spec("triton") is None:
        raise ValueError("backend 'triton' needs the package triton, which is not installed")
    if q.dtype not in TRITON_DTYPES:
        accepted = ", ".join(str(d).removeprefix("torch.") for d in TRITON_DTYPES)
        raise ValueError(f"backend 'triton' takes {accepted}, got {q.dtype}")
    if max(q.shape[2], v.shape[3]) > MAX_TRITON_HEAD_DIM:
        raise ValueError(
            f"backend 'triton' takes head dims up to {MAX_TRITON_HEAD_DIM}, "
            f"got {q.shape[2]} (q, k) and {v.shape[3]} (v)"
        )
    if q.device.type == "cpu" and not _interpreted():
        raise ValueError(
            "backend 'triton' on CPU tensors needs TRITON_INTERPRET=1 in the environment when the "
            "process starts; or use backend 'torch'"
        )


def _interpreted() -> bool:
    """Whether the kernel runs in Triton's interpreter, which is settled when it is loaded."""
    if os.environ.get("TRITON_INTERPRET", "").lower() not in ("1", "true", "on"):
        return False
    from sparse_eval.kernels.sparse_decode.kernel import INTERPRETED

    return INTERPRETED


def _fits(x: Tensor, shape: tuple[int | None, ...]) -> bool:
    return x.dim() == len(shape) and all(
        want in (None, got) for want, got in zip(shape, x.shape, strict=True)
    )


def _shape(x: Tensor) -> list[int]:
    return list(x.shape)
