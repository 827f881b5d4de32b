"""Launch a step of Quest: score, choose, attend, merge; each takes its place before its turn."""

from __future__ import annotations

from torch import Tensor

from sparse_eval.kernels.quest_select.launch import quest_select_triton
from sparse_eval.kernels.sparse_decode.launch import sparse_decode_triton


def quest_step_triton(
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
    block_table: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Arguments and results as in api.quest_step, which checks them."""
    pages, counts = quest_select_triton(
        *(q, k, mid, half, starts, lengths),
        page_size=page_size,
        budget=budget,
        sink_pages=sink_pages,
        local_pages=local_pages,
        group=group,
        scale=scale,
        update=True,
        block_table=block_table,
    )
    out, lse, _ = sparse_decode_triton(
        *(q, k, v, pages, counts, starts, lengths),
        page_size=page_size,
        scale=scale,
        block_table=block_table,
        chained=True,
    )
    return out, lse, pages, counts
