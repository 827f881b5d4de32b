"""One cell of the grid: buffers that exceed the L2, the work over them, the bytes it must move."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from sparse_eval.kernels.quest_select import quest_select, update_metadata
from sparse_eval.kernels.quest_step import quest_step, step_workspace
from sparse_eval.kernels.sparse_decode import sparse_decode
from sparse_eval.latency.clock import Step
from sparse_eval.latency.config import Shapes
from sparse_eval.policies.quest import EIGHT_BITS, Quest

MAX_BUFFERS = 64
MEMORY_SHARE = 0.5


@dataclass(frozen=True)
class Buffer:
    """What one step reads: a query, a cache, its metadata, and page lists for `attend` alone."""

    q: Tensor
    k: Tensor
    v: Tensor
    mid: Tensor
    half: Tensor
    scales: Tensor | None
    pages: Tensor
    counts: Tensor


@dataclass(frozen=True)
class Cell:
    """batch rows of context tokens, all live: the newest page has just filled, so every step
    updates metadata, which in life one step in page_size does."""

    batch: int
    context: int
    shapes: Shapes
    dtype: torch.dtype
    policy: Quest
    budget: int
    device: torch.device
    listed_tokens: float | None = None
    """Tokens per list that `attend` alone reads; None: as many as the step."""

    @property
    def width(self) -> int:
        return min(-(-self.budget // self.policy.page_size), self.num_pages)

    @property
    def num_pages(self) -> int:
        return -(-self.context // self.policy.page_size)

    @property
    def lists(self) -> int:
        return self.batch * self.shapes.num_kv_heads

    @property
    def token_bytes(self) -> int:
        """Key and value of one token and KV head."""
        return 2 * self.shapes.head_dim * self.dtype.itemsize

    @property
    def page_bytes(self) -> int:
        """Metadata of one page and KV head."""
        if self.policy.metadata_dtype == EIGHT_BITS:
            return 2 * self.shapes.head_dim + 8  # and two float32 scales
        return self.token_bytes

    def bytes_of(self, what: str) -> int:
        """The fewest bytes a step must move: inputs once; outputs and scores are small."""
        page_size = self.policy.page_size
        full = self.context // page_size
        read = min(self.width * page_size, self.context)
        listed = read if self.listed_tokens is None else self.listed_tokens
        parts = {
            "dense": self.context * self.token_bytes,
            "metadata": page_size * self.token_bytes // 2 + self.page_bytes,
            "select": full * self.page_bytes,
            "attend": listed * self.token_bytes,
        }
        parts["sdpa"] = parts["dense"]
        parts["step"] = parts["metadata"] + parts["select"] + read * self.token_bytes
        return round(self.lists * parts[what])

    def num_buffers(self, what: str, working_set: int) -> int:
        """Enough for `what` to touch working_set bytes before it meets a buffer again."""
        largest = int(torch.cuda.mem_get_info(self.device)[0] * MEMORY_SHARE)
        fits = largest // (self.bytes_of("dense") + self.bytes_of("select"))
        if fits < 1:
            raise ValueError(
                f"batch {self.batch} × {self.context:,} tokens needs "
                f"{self.bytes_of('dense') / 2**30:.0f} GiB, more than half of what is free"
            )
        return max(1, min(math.ceil(working_set / self.bytes_of(what)), MAX_BUFFERS, fits))

    def buffer(self, lists: Callable[[], tuple[Tensor, Tensor]]) -> Buffer:
        """Random tensors; `lists` draws page lists."""
        s, page_size = self.shapes, self.policy.page_size

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, dtype=self.dtype, device=self.device)

        k = draw(self.batch, s.num_kv_heads, self.context, s.head_dim)
        v = torch.randn_like(k)
        metadata: list[Tensor] = []
        full = self.context // page_size
        for row in range(self.batch):  # its float64 would not fit for all rows at once
            paged = k[row, :, : full * page_size].unflatten(1, (full, page_size))
            of_row = self.policy.summary(paged, k.dtype)
            metadata = metadata or [
                x.new_zeros(self.batch, s.num_kv_heads, self.num_pages, x.shape[-1]) for x in of_row
            ]
            for x, part in zip(metadata, of_row, strict=True):
                x[row, :, :full] = part
        mid, half, *scales = metadata
        q = draw(self.batch, s.num_heads, s.head_dim)
        return Buffer(q, k, v, mid, half, scales[0] if scales else None, *lists())

    def scattered_lists(self) -> tuple[Tensor, Tensor]:
        """Distinct pages at random, other ones for every row and KV head: the worst case."""
        order = torch.rand(self.lists, self.num_pages, device=self.device).argsort(-1)
        pages = order[:, : self.width].sort(-1).values.int()
        return self._shaped(pages)

    def _shaped(self, pages: Tensor) -> tuple[Tensor, Tensor]:
        counts = torch.full((self.lists,), self.width, dtype=torch.int32, device=self.device)
        shape = (self.batch, self.shapes.num_kv_heads)
        return pages.reshape(*shape, -1).contiguous(), counts.reshape(shape)

    def work(self, buffers: list[Buffer]) -> dict[str, Step]:
        """One step of each part through the public doors, on buffer i."""
        page_size, p = self.policy.page_size, self.policy
        lengths = torch.full((self.batch,), self.context, dtype=torch.int32, device=self.device)
        scale = self.shapes.head_dim**-0.5
        rule = {
            "page_size": page_size,
            "budget": self.budget,
            "sink_pages": p.sink_pages,
            "local_pages": p.local_pages,
            "group": p.group,
            "scale": scale,
            "backend": "triton",
        }
        attend = {"page_size": page_size, "scale": scale, "backend": "triton"}
        # One for all buffers, as for all layers of a model: steps follow each other.
        workspace = step_workspace(
            self.batch, self.shapes.num_kv_heads, self.num_pages, self.device
        )

        def dense(i: int) -> object:
            x = buffers[i]
            return sparse_decode(x.q, x.k, x.v, None, None, None, lengths, **attend)  # type: ignore

        def metadata(i: int) -> object:
            x = buffers[i]
            update_metadata(
                *(x.k, x.mid, x.half, None, lengths),
                page_size=page_size,
                backend="triton",
                scales=x.scales,
            )
            return None

        def select(i: int) -> object:
            x = buffers[i]
            tensors = (x.q, x.k, x.mid, x.half, None, lengths)
            return quest_select(*tensors, scales=x.scales, **rule)  # type: ignore

        def attended(i: int) -> object:
            x = buffers[i]
            return sparse_decode(x.q, x.k, x.v, x.pages, x.counts, None, lengths, **attend)  # type: ignore

        def step(i: int) -> object:
            x = buffers[i]
            tensors = (x.q, x.k, x.v, x.mid, x.half, None, lengths)
            return quest_step(*tensors, scales=x.scales, workspace=workspace, **rule)  # type: ignore

        return {
            "dense": dense,
            "metadata": metadata,
            "select": select,
            "attend": attended,
            "step": step,
        }
