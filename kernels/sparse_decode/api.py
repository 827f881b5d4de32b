"""The one door to decode attention over pages: checks, then the backend that was asked for."""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import Tensor

from sparse_eval.kernels.sparse_decode.reference import sparse_decode_reference

BACKENDS = ("triton", "torch")


@overload
def sparse_decode(
    q: Tensor, k: Tensor, v: Tensor, pages: Tensor | None, counts: Tensor | None,
    starts: Tensor | None, lengths: Tensor, *, page_size: int, scale: float, backend: str,
    block_table: Tensor | None = None, page_lse: Literal[False] = False,
) -> tuple[Tensor, Tensor]: ...
@overload
def sparse_decode(
    q: Tensor, k: Tensor, v: Tensor, pages: Tensor | None, counts: Tensor | None,
    starts: Tensor | None, lengths: Tensor, *, page_size: int, scale: float, backend: str,
    block_table: Tensor | None = None, page_lse: Literal[True],
) -> tuple[Tensor, Tensor, Tensor]: ...
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
    or with block_table [B, blocks] int32 a pool [num_blocks, G, block_size, D or E] in any strides,
    block_size a multiple of page_size. pages: [B, S, K] int32, ascending, -1 = empty, S = G or H,
    counts: [B, S] int32; both None = dense. starts: [B] int32 or None = 0. lengths: [B] int32.
    Returns out [B, H, E] in q's dtype (0 where nothing was read) and lse [B, H] float32, natural
    log (-inf there); with page_lse also [B, H, K] per slot of `pages` (dense: per page of the
    cache's extent), -inf for empty slots. Raises ValueError on shapes or an unusable backend.
    """
    ...
