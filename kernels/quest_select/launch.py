"""Launch Quest's select: sizes that depend on shapes alone; score, then choose."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
from torch import Tensor

from sparse_eval.kernels.quest_select.kernel import choose_kernel, score_kernel, update_kernel
from sparse_eval.kernels.sparse_decode.kernel import INTERPRETED
from sparse_eval.kernels.sparse_decode.launch import can_overlap_launches
from sparse_eval.kernels.sparse_decode.reference import extent_of

SHARED_BYTES = 220 * 1024  # of a program, on compute capability 9


def quest_select_triton(
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
    update: bool = False,
    block_table: Tensor | None = None,
    scales: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Arguments and results as in api.quest_select, which checks them."""
    plan = ScorePlan(64, None, 4, 2)
    keys = new_keys(len(q), mid.shape[1], mid.shape[2], q.device)
    launch_score(
        *(q, k, mid, half, starts, lengths, keys, plan),
        page_size=page_size,
        group=group,
        scale=scale,
        update=update,
        block_table=block_table,
        scales=scales,
    )
    rule = Rule(page_size, budget, sink_pages, local_pages)
    return launch_choose(keys, mid.shape[2], starts, lengths, extent_of(k, block_table), rule)


@dataclass(frozen=True)
class Rule:
    """What choosing needs to know; all in tokens or pages."""

    page_size: int
    budget: int
    sink_pages: int
    local_pages: int

    def width(self, num_pages: int) -> int:
        return min(triton.cdiv(self.budget, self.page_size), num_pages)

    def numbers(self, num_pages: int) -> tuple[int, ...]:
        """The kernels' `rule`."""
        selected = self.budget // self.page_size
        forced = (self.sink_pages, self.local_pages)
        return (num_pages, self.width(num_pages), selected, self.budget, *forced)


@dataclass(frozen=True)
class ScorePlan:
    """block_p: pages per tile; num_programs: at most, None = one a tile; num_stages: one more than
    tiles in flight."""

    block_p: int
    num_programs: int | None
    num_warps: int
    num_stages: int


