"""Made-up needle rows for tests of tables and pictures. Nothing here was measured on a model."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

NAN = float("nan")
FOUND = {"full": 1.0, "quest": 0.8, "window": 0.0, "random": 0.1, "snapkv": 0.5}


def luck(*parts: Any) -> float:
    """In [0, 1), the same for the same parts."""
    return int(hashlib.sha256(repr(parts).encode()).hexdigest()[:8], 16) / 2**32


def answer_row(
    policy: str, budget: float, depth: float, sample: int, outcome: str, **more: Any
) -> dict[str, Any]:
    context = more.get("context", 2048)
    share = 1.0 if policy == "full" else budget / context
    name = f"passcode/{context}/{depth:g}/{sample}"
    return {
        "schema": 1,
        "task": "needle",
        "sample": name,
        "prompt_hash": hashlib.sha256(f"{name}{more.get('role')}".encode()).hexdigest()[:16],
        "prompts": "docs",
        "model": "synthetic-135m",
        "revision": "none",
        "weights": "Q4_1",
        "policy": policy,
        "policy_config": {"page_size": 16},
        "adaptive": False,
        "budget_tokens": budget,
        "page_size": 16,
        "context": context,
        "protocol": "decode",
        "dense_layers": [0, 1],
        "backend": "torch",
        "device": "cpu",
        "dtype": "float32",
        "seed": 0,
        "capture_hash": name,
        "cell_key": hashlib.sha256(f"{policy}{budget}{name}{more}".encode()).hexdigest(),
        "role": "measured",
        "needle_kind": "passcode",
        "depth": depth,
        "depth_realised": depth,
        "wording": sample % 3,
        "chat": "none",
        "outcome": outcome,
        "output": " 48217." if outcome == "correct" else f" {policy}.",
        "dense_output": " 48217.",
        "answer_nll": 0.2 if outcome == "correct" else 9.0,
        "page_hit": share,
        "page_hit_chance": share,
        "page_hit_any": share,
        "page_hit_any_chance": share,
        "heads_above_half": 84 * share,
        "heads": 84,
        "tokens_read": share * context,
        "density": share,
        "model_read_fraction": min(1.0, share + 0.1) if policy != "full" else 1.0,
        "gated": False,
        "stock_nll": 0.2 if policy == "full" else NAN,
        "stock_agreement": 1.0 if policy == "full" else NAN,
        **more,
    }


def layer_rows(answer: Mapping[str, Any]) -> list[dict[str, Any]]:
    kept = {k: v for k, v in answer.items() if k not in ("outcome", "answer_nll", "stock_nll")}
    return [
        kept
        | {
            "layer": layer,
            "page_hit_heads": [luck(answer["policy"], layer, head) for head in range(3)],
        }
        for layer in range(2, 30)
    ]


def needle_run(
    *,
    depths: Sequence[float] = (0.1, 0.5, 0.9),
    contexts: Sequence[int] = (2048,),
    budgets: Sequence[int] = (96, 256),
    n: int = 8,
    gated: Sequence[float] = (),
    policies: Sequence[str] = ("quest", "window", "random", "snapkv"),
) -> list[dict[str, Any]]:
    """A grid as a run leaves it: dense first, then every policy and budget."""
    rows = []
    arms = [("full", NAN), *((policy, budget) for policy in policies for budget in budgets)]
    for context in contexts:
        for depth in depths:
            for sample in range(n):
                for policy, budget in arms:
                    draw = luck("found", context, depth, sample, policy, budget)
                    outcome = "correct" if draw < FOUND[policy] else "fabricated"
                    more = {"context": context, "gated": depth in gated}
                    row = answer_row(policy, budget, depth, sample, outcome, **more)
                    rows += [row, *layer_rows(row)]
    return rows
