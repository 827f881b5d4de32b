"""A real cache for timing: page lists as a policy chose them on it, or its keys end to end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import torch
from torch import Tensor

from sparse_eval.capture import CapturedKV, LayerCapture, load_capture
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


@dataclass(frozen=True)
class CapturedKeys:
    """One layer: keys_GND and values_GNE of its cache, queries_THD of its decode steps, latest
    first, to be scaled by head_dim ** -0.5."""

    layer: int
    capture_hash: str
    keys_GND: Tensor
    values_GNE: Tensor
    queries_THD: Tensor

    def tiled(self, batch: int, context: int, turn: int) -> tuple[Tensor, Tensor, Tensor]:
        """q [batch, H, D], k and v [batch, G, context, ...] of buffer number `turn`.

        Every row has the layer's tokens laid end to end: they begin with its first tokens and end
        with its last; each row of each buffer takes another query, as far as there are. Positions
        are those the keys were captured at."""
        num_tokens = self.keys_GND.shape[1]
        whole, rest = divmod(context, num_tokens)
        device = self.keys_GND.device
        order = torch.cat([torch.arange(rest), torch.arange(num_tokens).repeat(whole)]).to(device)
        k, v = (x[:, order][None].repeat(batch, 1, 1, 1) for x in (self.keys_GND, self.values_GNE))
        steps = (turn * batch + torch.arange(batch, device=device)) % len(self.queries_THD)
        return self.queries_THD[steps], k, v


def captured_keys(path: Path, device: str, dtype: torch.dtype) -> list[CapturedKeys]:
    """The full-attention layers of the capture at path, up to the last step's length."""
    capture = load_capture(path)
    live = int(capture.lengths_T.max())

    def layer_of(i: int, x: LayerCapture) -> CapturedKeys:
        k, v = (cache[:, :live].to(device, dtype) for cache in (x.keys_GND, x.values_GNE))
        q = x.queries_THD.flip(0) * (x.scale * x.keys_GND.shape[2] ** 0.5)
        return CapturedKeys(i, capture.hash, k, v, q.to(device, dtype))

    return [layer_of(i, layer) for i, layer in capture.layers.items()]


def check_keys(path: Path, shapes: Mapping[str, int], contexts: Sequence[int]) -> None:
    """ValueError in one line where the keys of the capture at path do not fit the cells."""
    capture = load_capture(path)
    check_tokens("task.keys", path, capture, contexts)
    for i, layer in capture.layers.items():
        (kv_heads, _, head_dim), num_heads = layer.keys_GND.shape, layer.queries_THD.shape[1]
        for (name, wanted), value in zip(
            shapes.items(), (num_heads, kv_heads, head_dim), strict=True
        ):
            if value != wanted:
                raise ValueError(
                    f"task.keys: layer {i} of {path} has {name} {value}, but task.shapes has "
                    f"{wanted}"
                )
        if layer.values_GNE.shape[2] != head_dim:
            raise ValueError(
                f"task.keys: layer {i} of {path} has values of {layer.values_GNE.shape[2]} "
                f"channels, where the parts take as many as the keys have, {head_dim}"
            )


def check_replay(path: Path, num_kv_heads: int, contexts: Sequence[int]) -> None:
    """ValueError in one line where the lists of the capture at path do not fit the cells."""
    capture = load_capture(path)
    check_tokens("task.lists", path, capture, contexts)
    for i, layer in capture.layers.items():
        if len(layer.keys_GND) != num_kv_heads:
            raise ValueError(
                f"task.lists: layer {i} of {path} has {len(layer.keys_GND)} KV heads, but "
                f"task.shapes has {num_kv_heads}"
            )


def check_tokens(setting: str, path: Path, capture: CapturedKV, contexts: Sequence[int]) -> None:
    """ValueError for a capture without a layer, or one that a context does not hold."""
    if not capture.layers:
        raise ValueError(f"{setting}: {path} has no full-attention layer")
    tokens = max(layer.keys_GND.shape[1] for layer in capture.layers.values())
    if tokens > min(contexts):
        raise ValueError(
            f"{setting}: {path} holds {tokens:,} tokens, so task.contexts must be at least that, "
            f"got {min(contexts):,}"
        )
