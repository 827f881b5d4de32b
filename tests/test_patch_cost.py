"""What patching itself adds to a decode step, in launched operations: policy and kernel aside."""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sparse_eval import patched
from sparse_eval.core import AttentionCall
from sparse_eval.policies.base import Policy, Selection, State
from sparse_eval.prefill import decode_step, prefill
from sparse_eval.storage.columns import names
from tests.test_live import build
from tests.tiny import random_ids

VIEWS = names(
    "view transpose unsqueeze slice select expand permute _unsafe_view detach t alias split"
    " split_with_sizes as_strided reshape unflatten"
)


class Launches(TorchDispatchMode):
    """Counts operations that do work; views of tensors are free."""

    def __init__(self) -> None:
        super().__init__()
        self.counted: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).split(".")[1]
        if name not in VIEWS:
            self.counted[name] += 1
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True, kw_only=True)
class Constant(Policy[State]):
    """A choice that costs nothing to make."""

    def select(self, call: AttentionCall, state: State, budget: int | None) -> Selection:
        return CHOICE


CHOICE = Selection(
    torch.tensor([[[0, 5, 6]] * 2], dtype=torch.int32), torch.full((1, 2), 3, dtype=torch.int32), 16
)


def launches(model: Any, filled: Any, token: int, context: Any) -> int:
    with context:
        cache = filled.fork()
        for _ in range(2):  # the first step sets up state and counters
            decode_step(model, cache, token)
        with Launches() as launched:
            decode_step(model, cache, token)
        return sum(launched.counted.values())


def test_patching_adds_a_few_launches_a_layer(monkeypatch):
    model = build("qwen2")
    ids = random_ids(100)[0]
    filled = prefill(model, ids)
    stock = launches(model, filled, 5, contextlib.nullcontext())

    def free(q: Any, k: Any, v: Any, *args: Any, **options: Any) -> Any:
        return q, None

    monkeypatch.setattr("sparse_eval.live.sparse_decode", free)
    patch = patched(model, Constant(), budget=48, dense_layers=[0])
    own = launches(model, filled, 5, patch) - stock
    layers = model.config.num_hidden_layers - 1
    # where each layer's rows lie is worked out once a step; a layer keeps a copy of its page list
    # and no longer runs the model's own attention
    assert own <= 4 + layers
    assert own / stock < 0.1
