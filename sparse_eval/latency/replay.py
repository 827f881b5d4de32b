"""Page lists as a policy chose them on a real cache, for timing instead of scattered ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import torch
from torch import Tensor

from sparse_eval.capture import CapturedKV, load_capture
from sparse_eval.policies.quest import Quest


@dataclass(frozen=True)
class CapturedLists:
    """One entry per layer and decode step of a capture: pages_NGW, counts_NG, both int32."""

    pages_NGW: Tensor
    counts_NG: Tensor
    page_size: int
    capture_hash: str

    @property
    def mean_tokens(self) -> float:
        """Tokens that a list reads on average, a partial last page counted as a whole one."""
        return float(self.counts_NG.float().mean()) * self.page_size

    def drawn(self, batch: int) -> Callable[[], tuple[Tensor, Tensor]]:
        """Draws pages [batch, G, W] and counts [batch, G], each entry in its turn, shuffled."""
        turn: Iterator[int] = cycle(torch.randperm(len(self.pages_NGW)).tolist())

        def draw() -> tuple[Tensor, Tensor]:
            entries = [next(turn) for _ in range(batch)]
            return self.pages_NGW[entries].contiguous(), self.counts_NG[entries].contiguous()

        return draw


def captured_lists(path: Path, policy: Quest, budget: int, device: str) -> CapturedLists:
    """What policy selects at every layer and step of the capture at path."""
    capture = load_capture(path).to(device)
    calls = [capture.replay_call(layer) for layer in capture.layers]
    selections = [policy.select(call, policy.init(call), budget) for call in calls]
    return CapturedLists(
        torch.cat([s.pages_BSK for s in selections]),
        torch.cat([s.counts_BS for s in selections]),
        policy.page_size,
        capture.hash,
    )


def check_replay(path: Path, num_kv_heads: int, contexts: Sequence[int]) -> None:
    """ValueError in one line where the lists of the capture at path do not fit the cells."""
    capture = load_capture(path)
    kv_heads, tokens = extent(capture)
    if kv_heads != num_kv_heads:
        raise ValueError(
            f"task.lists: {path} has {kv_heads} KV heads, but task.shapes has {num_kv_heads}"
        )
    if tokens > min(contexts):
        raise ValueError(
            f"task.lists: {path} holds {tokens:,} tokens, so task.contexts must be at least that, "
            f"got {min(contexts):,}"
        )


def extent(capture: CapturedKV) -> tuple[int, int]:
    """KV heads and tokens of a capture's layers."""
    if not capture.layers:
        raise ValueError("task.lists: the capture has no full-attention layer")
    kv_heads, tokens, _ = next(iter(capture.layers.values())).keys_GND.shape
    return kv_heads, tokens
