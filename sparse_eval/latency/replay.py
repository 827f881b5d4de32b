"""Page lists as a policy chose them on a real cache, for timing instead of scattered ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path

import torch
from torch import Tensor

from sparse_eval.capture import load_capture
from sparse_eval.latency.cell import Cell
from sparse_eval.policies.quest import Quest


def captured_lists(path: Path, policy: Quest, budget: int, device: str) -> Tensor:
    """Every (layer, step)'s lists of a capture: [n, G, W] int32 on device."""
    capture = load_capture(path).to(device)
    lists = []
    for layer in capture.layers:
        call = capture.replay_call(layer)
        lists.append(policy.select(call, policy.init(call), budget).pages_BSK)
    return torch.cat(lists)


def replayed(lists: Tensor, cell: Cell, path: Path) -> Callable[[], tuple[Tensor, Tensor]]:
    """Draws lists for a cell's rows from those of a capture, each (layer, step) in its turn."""
    rows, kv_heads, width = lists.shape
    if kv_heads != cell.shapes.num_kv_heads or int(lists.max()) >= cell.num_pages:
        raise ValueError(
            f"task.lists: {path} has lists of {kv_heads} KV heads up to page {int(lists.max())}; "
            f"the cell has {cell.shapes.num_kv_heads} KV heads and {cell.num_pages} pages"
        )
    turn: Iterator[int] = cycle(torch.randperm(rows).tolist())

    def draw() -> tuple[Tensor, Tensor]:
        pages = lists[[next(turn) for _ in range(cell.batch)]].contiguous()
        return pages, (pages >= 0).sum(-1, dtype=torch.int32)

    return draw
