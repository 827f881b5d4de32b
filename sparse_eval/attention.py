"""The only file that touches transformers' attention: observe it, or put a policy in its place.

Both are context managers over transformers' AttentionInterface together with its mask interface
(a name without a mask function silently loses causality and padding); both registries and the
model's own setting are as before on exit, exceptions included. Importing this file patches nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

AttentionFunction = Callable[..., tuple[Tensor, Tensor | None]]

_serial = itertools.count()
_CHANGES_SOFTMAX = {
    "softcap": "soft-capped attention logits",
    "s_aux": "learned attention sinks",
    "position_bias": "an additive position bias",
}


@contextmanager
def routed(model: Any, function: AttentionFunction) -> Iterator[None]:
    """Route every attention call of `model` through function(module, q, k, v, mask, **kwargs)."""
    refuse_changed_softmax(model)
    before = model.config._attn_implementation
    name = f"sparse_eval_{next(_serial)}"
    AttentionInterface.register(name, function)
    AttentionMaskInterface.register(name, sdpa_mask)
    try:
        model.set_attn_implementation(name)
        if model.config._attn_implementation != name:
            raise ValueError(
                f"{type(model).__name__} does not dispatch attention through transformers' "
                "AttentionInterface, so its attention cannot be observed or replaced"
            )
        yield
    finally:
        model.set_attn_implementation(before)
        AttentionInterface._global_mapping.pop(name, None)
        AttentionMaskInterface._global_mapping.pop(name, None)


def refuse_changed_softmax(model: Any) -> None:
    """ValueError for models whose attention is not softmax(scale · q·k) alone."""
    config = model.config.get_text_config()
    if getattr(config, "attn_logit_softcapping", None):
        raise _refusal(model, "soft-capped attention logits")
    if any(hasattr(module, "sinks") for module in model.modules()):
        raise _refusal(model, "learned attention sinks")


def _refusal(model: Any, what: str) -> ValueError:
    return ValueError(
        f"{type(model).__name__} has {what}: not supported, mass recall is defined for a plain "
        "softmax over scale · q·k"
    )


def check_plain(module: Any, kwargs: dict[str, Any]) -> None:
    """ValueError if a call asks for more than softmax(scale · q·k)."""
    for key, what in _CHANGES_SOFTMAX.items():
        if kwargs.get(key) is not None:
            raise _refusal(module, what)


@dataclass
class ObservedLayer:
    """What one full-attention layer was given. key, value: the whole cache [G, n, D or E]."""

    scale: float
    key: Tensor = field(default_factory=lambda: torch.empty(0))
    value: Tensor = field(default_factory=lambda: torch.empty(0))
    queries: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)


@dataclass
class Observer:
    """Keeps the last prompt queries of each layer while prefilling, everything while decoding.

    Which phase runs is said by `decoding()`, never guessed from the query length: the last chunk of
    a prefill may be one token long.
    """

    num_prompt_queries: int
    layers: dict[int, ObservedLayer] = field(default_factory=dict)
    tails: dict[int, Tensor] = field(default_factory=dict)
    kinds: dict[int, str] = field(default_factory=dict)
    is_decoding: bool = False

    @contextmanager
    def decoding(self) -> Iterator[None]:
        self.is_decoding = True
        try:
            yield
        finally:
            self.is_decoding = False

    def __call__(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any
    ) -> tuple[Tensor, None]:
        check_plain(module, kwargs)
        out, _ = sdpa_attention_forward(module, query, key, value, mask, **kwargs)
        layer = module.layer_idx
        self.kinds[layer] = "sliding" if kwargs.get("sliding_window") else "full"
        if self.kinds[layer] == "full":
            if self.is_decoding:
                self._keep_step(layer, query, key, value, out, kwargs.get("scaling"))
            elif self.num_prompt_queries > 0:
                self._keep_tail(layer, query)
        return out, None

    def _keep_tail(self, layer: int, query: Tensor) -> None:
        seen = query[0].transpose(0, 1)[-self.num_prompt_queries :]  # [q, H, D]
        if len(seen) < self.num_prompt_queries and layer in self.tails:
            seen = torch.cat([self.tails[layer], seen])[-self.num_prompt_queries :]
        self.tails[layer] = seen.clone()

    def _keep_step(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, out: Tensor, scale: Any
    ) -> None:
        if query.shape[0] != 1 or query.shape[2] != 1:
            raise ValueError(
                f"a captured decode step has one row and one token, got {list(query.shape)}"
            )
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        seen = self.layers.setdefault(layer, ObservedLayer(scale))
        seen.key, seen.value = key[0], value[0]
        seen.queries.append(query[:, :, 0].clone())
        seen.outputs.append(out[:, 0].clone())

    def full(self) -> list[tuple[int, ObservedLayer]]:
        return sorted(self.layers.items())

    def prompt_queries(self) -> dict[int, Tensor]:
        return dict(sorted(self.tails.items()))

    def layer_kinds(self) -> list[str]:
        return [self.kinds[i] for i in sorted(self.kinds)]


@contextmanager
def observe(model: Any, observer: Observer) -> Iterator[Observer]:
    """Run the model's own SDPA attention and let the observer see each call."""
    with routed(model, observer):
        yield observer
