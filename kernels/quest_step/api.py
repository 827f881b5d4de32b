"""The one door to a whole decode step of Quest: the parts' own checks, then the launches."""

from __future__ import annotations

from torch import Tensor

from sparse_eval.kernels.quest_select import quest_select
from sparse_eval.kernels.sparse_decode import sparse_decode


def quest_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Metadata of a page that just filled, selection, attention over it.

    Arguments as in quest_select and sparse_decode, whose checks apply. Returns out [B, H, E],
    lse [B, H], pages [B, G, W], counts [B, G]. Nothing depends on a live length but values, so a
    CUDA graph that holds a step stays right while lengths, q, k and v change in place: call it once
    per new token. On the triton backend every launch takes its place while the one before it runs.
    """
    pages, counts = quest_select(
        *(q, k, mid, half, starts, lengths),
        page_size=page_size,
        budget=budget,
        sink_pages=sink_pages,
        local_pages=local_pages,
        group=group,
        scale=scale,
        backend=backend,
        update=True,
        block_table=block_table,
    )
    out, lse = sparse_decode(
        *(q, k, v, pages, counts, starts, lengths),
        page_size=page_size,
        scale=scale,
        backend=backend,
        block_table=block_table,
        chained=True,
    )
    return out, lse, pages, counts
