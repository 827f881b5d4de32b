"""The one door to a whole decode step of Quest: the parts' own checks, then the launches."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparse_eval.kernels.quest_select import quest_select
from sparse_eval.kernels.quest_select.api import check_select
from sparse_eval.kernels.sparse_decode import sparse_decode
from sparse_eval.kernels.sparse_decode.api import check_backend, check_numbers, check_tensors


class StepWorkspace(NamedTuple):
    """By which a step's kernels tell each other how far each list is; all 0 between steps."""

    flags: Tensor  # [B, G] int32
    keys: Tensor  # [B, G, pages, rounded up to a multiple of 16] uint32


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
    scales: Tensor | None = None,
    workspace: StepWorkspace | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Metadata of a page that just filled, selection, attention over it.

    Arguments as in quest_select and sparse_decode, whose checks apply. workspace: step_workspace's,
    for one step at a time: a step leaves it as it found it; None makes one, which costs a launch.
    Returns out [B, H, E], lse [B, H], pages [B, G, W], counts [B, G]. Nothing depends on a live
    length but values, so a CUDA graph that holds a step stays right while lengths, q, k and v
    change in place: call it once per new token.
    """
    rule: dict[str, Any] = {
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
        **rule,
    )
    check_tensors(q, k, v, None, None, starts, lengths, block_table)
    check_numbers(k, page_size, scale, paged=block_table is not None)
    check_backend(backend, q, v)
    check_workspace(workspace, mid, q)
    if backend == "triton":
        from sparse_eval.kernels.quest_step.launch import quest_step_triton

        return quest_step_triton(
            *(q, k, v, mid, half, starts, lengths),
            block_table=block_table,
            scales=scales,
            workspace=workspace,
            **rule,
        )
    pages, counts = quest_select(
        *(q, k, mid, half, starts, lengths),
        backend=backend,
        update=True,
        block_table=block_table,
        scales=scales,
        **rule,
    )
    out, lse = sparse_decode(
        *(q, k, v, pages, counts, starts, lengths),
        page_size=page_size,
        scale=scale,
        backend=backend,
        block_table=block_table,
    )
    return out, lse, pages, counts


def step_workspace(
    rows: int, kv_heads: int, num_pages: int, device: torch.device | str
) -> StepWorkspace:
    """num_pages: of the metadata's capacity."""
    width = -(-num_pages // 16) * 16
    return StepWorkspace(
        torch.zeros(rows, kv_heads, dtype=torch.int32, device=device),
        torch.zeros(rows, kv_heads, width, dtype=torch.uint32, device=device),
    )


def check_workspace(workspace: StepWorkspace | None, mid: Tensor, q: Tensor) -> None:
    if workspace is None:
        return
    wanted = step_workspace(len(q), mid.shape[1], mid.shape[2], "meta")
    for name, got, want in zip(StepWorkspace._fields, workspace, wanted, strict=True):
        if got.dtype != want.dtype or got.shape != want.shape or got.device != q.device:
            raise ValueError(
                f"workspace.{name} must be {want.dtype} {list(want.shape)} on {q.device} (see "
                f"step_workspace), got {got.dtype} {list(got.shape)} on {got.device}"
            )
