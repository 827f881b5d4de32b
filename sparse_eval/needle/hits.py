"""Whether a policy read the pages that hold the value, beside what chance would have read.

A hit is the share of the value's pages that a KV head read, step by step until the answer's last
token. Chance: a page that the policy always reads is read for certain; any other with the
probability that a random choice of as many of the remaining pages has.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from sparse_eval import ledger
from sparse_eval.core import AttentionCall
from sparse_eval.policies.base import Policy, Selection, forced_BP, num_pages_of, visible_BP


@dataclass(frozen=True)
class LayerHits:
    """Of one layer, means over steps. hit_G, chance_G: per KV head. any_hit: read by some head."""

    hit_G: list[float]
    chance_G: list[float]
    any_hit: float
    any_chance: float


@dataclass
class HitRecorder:
    """Collects one sequence's selections while a patched model decodes (patched's on_select)."""

    policy: Policy
    value_span: tuple[int, int]
    steps: dict[int, list[tuple[AttentionCall, Selection]]] = field(default_factory=dict)

    def __call__(self, call: AttentionCall, selection: Selection) -> None:
        # the call without its tensors: a growing cache is a new, large one at every step
        light = replace(
            call,
            q_BHD=call.q_BHD.new_empty(0),
            k_BGND=call.k_BGND.new_empty((1, call.num_kv_heads, 0, 0)),
            v_BGNE=call.v_BGNE.new_empty(0),
            max_tokens=call.capacity,
        )
        kept = replace(selection, pages_BSK=selection.pages_BSK.clone())
        self.steps.setdefault(call.layer, []).append((light, kept))

    def hits(self, first: int, end: int) -> dict[int, LayerHits]:
        """By layer, over the recorded steps [first, end)."""
        return {
            layer: self._layer([self._read(*step) for step in steps[first:end]])
            for layer, steps in sorted(self.steps.items())
        }

    def _read(self, call: AttentionCall, selection: Selection) -> tuple[Tensor, Tensor]:
        """Of one step: which of the value's pages each head read [G, V], and chance [G, V]."""
        size, heads = selection.page_size, call.num_kv_heads
        num_pages = num_pages_of(call.capacity, size)
        read = ledger.union_of_group(ledger.page_mask(selection, num_pages), heads)[0]  # [G, P]
        forced = read & forced_BP(call, self.policy, num_pages)[0]
        visible = visible_BP(call, size, num_pages)[0]
        free = (visible & ~forced).sum(-1)
        chance = (read & ~forced).sum(-1) / free.clamp_min(1)
        first, end = self.value_span[0] // size, (self.value_span[1] - 1) // size + 1
        return read[:, first:end], chance[:, None].where(~forced[:, first:end], 1.0)

    @staticmethod
    def _layer(steps: list[tuple[Tensor, Tensor]]) -> LayerHits:
        hit = torch.stack([read for read, _ in steps]).double()  # [steps, G, V]
        chance = torch.stack([chance for _, chance in steps]).double()
        return LayerHits(
            hit_G=hit.mean((0, 2)).tolist(),
            chance_G=chance.mean((0, 2)).tolist(),
            any_hit=float(hit.amax(1).mean()),
            any_chance=float((1 - (1 - chance).prod(1)).mean()),
        )
