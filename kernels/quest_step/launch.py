"""Launch a step of Quest: score, choose, attend, merge, overlapping list by list.

Every size depends on shapes alone, never on a live length, so a step can be captured in a CUDA
graph and replayed at other lengths.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
from torch import Tensor

from sparse_eval.kernels.quest_select.launch import (
    Rule,
    ScorePlan,
    batch_strides,
    block_pages_of,
    launch_choose,
    launch_score,
)
from sparse_eval.kernels.quest_step.api import StepWorkspace, step_workspace
from sparse_eval.kernels.quest_step.kernel import step_attend_kernel
from sparse_eval.kernels.sparse_decode.kernel import INTERPRETED
from sparse_eval.kernels.sparse_decode.launch import (
    TILE_BYTES,
    Plan,
    can_overlap_launches,
    is_whole,
    launch_merge,
    multiprocessors,
    plan_of,
    splits_of,
)
from sparse_eval.kernels.sparse_decode.reference import extent_of


@dataclass(frozen=True)
class StepPlan:
    """chooses: a list's pages by a kernel of their own, else by every split of its attention."""

    score: ScorePlan
    attend: Plan
    num_splits: int
    chooses: bool


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
    block_table: Tensor | None,
    scales: Tensor | None = None,
    workspace: StepWorkspace | None,
    plan: StepPlan | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Arguments and results as in api.quest_step, which checks them."""
    (rows, heads, d), e, kv_heads = q.shape, v.shape[3], k.shape[1]
    lists, num_pages, group_size = rows * kv_heads, mid.shape[2], heads // kv_heads
    rule = Rule(page_size, budget, sink_pages, local_pages)
    block_d, block_e = (max(16, triton.next_power_of_2(x)) for x in (d, e))
    token_bytes = max(block_d, block_e) * q.element_size()
    plan = plan or step_plan_of(
        *(lists, num_pages, rule.width(num_pages) * page_size, page_size, token_bytes, q.device),
        in_8_bits=scales is not None,
    )
    splits = plan.num_splits
    table = None if block_table is None else block_table.expand(rows, -1).contiguous()
    starts = None if starts is None else starts.contiguous()
    lengths = lengths.contiguous()
    if workspace is None:
        workspace = step_workspace(rows, kv_heads, num_pages, q.device)
    flags, keys = workspace
    launch_score(
        *(q, k, mid, half, starts, lengths, keys, plan.score),
        page_size=page_size,
        group=group,
        scale=scale,
        update=True,
        block_table=table,
        scales=scales,
    )
    if plan.chooses:
        pages, counts = launch_choose(
            *(keys, num_pages, starts, lengths, extent_of(k, table), rule),
            flags=flags,
        )
    else:
        pages = lengths.new_empty(rows, kv_heads, rule.width(num_pages))
        counts = lengths.new_empty(rows, kv_heads)

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(rows, heads, *shape, dtype=dtype, device=q.device)

    acc, m, l = new(splits, e), new(splits), new(splits)  # noqa: E741
    # The interpreter's own float32 -> bfloat16 truncates.
    out, lse = new(e, dtype=torch.float32 if INTERPRETED else q.dtype), new()
    num_tokens = extent_of(k, table)
    pdl = can_overlap_launches(q.device)
    with torch.cuda.device_of(q):
        step_attend_kernel[(lists * splits,)](
            *(q, k, v, keys, pages, counts, starts, lengths, table, acc, m, l, flags),
            *(float(scale), num_tokens, *rule.numbers(num_pages), splits),
            *(kv_heads, group_size, keys.stride(1)),
            *(0 if table is None else table.shape[1], *q.stride()),
            *batch_strides(k, table),
            *batch_strides(v, table),
            D=d,
            E=e,
            PAGE_SIZE=page_size,
            BLOCK_SIZE=1 if table is None else k.shape[2],
            WHOLE=is_whole(pages, starts, table, k, page_size, plan.attend.block_t),
            CHOOSE=not plan.chooses,
            P_UNIT=2.0**15 if q.dtype == torch.float16 else 1.0,
            INTERPRET=INTERPRETED,
            PDL=pdl,
            BLOCK_M=max(16, triton.next_power_of_2(group_size)),
            BLOCK_T=plan.attend.block_t,
            BLOCK_D=block_d,
            BLOCK_E=block_e,
            BLOCK_PAGES=1 if plan.chooses else block_pages_of(num_pages),
            launch_pdl=pdl,
            num_warps=plan.attend.num_warps,
            num_stages=plan.attend.num_stages,
            enable_fp_fusion=True,
        )
    launch_merge(
        *(acc, m, l, out, lse),
        flags=flags,
        keys=keys,
        heads_per_list=group_size,
    )
    return out.to(q.dtype), lse, pages, counts


def step_plan_of(
    lists: int,
    num_pages: int,
    capacity: int,
    page_size: int,
    token_bytes: int,
    device: torch.device,
    *,
    in_8_bits: bool = False,
) -> StepPlan:
    """By shape, measured on one H200 (docs/performance.md). capacity: tokens a list may read.

    Where every split chooses, a launch and a wait are saved; many splits that choose among many
    pages cost more than that. Many lists with much to score end unevenly: more and smaller programs
    of attention even that out. Where a program scores one tile at most, room for a second would
    only be taken from attention, but not in 8 bits."""
    tiles, sms = lists * triton.cdiv(num_pages, 64), multiprocessors(device)
    is_small = tiles + lists <= sms  # a program scores one tile, or updates one page
    is_large = tiles > 12 * sms and (lists > 32 or in_8_bits)
    chooses = num_pages > 2048 or (num_pages > 1024 and lists > 32)
    is_long = num_pages > 1024 and not chooses
    attend = plan_of(lists, page_size, token_bytes, is_sparse=True)
    if page_size == 64:
        is_wide = lists >= 16 and not (is_small or is_large) and (in_8_bits or is_long)
        tile = min(64 if is_wide else 32, TILE_BYTES // token_bytes)
        attend = replace(attend, block_t=max(16, tile))
    is_uneven = lists > 32 and num_pages >= 1024 and attend.num_warps >= 4 and attend.block_t < 64
    splits = splits_of(
        *(lists, capacity, attend.block_t, device),
        programs=attend.programs * (2 if chooses or is_uneven else 1),
        least=64 if chooses else max(128, 4 * page_size if is_long else 0),
    )
    programs = 2 if is_large or (tiles <= sms and not is_small) else 1
    stages = 4 if in_8_bits else 2 if is_small else 3
    return StepPlan(ScorePlan(64, programs * sms, 4, stages), attend, splits, chooses)
