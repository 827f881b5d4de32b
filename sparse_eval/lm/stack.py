"""Prefilled prompts of different lengths as one left-padded cache that every arm decodes from.

Each prompt is prefilled alone, so padding never enters a prefill; B rows, N tokens of the longest.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from sparse_eval.prefill import Prefilled, cache_keyword


@dataclass(frozen=True)
class Stack:
    """cache: of B rows, never mutated. lengths: live cached tokens of each row, the last ones.
    prompt_queries: per layer [B, W - 1, H, D], the last ones before the first sparse token; None
    where nothing was prefilled."""

    cache: Any
    lengths: tuple[int, ...]
    prompt_queries: dict[int, Tensor] | None

    def fork(self, room: int) -> Any:
        """A cache with the same content and room for so many more tokens, which may be decoded from
        without touching this one."""
        fork = copy.copy(self.cache)
        fork.layers = [
            RoomyLayer.of(layer, room) if has_tokens(layer) else copy.copy(layer)
            for layer in self.cache.layers
        ]
        return fork

    def live_BN(self, device: Any) -> Tensor | None:
        """bool: which cached tokens are a row's own; None where all are."""
        longest = max(self.lengths)
        if min(self.lengths) == longest:
            return None
        starts_B = longest - torch.tensor(self.lengths, device=device)
        return torch.arange(longest, device=device) >= starts_B[:, None]


class RoomyLayer(DynamicLayer):
    """A cache layer that writes new tokens behind the old ones instead of copying them all."""

    whole_keys: Tensor
    whole_values: Tensor
    keys: Tensor
    values: Tensor

    @staticmethod
    def of(layer: Any, room: int) -> RoomyLayer:
        roomy = RoomyLayer()
        roomy.lazy_initialization(layer.keys, layer.values)
        roomy.whole_keys = with_room(layer.keys, room)
        roomy.whole_values = with_room(layer.values, room)
        roomy._show(layer.keys.shape[2])
        return roomy

    def _show(self, length: int) -> None:
        self.keys = self.whole_keys[:, :, :length]
        self.values = self.whole_values[:, :, :length]

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        start = self.keys.shape[2]
        end = start + key_states.shape[2]
        if end > self.whole_keys.shape[2]:
            self.whole_keys = with_room(self.keys, end)
            self.whole_values = with_room(self.values, end)
        self.whole_keys[:, :, start:end] = key_states
        self.whole_values[:, :, start:end] = value_states
        self._show(end)
        return self.keys, self.values


def with_room(x_BGND: Tensor, room: int) -> Tensor:
    """A copy, not written beyond N."""
    rows, heads, length, dim = x_BGND.shape
    whole = x_BGND.new_empty(rows, heads, length + room, dim)
    whole[:, :, :length] = x_BGND
    return whole


def has_tokens(layer: Any) -> bool:
    """Whether it is a plain layer that grows by one token a step; sliding ones drop some."""
    return type(layer) is DynamicLayer and isinstance(layer.keys, Tensor)


def stack(filled: Sequence[Prefilled | None], model: Any) -> Stack:
    """Rows in order; the same Prefilled several times is stored once. None, for all rows or none:
    nothing before the first sparse token."""
    first = filled[0]
    if first is None:
        return Stack(DynamicCache(config=model.config), (0,) * len(filled), None)
    rows = [row for row in filled if row is not None]
    assert len(rows) == len(filled), "rows with and without a prefill do not share a batch"
    lengths = tuple(len(row.ids) - 1 for row in rows)
    cache = copy.copy(first.cache)
    cache.layers = [
        stack_layers([row.cache.layers[i] for row in rows]) for i in range(len(cache.layers))
    ]
    queries = {
        i: torch.stack([row.prompt_queries[i] for row in rows]) for i in first.prompt_queries
    }
    return Stack(cache, lengths, queries)


def stack_layers(layers: Sequence[Any]) -> Any:
    """One layer of a cache, left-padded with zeros; a sliding layer's rows must be equally long."""
    whole = copy.copy(layers[0])
    if all(layer is layers[0] for layer in layers):
        whole.keys = whole.keys.expand(len(layers), -1, -1, -1)
        whole.values = whole.values.expand(len(layers), -1, -1, -1)
        return whole
    longest = max(layer.keys.shape[2] for layer in layers)
    whole.keys = torch.cat([padded(layer.keys, longest) for layer in layers])
    whole.values = torch.cat([padded(layer.values, longest) for layer in layers])
    return whole


def padded(x_BGND: Tensor, length: int) -> Tensor:
    return torch.nn.functional.pad(x_BGND, (0, 0, length - x_BGND.shape[2], 0))


@dataclass
class Decoder:
    """A fork of a stack that grows as tokens are fed to all its rows."""

    model: Any
    cache: Any
    live_BN: Tensor | None

    @staticmethod
    def of(model: Any, rows: Stack, room: int) -> Decoder:
        """room: tokens that will be fed, about."""
        return Decoder(model, rows.fork(room), rows.live_BN(model.device))

    @torch.inference_mode()
    def feed(self, ids_BT: Tensor) -> Tensor:
        """Feed T tokens to every row in one forward. Returns the logits that follow the last: [B,
        vocab], float32."""
        ids_BT = ids_BT.to(self.model.device)
        keywords = {cache_keyword(self.model): self.cache}
        if self.live_BN is not None:
            more = self.live_BN.new_ones(ids_BT.shape)
            self.live_BN = torch.cat([self.live_BN, more], 1)
            keywords["attention_mask"] = self.live_BN.long()
            position_BN = self.live_BN.cumsum(-1) - 1
            keywords["position_ids"] = position_BN[:, -ids_BT.shape[1] :]
        out = self.model(ids_BT, **keywords, use_cache=True, logits_to_keep=1)
        return out.logits[:, -1].float()
