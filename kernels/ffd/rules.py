"""Top-δ per query head on scores that lie in memory, in Triton: what top-k and top-p do by sorting.

Two launches over ranges of tokens: flag and count against the pseudo-max, then write the kept
tokens' ids. No sort, no atomics; equal input gives equal lists."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparse_eval.kernels.sparse_decode.kernel import pdl_launch, pdl_wait
from sparse_eval.kernels.sparse_decode.launch import can_overlap_launches, multiprocessors

BLOCK = 2048


@triton.jit(do_not_specialize=["num_tokens", "num_sinks", "num_local"])
def flag_kernel(
    scores_ptr,  # [B, H, num_tokens] float32
    flags_ptr,  # [B, H, num_tokens] uint8
    sums_ptr,  # [B, H, programs] int32
    delta,
    num_tokens,
    num_sinks,
    num_local,
    PDL: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (programs, B · H)."""
    pdl_launch(PDL)
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    row = tl.program_id(1).to(tl.int64)
    scores_ptr += row * num_tokens
    flags_ptr += row * num_tokens
    offs_f = tl.arange(0, BLOCK_F)
    position = tl.where(offs_f < num_sinks, offs_f, num_tokens - num_local + offs_f - num_sinks)
    is_forced = (offs_f < num_sinks + num_local) & (position >= 0) & (position < num_tokens)
    forced = tl.load(scores_ptr + position, mask=is_forced, other=float("-inf"))
    threshold = tl.max(forced, 0) - delta
    count = tl.zeros([BLOCK], tl.int32)
    num_tiles = (num_tokens + BLOCK - 1) // BLOCK
    tile = program * num_tiles // programs
    end = (program + 1) * num_tiles // programs
    while tile < end:
        offs = tile * BLOCK + tl.arange(0, BLOCK)
        mask = offs < num_tokens
        s = tl.load(scores_ptr + offs, mask=mask, other=0.0)
        keep = (s >= threshold) | (offs < num_sinks) | (offs >= num_tokens - num_local)
        keep = (keep & mask).to(tl.int32)
        tl.store(flags_ptr + offs, keep.to(tl.uint8), mask=mask)
        count += keep
        tile += 1
    tl.store(sums_ptr + row * programs + program, tl.sum(count, 0))


@triton.jit(do_not_specialize=["num_tokens"])
def write_kernel(
    flags_ptr,
    sums_ptr,
    ids_ptr,  # [B, H, num_tokens] int32; beyond a list's count unwritten
    counts_ptr,  # [B, H] int32
    num_tokens,
    PDL: tl.constexpr,
    BLOCK_SUMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (programs, B · H)."""
    pdl_launch(PDL)
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    row = tl.program_id(1).to(tl.int64)
    flags_ptr += row * num_tokens
    ids_ptr += row * num_tokens
    other = tl.arange(0, BLOCK_SUMS)
    num_tiles = (num_tokens + BLOCK - 1) // BLOCK
    tile = program * num_tiles // programs
    end = (program + 1) * num_tiles // programs
    pdl_wait(PDL)
    sums = tl.load(sums_ptr + row * programs + other, mask=other < programs, other=0)
    slot = tl.sum(tl.where(other < program, sums, 0), 0)
    if program == 0:
        tl.store(counts_ptr + row, tl.sum(sums, 0))
    while tile < end:
        offs = tile * BLOCK + tl.arange(0, BLOCK)
        keep = tl.load(flags_ptr + offs, mask=offs < num_tokens, other=0).to(tl.int32)
        before = tl.cumsum(keep, 0) - keep
        tl.store(ids_ptr + slot + before, offs, mask=keep > 0)
        slot += tl.sum(keep, 0)
        tile += 1


def top_delta_triton(
    scores_BHN: Tensor, *, delta: float, num_sinks: int, num_local: int
) -> tuple[Tensor, Tensor]:
    """ids [B, H, N] int32, ascending, of each head's tokens within delta of the largest score of
    its first num_sinks and last num_local tokens, those included; what lies behind the counts
    [B, H] is unwritten."""
    assert scores_BHN.is_contiguous() and scores_BHN.dtype == torch.float32
    rows, num_tokens = scores_BHN.shape[0] * scores_BHN.shape[1], scores_BHN.shape[2]
    device = scores_BHN.device
    wanted = triton.cdiv(8 * multiprocessors(device), rows)
    programs = max(1, min(triton.cdiv(num_tokens, BLOCK), wanted, 1024))
    flags = torch.empty(rows, num_tokens, dtype=torch.uint8, device=device)
    sums = torch.empty(rows, programs, dtype=torch.int32, device=device)
    ids = torch.empty(*scores_BHN.shape, dtype=torch.int32, device=device)
    counts = torch.empty(scores_BHN.shape[:2], dtype=torch.int32, device=device)
    pdl = can_overlap_launches(device)
    with torch.cuda.device_of(scores_BHN):
        flag_kernel[(programs, rows)](
            *(scores_BHN, flags, sums, float(delta), num_tokens, num_sinks, num_local),
            PDL=pdl,
            BLOCK_F=triton.next_power_of_2(max(16, num_sinks + num_local)),
            BLOCK=BLOCK,
            num_warps=8,
            enable_fp_fusion=True,
        )
        write_kernel[(programs, rows)](
            *(flags, sums, ids, counts, num_tokens),
            PDL=pdl,
            launch_pdl=pdl,
            BLOCK_SUMS=triton.next_power_of_2(programs),
            BLOCK=BLOCK,
            num_warps=8,
            enable_fp_fusion=True,
        )
    return ids, counts
