"""One cell of top-δ decoding: thumbnails over caches that exceed the L2.

Random keys and queries are Gaussian, and one sink token per query head scores PEAK, so that the
pseudo-max stands clear of the rest; δ is set so that a KV head's union reads the wanted share.
A captured layer's are read at a stated δ.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sparse_eval.kernels.ffd import ffd_select, ffd_step, lists_decode, residual_decode
from sparse_eval.kernels.thumbnail import (
    Residual,
    Thumbnail,
    pack_residual,
    pack_thumbnail,
    thumbnail_scores,
)
from sparse_eval.latency.cell import MAX_BUFFERS, MEMORY_SHARE
from sparse_eval.latency.clock import Step
from sparse_eval.latency.config import FFD_PARTS, Shapes
from sparse_eval.latency.replay import CapturedKeys

PEAK = 12.0  # logits


@dataclass(frozen=True)
class FFDBuffer:
    q: Tensor
    k: Tensor
    v: Tensor
    thumbnail: Thumbnail
    residual: Residual


@dataclass(frozen=True)
class Reading:
    """What one buffer's step reads: its δ, the lists that δ gives, their share of the tokens."""

    delta: float
    pages: Tensor
    counts: Tensor
    density: float


@dataclass(frozen=True)
class FFDCell:
    """batch rows of context tokens; the newest page is one token short of full, as it is on most
    steps, where a page is full at a token at all."""

    batch: int
    context: int
    shapes: Shapes
    dtype: torch.dtype
    page_size: int
    sink_pages: int
    local_pages: int
    scales: str
    device: torch.device

    @property
    def length(self) -> int:
        return self.context - 1 if self.page_size > 1 else self.context

    @property
    def scale(self) -> float:
        return self.shapes.head_dim**-0.5

    @property
    def dense_bytes(self) -> int:
        s = self.shapes
        return 2 * self.batch * s.num_kv_heads * self.context * s.head_dim * self.dtype.itemsize

    def bytes_of(self, what: str, buffer: FFDBuffer, density: float) -> int:
        """The fewest bytes a part must move: thumbnails once with their steps; of the share that
        is read, exact keys or codes, steps and residual again, and values."""
        thumbnail = buffer.thumbnail.num_bytes
        values = self.dense_bytes // 2
        exact = density * 2 * values
        refined = density * (thumbnail + buffer.residual.codes.numel() + values)
        parts = {
            "ffd_select": thumbnail,
            "ffd_attend": exact,
            "ffd_attend_residual": refined,
            "ffd_step": thumbnail + exact,
            "ffd_step_residual": thumbnail + refined,
        }
        return int(parts[what])

    def num_buffers(self, working_set: int) -> int:
        """Enough for a scan alone to touch working_set bytes before it meets a buffer again."""
        free = int(torch.cuda.mem_get_info(self.device)[0] * MEMORY_SHARE)
        fits = int(free // (1.5 * self.dense_bytes))
        if fits < 1:
            raise ValueError(
                f"batch {self.batch} × {self.context:,} tokens needs "
                f"{1.5 * self.dense_bytes / 2**30:.0f} GiB, more than half of what is free"
            )
        return max(1, min(math.ceil(working_set * 16 / self.dense_bytes), MAX_BUFFERS, fits))

    def replayed(self, layer: CapturedKeys, turn: int) -> FFDBuffer:
        """Buffer number `turn` over a captured layer."""
        return self.packed(*layer.tiled(self.batch, self.context, turn))

    def buffer(self) -> FFDBuffer:
        s = self.shapes
        q = torch.randn(self.batch, s.num_heads, s.head_dim, dtype=self.dtype, device=self.device)
        k = torch.randn(
            *(self.batch, s.num_kv_heads, self.context, s.head_dim),
            dtype=self.dtype,
            device=self.device,
        )
        v = torch.randn_like(k)
        peak = q.float() * (PEAK / (self.scale * q.float().square().sum(-1, keepdim=True)))
        sinks = peak.unflatten(1, (s.num_kv_heads, -1)).to(self.dtype)
        room = min(sinks.shape[2], self.sink_pages * self.page_size, self.context)
        k[:, :, :room] = sinks[:, :, :room]
        return self.packed(q, k, v)

    def packed(self, q: Tensor, k: Tensor, v: Tensor) -> FFDBuffer:
        thumbnail = pack_thumbnail(k, page_size=self.page_size, rule=self.scales, backend="triton")
        residual = pack_residual(k, thumbnail, backend="triton")
        return FFDBuffer(q, k, v, thumbnail, residual)

    def lengths(self) -> Tensor:
        return torch.full((self.batch,), self.length, dtype=torch.int32, device=self.device)

    def reading(self, x: FFDBuffer, density: float) -> Reading:
        """δ at which this share of a KV head's pages is read, mean over rows and heads."""
        score = thumbnail_scores(x.q, x.thumbnail, self.scale, backend="triton")
        page_max = score.unflatten(2, (-1, self.page_size)).amax(3)[..., : self.full_pages]
        first_local = max(0, self.full_pages - self.local_full)
        forced = torch.cat(
            [page_max[..., : self.sink_pages], page_max[..., first_local:]], -1
        ).amax(-1)
        gap = (forced[..., None] - page_max).unflatten(1, (self.shapes.num_kv_heads, -1)).amin(2)
        rank = min(max(int(density * gap.numel()), 1), gap.numel())
        return self.reading_at(x, max(0.0, gap.flatten().kthvalue(rank).values.item()))

    def reading_at(self, x: FFDBuffer, delta: float) -> Reading:
        pages, counts = self.select(x, delta)
        share = counts.float().mean().item() * self.page_size / self.length
        return Reading(delta, pages, counts, min(share, 1.0))

    @property
    def full_pages(self) -> int:
        return self.length // self.page_size

    @property
    def local_full(self) -> int:
        """Local pages that are full."""
        return self.local_pages - (self.length % self.page_size > 0)

    def select(self, x: FFDBuffer, delta: float) -> tuple[Tensor, Tensor]:
        return ffd_select(
            *(x.q, x.k, x.thumbnail, None, self.lengths()),
            delta=delta,
            sink_pages=self.sink_pages,
            local_pages=self.local_pages,
            scale=self.scale,
            backend="triton",
        )

    def work(self, buffers: list[FFDBuffer], readings: list[Reading]) -> dict[str, Step]:
        """One step of each part through the public doors, on buffer i."""
        lengths = self.lengths()
        where: dict[str, Any] = {"scale": self.scale, "backend": "triton"}
        rule = where | {"sink_pages": self.sink_pages, "local_pages": self.local_pages}

        def select(i: int) -> object:
            x, r = buffers[i], readings[i]
            args = (x.q, x.k, x.thumbnail, None, lengths)
            return ffd_select(*args, delta=r.delta, **rule)

        def attend(i: int) -> object:
            x, r = buffers[i], readings[i]
            lists = (r.pages, r.counts, None, lengths)
            return lists_decode(x.q, x.k, x.v, *lists, page_size=self.page_size, **where)

        def attend_residual(i: int) -> object:
            x, r = buffers[i], readings[i]
            cache = (x.q, x.k, x.v, x.thumbnail, x.residual)
            return residual_decode(*cache, r.pages, r.counts, None, lengths, **where)

        def step(i: int, refine: bool) -> object:
            x, r = buffers[i], readings[i]
            cache = (x.q, x.k, x.v, x.thumbnail, x.residual if refine else None)
            return ffd_step(*cache, None, lengths, delta=r.delta, **rule)

        parts: tuple[Callable[[int], object], ...] = (
            *(select, attend, attend_residual),
            *(partial(step, refine=False), partial(step, refine=True)),
        )
        return dict(zip(FFD_PARTS, parts, strict=True))
