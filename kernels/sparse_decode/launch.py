"""Launch the Triton kernels of sparse decode: sizes, scratch, two launches.

Every size depends on shapes alone, never on a live length, so a step can be captured in a CUDA
graph and replayed at other lengths.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch
import triton
from torch import Tensor

from sparse_eval.kernels.sparse_decode.kernel import (
    INTERPRETED,
    attend_split_kernel,
    merge_splits_kernel,
)

TILE_BYTES = 16 * 1024
MAX_SPLITS = 128


def sparse_decode_triton(
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
    block_table: Tensor | None = None,
    page_lse: bool = False,
    block_t: int | None = None,
    num_splits: int | None = None,
    num_warps: int | None = None,
    num_stages: int | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Arguments and results as in api.sparse_decode, which checks them.

    block_t: tokens per tile, a power of two >= 16; num_splits <= MAX_SPLITS; None = by shape."""
    (rows, heads, d), e = q.shape, v.shape[3]
    num_tokens = k.shape[2] * (1 if block_table is None else block_table.shape[1])
    lists = k.shape[1] if pages is None else pages.shape[1]
    slots = triton.cdiv(num_tokens, page_size) if pages is None else pages.shape[2]
    block_d, block_e = (max(16, triton.next_power_of_2(x)) for x in (d, e))
    capacity = num_tokens if pages is None else slots * page_size
    token_bytes = max(block_d, block_e) * q.element_size()
    plan = plan_of(rows * lists, page_size, token_bytes, is_sparse=pages is not None)
    block_t = block_t or plan.block_t
    num_splits = num_splits or splits_of(
        *(rows * lists, capacity, block_t, q.device), programs=plan.programs
    )
    assert num_splits <= MAX_SPLITS and block_t >= 16
    part = min(page_size & -page_size, block_t)
    parts_of_page = page_size // part

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(rows, heads, *shape, dtype=dtype, device=q.device)

    acc, m, l = new(num_splits, e), new(num_splits), new(num_splits)  # noqa: E741
    # The interpreter's own float32 -> bfloat16 truncates.
    out, lse = new(e, dtype=torch.float32 if INTERPRETED else q.dtype), new()
    parts = new(slots, parts_of_page).fill_(-torch.inf) if page_lse else None
    # The kernel walks its integer arguments as dense arrays.
    pages, counts, starts = (x if x is None else x.contiguous() for x in (pages, counts, starts))
    table = None if block_table is None else block_table.expand(rows, -1).contiguous()
    k_strides, v_strides = (
        (x.stride(0) if table is not None or len(x) > 1 else 0, *x.stride()[1:]) for x in (k, v)
    )
    pdl = can_overlap_launches(q.device)
    with torch.cuda.device_of(q):
        attend_split_kernel[(rows, lists, num_splits)](
            *(q, k, v, pages, counts, starts, lengths.contiguous(), table, acc, m, l, parts),
            *(float(scale), num_tokens, slots, num_splits, slots * parts_of_page),
            *(heads // lists, lists // k.shape[1]),
            *(0 if table is None else table.shape[1], *q.stride(), *k_strides, *v_strides),
            D=d,
            E=e,
            PAGE_SIZE=page_size,
            BLOCK_SIZE=1 if table is None else k.shape[2],
            WHOLE=is_whole(pages, starts, table, k, page_size, block_t),
            PART=part,
            P_UNIT=2.0**15 if q.dtype == torch.float16 else 1.0,
            INTERPRET=INTERPRETED,
            BLOCK_M=max(16, triton.next_power_of_2(heads // lists)),
            BLOCK_T=block_t,
            BLOCK_D=block_d,
            BLOCK_E=block_e,
            PDL=pdl,
            num_warps=num_warps or plan.num_warps,
            num_stages=num_stages or plan.num_stages,
            enable_fp_fusion=True,
        )
    launch_merge(acc, m, l, out, lse)
    if parts is not None:
        parts = parts.squeeze(3) if parts_of_page == 1 else parts.logsumexp(3)
    return out.to(q.dtype), lse, parts


def launch_merge(
    acc: Tensor,
    m: Tensor,
    l: Tensor,  # noqa: E741
    out: Tensor,
    lse: Tensor,
    *,
    flags: Tensor | None = None,
    keys: Tensor | None = None,
    heads_per_list: int = 1,
) -> None:
    """Fills out and lse from the splits that the kernel launched just before stores, and sets flags
    and keys back to 0."""
    rows, heads, num_splits, e = acc.shape
    pdl = can_overlap_launches(acc.device)
    channels = 64 if num_splits <= 8 else 32
    with torch.cuda.device_of(acc):
        merge_splits_kernel[(rows * heads, triton.cdiv(e, channels))](
            *(acc, m, l, out, lse, flags, keys, num_splits, heads_per_list),
            0 if keys is None else keys.stride(1),
            E=e,
            PDL=pdl,
            launch_pdl=pdl,
            BLOCK_SPLITS=triton.next_power_of_2(num_splits),
            BLOCK_E=channels,
            num_warps=1 if num_splits <= 32 else 4,
            enable_fp_fusion=True,
        )


def is_whole(
    pages: Tensor | None,
    starts: Tensor | None,
    table: Tensor | None,
    k: Tensor,
    page_size: int,
    block_t: int,
) -> bool:
    """Whether every tile lies in one page and in one block of the pool."""
    if table is not None and (starts is not None or k.shape[2] % block_t):
        return False
    return pages is None or page_size % block_t == 0


@dataclass(frozen=True)
class Plan:
    """block_t: tokens per tile; num_stages: one more than tiles in flight."""

    block_t: int
    num_warps: int
    num_stages: int

    @property
    def programs(self) -> int:
        """Per multiprocessor, where each takes one share of the work."""
        return 4 if self.num_warps < 4 else 2


def plan_of(lists: int, page_size: int, token_bytes: int, *, is_sparse: bool) -> Plan:
    """Tiles by shape, measured on one H200 (docs/performance.md). token_bytes: of K or of V."""
    if INTERPRETED:
        return Plan(256, 4, 3)  # the interpreter pays per tile
    is_busy = lists >= 16
    if not is_sparse:  # eight warps read one long cache best, four a list of pages
        plan = Plan(64, 8 if is_busy else 4, 3)
    elif page_size == 16:  # tiles that lie in one page each
        plan = Plan(16, 2, 4) if is_busy else Plan(16, 4, 3)
    elif page_size == 32 or (page_size == 64 and lists <= 32):
        plan = Plan(32, 4, 3)
    else:
        plan = Plan(32, 4, 4) if page_size < 64 and is_busy else Plan(64, 4, 3)
    return replace(plan, block_t=min(plan.block_t, max(16, TILE_BYTES // token_bytes)))


def splits_of(
    lists: int,
    capacity: int,
    block_t: int,
    device: torch.device,
    *,
    programs: int,
    least: int = 128,
) -> int:
    """Splits per list of up to capacity tokens: so many programs per multiprocessor at most, of
    four tiles and `least` tokens or more each, unless that leaves multiprocessors without work."""
    sms = multiprocessors(device)
    spread = min(triton.cdiv(capacity, min(2 * block_t, 64)), sms // max(1, lists))
    useful = max(capacity // max(4 * block_t, least), spread)
    return max(1, min(useful, programs * sms // max(1, lists), MAX_SPLITS))


@cache
def can_overlap_launches(device: torch.device) -> bool:
    """Programmatic dependent launch: from compute capability 9."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@cache
def multiprocessors(device: torch.device) -> int:
    if device.type == "cpu":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count
