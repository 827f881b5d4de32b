"""Launch top-δ selection (scan, compact) and attention over its lists: sizes by shapes alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from sparse_eval.kernels.ffd.attend import attend_lists_kernel, merge_pieces_kernel
from sparse_eval.kernels.ffd.kernel import scan_kernel
from sparse_eval.kernels.quest_select.launch import batch_strides
from sparse_eval.kernels.sparse_decode.kernel import INTERPRETED
from sparse_eval.kernels.sparse_decode.launch import (
    can_overlap_launches,
    is_whole,
    multiprocessors,
)
from sparse_eval.kernels.sparse_decode.reference import extent_of
from sparse_eval.kernels.thumbnail import Residual, Thumbnail
from sparse_eval.kernels.thumbnail.launch import form_of, pack_triton, tile_of

MAX_PROGRAMS = 1024
LONG_SHARE = 16  # tiles of 64 tokens that pay for a program of one warp
TILE_BYTES = 8 * 1024  # of K or of V, of an attention tile


def ffd_select_triton(
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
    pseudo_max: str,
    block_table: Tensor | None = None,
    chained: bool = False,
    sums: Tensor | None = None,
    block_n: int | None = None,
    num_blocks: int | None = None,
    num_warps: int | None = None,
    num_stages: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Arguments and results as in api.ffd_select, which checks them.

    chained: the kernel launched just before extends the thumbnail and lets this one take its place
    early. block_n: tokens of a tile; num_blocks: programs per list; None = by shape."""
    t = thumbnail
    assert t.codes.is_contiguous() and t.step.is_contiguous()
    (rows, heads, d), kv_heads = q.shape, t.codes.shape[1]
    plan = plan_of(t, rows * kv_heads, q.device)
    block_n, num_warps = block_n or plan.block_n, num_warps or plan.num_warps
    num_blocks = num_blocks or blocks_of(t, rows * kv_heads, q.device, block_n)
    forced = (sink_pages + local_pages) * t.page_size
    # rounded to float32 it is not to be less
    delta = float(delta) * (1 + 2**-22 if pseudo_max == "exact" else 1)
    table = None if block_table is None else block_table.expand(rows, -1).contiguous()

    def new(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(rows, kv_heads, *shape, dtype=dtype, device=q.device)

    flags, pages, counts = new(t.num_pages, dtype=torch.uint8), new(t.num_pages), new()
    sums = new(num_blocks).zero_() if sums is None else sums
    assert sums.shape == (rows, kv_heads, num_blocks)
    lengths = lengths.contiguous()
    form = form_of(t)
    pdl = can_overlap_launches(q.device)
    with torch.cuda.device_of(q):
        scan_kernel[(num_blocks, kv_heads, rows)](
            *(q, t.codes, t.step, k, None if starts is None else starts.contiguous(), lengths),
            *(table, flags, sums, pages, counts, float(scale), delta, t.reach, t.num_pages),
            extent_of(k, table),
            *(heads // kv_heads, sink_pages, local_pages),
            0 if table is None else table.stride(0),
            *q.stride(),
            *batch_strides(k, table),
            kv_heads if len(t.codes) > 1 else 0,
            **form,
            BLOCK_SIZE=1 if table is None else k.shape[2],
            EXACT=pseudo_max == "exact",
            WHOLE=t.num_tokens % block_n == 0 and form["C"] == form["BLOCK_C"],
            INTERPRET=INTERPRETED,
            PDL=pdl,
            CHAINED=pdl and chained,
            launch_pdl=pdl and chained,
            BLOCK_H=max(8, triton.next_power_of_2(heads // kv_heads)),
            BLOCK_D=max(16, triton.next_power_of_2(d)),
            BLOCK_F=tile_of(t, min(256, max(16, triton.next_power_of_2(forced)))),
            BLOCK_N=block_n,
            BLOCK_SUMS=512,
            BLOCK_PAGES=1024 if INTERPRETED else 128,
            num_warps=num_warps,
            num_stages=num_stages or 3,
            maxnreg=plan.registers,
            enable_fp_fusion=True,
        )
    return pages, counts


def ffd_step_triton(
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
    pseudo_max: str,
    block_table: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Arguments and results as in api.ffd_step, which checks them."""
    rows, kv_heads = len(q), thumbnail.codes.shape[1]
    blocks = blocks_of(thumbnail, rows * kv_heads, q.device)
    sums = torch.empty(rows, kv_heads, blocks, dtype=torch.int32, device=q.device)
    pack_triton(
        *(thumbnail, residual, k, starts, lengths, block_table),
        fresh=True,
        cleared=sums,
    )
    pages, counts = ffd_select_triton(
        *(q, k, thumbnail, starts, lengths),
        delta=delta,
        sink_pages=sink_pages,
        local_pages=local_pages,
        scale=scale,
        pseudo_max=pseudo_max,
        block_table=block_table,
        chained=True,
        sums=sums,
        num_blocks=blocks,
    )
    out, lse = lists_decode_triton(
        *(q, k, v, thumbnail, residual, pages, counts, starts, lengths),
        page_size=thumbnail.page_size,
        scale=scale,
        block_table=block_table,
        chained=True,
    )
    return out, lse, pages, counts


def blocks_of(t: Thumbnail, lists: int, device: torch.device, block_n: int | None = None) -> int:
    """Programs per list, one tile each at least."""
    plan = plan_of(t, lists, device)
    return min(triton.cdiv(t.num_tokens, block_n or plan.block_n), plan.num_blocks)


@dataclass(frozen=True)
class Plan:
    """block_n: tokens of a tile; num_blocks: programs per list; registers: of a thread at most, so
    that as many programs as are meant to fit on a multiprocessor."""

    block_n: int
    num_warps: int
    num_blocks: int
    registers: int | None = None


def plan_of(thumbnail: Thumbnail, lists: int, device: torch.device) -> Plan:
    """Tiles of the scan by shape, measured on one H200 (docs/performance.md).

    Many programs of one warp, which wait for nobody, where each has work enough to pay for its own
    pseudo-max, as many as a multiprocessor has registers for; else fewer of four. Rule channel
    prepares the query for every page of a tile."""
    size, sms = thumbnail.page_size, multiprocessors(device)
    if INTERPRETED:  # it pays per tile
        return Plan(max(size, 256 if thumbnail.rule == "token" else 4 * size), 4, 2)
    if thumbnail.rule == "channel":
        tile, warps, per_sm = 8 * size, 2, 8
    elif lists * thumbnail.num_tokens >= 64 * LONG_SHARE * 12 * sms and size <= 64:
        tile, warps, per_sm = 128, 1, 12 if size <= 32 else 8  # 64: more registers
    else:
        tile, warps, per_sm = 256, 4, 4
    num_blocks = max(1, min(triton.cdiv(per_sm * sms, lists), MAX_PROGRAMS))
    registers = 65536 // (32 * per_sm) // 8 * 8 if warps == 1 else None
    return Plan(max(size, min(tile, 256)), warps, num_blocks, registers)


def lists_decode_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    thumbnail: Thumbnail | None,
    residual: Residual | None,
    pages: Tensor,
    counts: Tensor,
    starts: Tensor | None,
    lengths: Tensor,
    *,
    page_size: int,
    scale: float,
    block_table: Tensor | None = None,
    chained: bool = False,
    block_t: int | None = None,
    num_programs: int | None = None,
    num_warps: int | None = None,
    num_stages: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Arguments and results as in api.lists_decode and residual_decode, which check them."""
    t = thumbnail if residual is not None else None
    (rows, heads, d), e, kv_heads = q.shape, v.shape[3], k.shape[1]
    lists, group_size = rows * kv_heads, heads // kv_heads
    table = None if block_table is None else block_table.expand(rows, -1).contiguous()
    token_bytes = triton.next_power_of_2(max(d, e)) * q.element_size()
    plan = attend_plan_of(page_size, lists, token_bytes, t is not None, q.device)
    block_t = block_t or plan.block_t
    if t is None:
        form = {"D": d, "C": 1, "BITS": 2, "PAGE_SIZE": page_size, "CHANNEL": False, "BLOCK_C": 1}
        block_d = max(16, triton.next_power_of_2(d))
    else:
        assert residual is not None and residual.codes.is_contiguous()
        assert t.codes.is_contiguous() and t.step.is_contiguous()
        form = form_of(t)
        block_d = max(32, triton.next_power_of_2(d))
        if t.rule == "channel":
            block_t = min(block_t, page_size)
    num_programs = num_programs or plan.num_programs
    # Few heads: a program of the merge takes few channels, so that there are enough of them.
    block_e = 32 if rows * heads < 64 else min(128, max(16, triton.next_power_of_2(e)))

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device=q.device)

    pieces = (num_programs + lists, group_size)
    acc, m, l = new(*pieces, e), new(*pieces), new(*pieces)  # noqa: E741
    # The interpreter's own float32 -> bfloat16 truncates.
    out, lse = (
        new(rows, heads, e, dtype=torch.float32 if INTERPRETED else q.dtype),
        new(rows, heads),
    )
    counts = counts.contiguous()
    block_l = max(2, triton.next_power_of_2(lists))
    pdl = can_overlap_launches(q.device)
    with torch.cuda.device_of(q):
        attend_lists_kernel[(num_programs,)](
            *(q, k, v, *((None, None) if t is None else (t.codes, t.step))),
            *(None if residual is None else residual.codes, pages.contiguous(), counts),
            *(None if starts is None else starts.contiguous(), lengths.contiguous(), table),
            *(acc, m, l, float(scale), 0.0 if residual is None else residual.unit),
            extent_of(k, table),
            *(0 if t is None else t.num_pages, pages.shape[2], lists, kv_heads, group_size),
            0 if table is None else table.shape[1],
            *(*q.stride(), *batch_strides(k, table), *batch_strides(v, table)),
            kv_heads if t is not None and len(t.codes) > 1 else 0,
            **form,
            E=e,
            BLOCK_SIZE=1 if table is None else k.shape[2],
            WHOLE=is_whole(pages, starts, table, k, page_size, block_t),
            P_UNIT=2.0**15 if q.dtype == torch.float16 else 1.0,
            STACKED=group_size <= 8 and v.dtype != torch.float32 and form["CHANNEL"] is False,
            INTERPRET=INTERPRETED,
            PDL=pdl,
            CHAINED=pdl and chained,
            launch_pdl=pdl and chained,
            BLOCK_L=block_l,
            BLOCK_M=max(16, triton.next_power_of_2(group_size)),
            BLOCK_T=block_t,
            BLOCK_D=block_d,
            BLOCK_E=max(16, triton.next_power_of_2(e)),
            num_warps=num_warps or plan.num_warps,
            num_stages=num_stages or plan.num_stages,
            enable_fp_fusion=True,
        )
        merge_pieces_kernel[(rows * heads, triton.cdiv(e, block_e))](
            *(acc, m, l, counts, out, lse, num_programs, lists, pages.shape[2], group_size),
            *(page_size, block_t),
            E=e,
            PDL=pdl,
            launch_pdl=pdl,
            BLOCK_L=block_l,
            BLOCK_P=64 if INTERPRETED else merged_at_once(num_programs, lists),
            BLOCK_E=block_e,
            enable_fp_fusion=True,
        )
    return out.to(q.dtype), lse


def merged_at_once(num_programs: int, lists: int) -> int:
    """Pieces that a step of the merge takes: all of a list twice as long as the mean."""
    return max(32, min(256, triton.next_power_of_2(2 * triton.cdiv(num_programs, lists))))


@dataclass(frozen=True)
class AttendPlan:
    """block_t: tokens of a tile; num_stages: one more than tiles in flight; num_programs: all."""

    block_t: int
    num_warps: int
    num_stages: int
    num_programs: int


def attend_plan_of(
    page_size: int, lists: int, token_bytes: int, is_refined: bool, device: torch.device
) -> AttendPlan:
    """Tiles of the attention by shape, measured on one H200 (docs/performance.md). token_bytes: of
    K or of V. As many programs as run at one go: early ones spread evenly then."""
    sms = multiprocessors(device)
    if INTERPRETED:
        return AttendPlan(max(16, min(128, 8 * TILE_BYTES // token_bytes)), 4, 2, 3)
    if token_bytes > 256:
        return AttendPlan(max(16, 2 * TILE_BYTES // token_bytes), 4, 3, 2 * sms)
    is_busy = lists >= 8
    if is_busy and page_size == 16 and not is_refined:  # tiles that lie in one page each
        return AttendPlan(16, 2, 4, 6 * sms)
    if is_busy and page_size % 32:
        return AttendPlan(64, 4, 3, 2 * sms) if is_refined else AttendPlan(32, 4, 3, 3 * sms)
    if is_busy and not (is_refined and page_size >= 64):
        return AttendPlan(32, 2, 3, 4 * sms)
    return AttendPlan(32, 4, 3, 3 * sms)
