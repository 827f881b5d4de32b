"""Launch a step of Quest: one launch, sizes that depend on shapes alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from sparse_eval.kernels.quest_select.launch import batch_strides, constants, strides_of
from sparse_eval.kernels.quest_step.kernel import step_kernel
from sparse_eval.kernels.sparse_decode.kernel import INTERPRETED
from sparse_eval.kernels.sparse_decode.launch import multiprocessors

MAX_SPLITS = 32
MERGE_VALUES = 4096  # floats of a merge held at once


@dataclass(frozen=True)
class StepPlan:
    """Tiles of a step. block_p: pages a program scores, block_t: tokens per tile of attention,
    num_splits: programs that attend one list."""

    block_p: int
    block_t: int
    num_splits: int
    num_warps: int = 4
    num_stages: int = 3


def plan_of(
    lists: int, width: int, page_size: int, num_pages: int, device: torch.device
) -> StepPlan:
    """By shape: about as many programs as the device holds at once."""
    block_t = 64
    tiles = triton.cdiv(width * page_size, block_t)
    splits = max(1, min(tiles, MAX_SPLITS, 16, triton.cdiv(4 * multiprocessors(device), lists)))
    blocks = max(1, min(num_pages // 16, triton.cdiv(multiprocessors(device), lists)))
    block_p = max(16, min(64, triton.next_power_of_2(triton.cdiv(num_pages, blocks))))
    return StepPlan(block_p, block_t, splits)


@dataclass(frozen=True)
class Scratch:
    """What a step writes on its way. counters: zeros before and after every step."""

    counters: Tensor
    scores_BGP: Tensor

    @staticmethod
    def of(rows: int, num_kv_heads: int, num_pages: int, device: torch.device) -> Scratch:
        lists = rows * num_kv_heads
        return Scratch(
            torch.zeros(2 + 3 * lists, dtype=torch.int32, device=device),
            torch.empty(rows, num_kv_heads, num_pages, dtype=torch.float32, device=device),
        )


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
    scratch: Scratch,
    block_table: Tensor | None = None,
    plan: StepPlan | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Arguments and results as in api.quest_step, which checks them."""
    (rows, heads, _), e = q.shape, v.shape[3]
    kv_heads, num_pages = mid.shape[1:3]
    lists, group_size = rows * kv_heads, heads // kv_heads
    width = min(triton.cdiv(budget, page_size), num_pages)
    plan = plan or plan_of(lists, width, page_size, num_pages, q.device)
    num_blocks = triton.cdiv(num_pages, plan.block_p)

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(rows, *shape, dtype=dtype, device=q.device)

    pages = new(kv_heads, width, dtype=torch.int32)
    counts = new(kv_heads, dtype=torch.int32)
    acc = new(heads, plan.num_splits, e)
    m, l = new(heads, plan.num_splits), new(heads, plan.num_splits)  # noqa: E741
    out, lse = new(heads, e, dtype=torch.float32 if INTERPRETED else q.dtype), new(heads)
    tickets = scratch.counters[:2]
    arrived, gate, merged = scratch.counters[2:].view(3, -1)
    block_splits = triton.next_power_of_2(plan.num_splits)
    block_group = triton.next_power_of_2(group_size)
    block_e = max(16, triton.next_power_of_2(e))
    table = None if block_table is None else block_table.expand(rows, -1)
    num_tokens = k.shape[2] * (1 if table is None else table.shape[1])
    with torch.cuda.device_of(q):
        step_kernel[(lists * (num_blocks + plan.num_splits),)](
            *(q, k, v, starts, lengths, table, mid, half, scratch.scores_BGP, pages, counts),
            *(acc, m, l, out, lse, tickets, arrived, gate, merged),
            *(float(scale), num_tokens, num_pages, width, budget // page_size, budget),
            *(sink_pages, local_pages, num_blocks, plan.num_splits, lists, kv_heads, group_size),
            *strides_of(q, k, mid, table),
            *batch_strides(v, table),
            E=e,
            P_UNIT=2.0**15 if q.dtype == torch.float16 else 1.0,
            BLOCK_E=block_e,
            BLOCK_P=plan.block_p,
            BLOCK_T=plan.block_t,
            BLOCK_SPLITS=block_splits,
            BLOCK_GROUP=block_group,
            CHUNK_E=max(4, min(block_e, MERGE_VALUES // (block_splits * block_group))),
            **constants(q, k, page_size, num_pages, table, group, update=True),
            num_warps=plan.num_warps,
            num_stages=plan.num_stages,
        )
    return out.to(q.dtype), lse, pages, counts