def launch_score(
    q: Tensor,
    k: Tensor,
    mid: Tensor,
    half: Tensor,
    starts: Tensor | None,
    lengths: Tensor,
    keys: Tensor,
    plan: ScorePlan,
    *,
    page_size: int,
    group: str,
    scale: float,
    update: bool,
    block_table: Tensor | None,
    scales: Tensor | None = None,
) -> None:
    """Fills keys (new_keys), of full pages only."""
    rows, kv_heads, num_pages = len(q), mid.shape[1], mid.shape[2]
    assert mid.is_contiguous() and half.is_contiguous()
    starts, lengths, block_table = dense(starts), lengths.contiguous(), dense(block_table)
    block_m = max(16, triton.next_power_of_2(q.shape[1] // kv_heads))
    block_d = max(16, triton.next_power_of_2(q.shape[2]))
    plan = fitting(plan, block_m, block_d, q.element_size(), mid.element_size())
    lists, tiles = rows * kv_heads, triton.cdiv(num_pages, plan.block_p)
    programs = lists * (tiles + update)
    pdl = can_overlap_launches(q.device)
    with torch.cuda.device_of(q):
        score_kernel[(min(programs, plan.num_programs or programs),)](
            *(q, k, starts, lengths, block_table, mid, half, scales, keys),
            *(float(scale), extent_of(k, block_table), num_pages, tiles, lists, kv_heads),
            q.shape[1] // kv_heads,
            keys.stride(1),
            0 if block_table is None or len(block_table) == 1 else block_table.stride(0),
            *q.stride(),
            *batch_strides(k, block_table),
            mid.stride(0) if len(mid) > 1 else 0,
            D=q.shape[2],
            PAGE_SIZE=page_size,
            BLOCK_SIZE=1 if block_table is None else k.shape[2],
            GROUP_SUM=group == "sum",
            UPDATE=update,
            INTERPRET=INTERPRETED,
            PDL=pdl,
            launch_pdl=pdl,
            BLOCK_M=block_m,
            BLOCK_D=block_d,
            BLOCK_P=plan.block_p,
            BLOCK_TOKENS=triton.next_power_of_2(page_size),
            num_warps=plan.num_warps,
            num_stages=plan.num_stages,
            enable_fp_fusion=True,
        )


def fitting(
    plan: ScorePlan, block_m: int, block_d: int, q_bytes: int, metadata_bytes: int
) -> ScorePlan:
    """The plan with as many stages, then as many pages a tile, as shared memory has room for.
    q_bytes, metadata_bytes: of a channel. Counted a little high, against what Triton 3.6 takes."""
    query = block_m * block_d * q_bytes

    def num_bytes(p: ScorePlan) -> int:
        tile = 2 * p.block_p * block_d
        widened = tile * q_bytes if metadata_bytes < q_bytes else 0
        return (p.num_stages - 1) * (tile * metadata_bytes + query) + 2 * query + widened

    while num_bytes(plan) > SHARED_BYTES and (plan.num_stages > 2 or plan.block_p > 16):
        fewer = {"num_stages": plan.num_stages - 1}
        plan = replace(plan, **fewer if plan.num_stages > 2 else {"block_p": plan.block_p // 2})
    return plan


def launch_choose(
    keys: Tensor,
    num_pages: int,
    starts: Tensor | None,
    lengths: Tensor,
    num_tokens: int,
    rule: Rule,
    *,
    flags: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """pages [B, G, W] and counts [B, G]. num_tokens: the cache's extent. flags [B, G]: wait for a
    list's keys, 0 until they are written, not for the whole kernel that writes them; and set its
    flag."""
    rows, kv_heads, _ = keys.shape
    block_pages = block_pages_of(num_pages)
    starts, lengths = dense(starts), lengths.contiguous()
    pages = lengths.new_empty(rows, kv_heads, rule.width(num_pages))
    counts = lengths.new_empty(rows, kv_heads)
    pdl = can_overlap_launches(keys.device)
    with torch.cuda.device_of(keys):
        choose_kernel[(kv_heads, rows)](
            *(keys, starts, lengths, pages, counts, flags, *rule.numbers(num_pages)),
            *(num_tokens, keys.stride(1)),
            PAGE_SIZE=rule.page_size,
            POLL=flags is not None,
            PDL=pdl,
            BLOCK_PAGES=block_pages,
            num_warps=min(16, max(4, block_pages // 256)),
            launch_pdl=pdl,
            enable_fp_fusion=True,
        )
    return pages, counts


def new_keys(rows: int, kv_heads: int, num_pages: int, device: torch.device) -> Tensor:
    """Room for the scores of each list as uint32 keys; rows of whole vectors."""
    width = triton.cdiv(num_pages, 16) * 16
    return torch.empty(rows, kv_heads, width, dtype=torch.uint32, device=device)


def block_pages_of(num_pages: int) -> int:
    """All scores of a list in one program."""
    return max(128, triton.next_power_of_2(num_pages))


def update_metadata_triton(
    k: Tensor,
    mid: Tensor,
    half: Tensor,
    starts: Tensor | None,
    lengths: Tensor,
    *,
    page_size: int,
    block_table: Tensor | None = None,
    scales: Tensor | None = None,
) -> None:
    """Arguments as in api.update_metadata, which checks them."""
    assert mid.is_contiguous() and half.is_contiguous()
    starts, lengths, block_table = dense(starts), lengths.contiguous(), dense(block_table)
    with torch.cuda.device_of(k):
        update_kernel[(len(lengths), mid.shape[1])](
            *(k, starts, lengths, block_table, mid, half, scales),
            *(extent_of(k, block_table), mid.shape[2]),
            0 if block_table is None or len(block_table) == 1 else block_table.stride(0),
            *batch_strides(k, block_table),
            mid.stride(0) if len(mid) > 1 else 0,
            D=k.shape[3],
            PAGE_SIZE=page_size,
            BLOCK_SIZE=1 if block_table is None else k.shape[2],
            BLOCK_D=max(16, triton.next_power_of_2(k.shape[3])),
            BLOCK_TOKENS=triton.next_power_of_2(page_size),
            enable_fp_fusion=True,
        )


def dense(x: Tensor | None) -> Tensor | None:
    """Integer arguments are walked without strides."""
    return None if x is None else x.contiguous()


def batch_strides(k: Tensor, block_table: Tensor | None) -> tuple[int, ...]:
    """Strides of k; 0 over a batch of one cache that all rows read."""
    return (k.stride(0) if block_table is not None or len(k) > 1 else 0, *k.stride()[1:])
