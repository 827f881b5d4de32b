"""`measure`: a captured cache + policies + budgets -> a DataFrame. No model, no Hydra."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparse_eval.budgets import Budget, resolve_budget
from sparse_eval.capture import CapturedKV, load_capture
from sparse_eval.core import Row
from sparse_eval.device import resolve_backend, resolve_device
from sparse_eval.evaluator import Evaluator
from sparse_eval.policies.base import Policy, check_policy

if TYPE_CHECKING:
    import pandas as pd


def measure(
    capture: CapturedKV | str | Path,
    policies: Sequence[Policy],
    budgets: Sequence[Budget],
    *,
    dense_layers: Sequence[int] = (0, 1),
    device: str = "auto",
    backend: str = "auto",
) -> pd.DataFrame:
    """Measure policies at budgets on a captured cache: one row per policy, budget, layer, KV head.

    budgets: tokens (int) or fractions of the prompt in (0, 1); adaptive policies run once, with
    none. dense_layers stay dense. Columns as in the README's recall table. Raises TypeError or
    ValueError in one line for anything else.
    """
    import pandas as pd

    policies = [check_policy(policy) for policy in listed("policies", policies, "[Quest()]")]
    needs_none = all(policy.adaptive for policy in policies)
    budgets = listed("budgets", budgets, "[512, 2048]", may_be_empty=needs_none)
    device = resolve_device(device)
    if not isinstance(capture, CapturedKV):
        capture = load_capture(capture)
    capture = capture.to(device)
    evaluator = Evaluator(capture, resolve_backend(backend, device), tuple(dense_layers))
    rows: list[Row] = []
    for policy in policies:
        wanted = (
            [None]
            if policy.adaptive
            else [resolve_budget(b, capture.prompt_length) for b in budgets]
        )
        for budget in wanted:
            common = common_columns(evaluator, policy, budget)
            rows += [common | row for row in evaluator.cell(policy, budget)]
        evaluator.forget_states(policy)
    return pd.DataFrame(rows)


def listed(name: str, given: Any, example: str, *, may_be_empty: bool = False) -> list[Any]:
    """What was given as a list; TypeError where it is none, ValueError where it is empty."""
    if not isinstance(given, Iterable) or isinstance(given, str | bytes | Mapping):
        raise TypeError(f"{name} must be a list such as {example}, got {given!r}")
    values = list(given)
    if not values and not may_be_empty:
        raise ValueError(f"{name} must be a list such as {example}, got an empty one")
    return values


def common_columns(evaluator: Evaluator, policy: Policy, budget: int | None) -> Row:
    """The columns every row has that a capture and a policy determine."""
    meta = evaluator.capture.meta
    return {
        "task": "recall",
        "sample": meta.get("sample", 0),
        "prompt_hash": meta.get("prompt_hash", ""),
        "prompts": meta.get("prompt_source", ""),
        "model": meta.get("model", ""),
        "revision": meta.get("revision", ""),
        "weights": meta.get("weights", ""),
        "policy": type(policy).__name__.lower(),
        "policy_config": policy.config(),
        "adaptive": policy.adaptive,
        "budget_tokens": float("nan") if budget is None else budget,
        "page_size": policy.page_size,
        "sink_pages": policy.sink_pages,
        "local_pages": policy.local_pages,
        "context": evaluator.prompt_length,
        "protocol": "decode",
        "dense_layers": list(evaluator.dense_layers),
        "backend": evaluator.backend,
        "device": str(evaluator.capture.lengths_T.device.type),
        "dtype": meta.get("dtype", ""),
        "capture_hash": meta.get("capture_hash", ""),
    }
