"""Whether dense attention does a task well enough for a comparison on it to mean anything.

The floor is chance plus a margin, or one that was given. It is judged on documents that are not
compared where the task has more than those; shares of successes bound any score in [0, 1].
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sparse_eval.lm.config import FloorConfig
from sparse_eval.lm.requests import Sample, choices
from sparse_eval.lm.scoring import Metric
from sparse_eval.needle.gate import can_pass
from sparse_eval.reporting.proportions import wilson_lower

NAN = float("nan")


@dataclass(frozen=True)
class Gate:
    """on: "own" documents, or the "measured" ones where there are no others; "none" were asked.
    value: dense's score there. lower: its one-sided bound."""

    chance: float
    floor: float
    n: int
    on: str
    value: float = NAN
    lower: float = NAN

    @property
    def gated(self) -> bool:
        """True: nothing here is ranked."""
        return not self.lower >= self.floor

    @property
    def line(self) -> str:
        if not self.n:
            return "no documents were asked for its dense gate"
        if math.isnan(self.value):
            return f"{self.n} gate documents cannot show a score of {self.floor:.2f}"
        return (
            f"dense scores {self.value:.2f} on {self.n} {self.on} documents (lower bound "
            f"{self.lower:.2f}), its floor is {self.floor:.2f} (chance {self.chance:.2f})"
        )


def chance_of(task: Any, samples: Sequence[Sample]) -> float:
    """What guessing scores: the task's own word for it, one choice of those given, or nothing."""
    metadata = task.get_config("metadata") or {}
    if isinstance(metadata, dict) and isinstance(metadata.get("chance"), int | float):
        return float(metadata["chance"])
    if task.OUTPUT_TYPE == "multiple_choice":
        return sum(1 / len(choices(task, sample.asks)) for sample in samples) / len(samples)
    return 0.0


def judge(name: str, chance: float, primary: Metric | None, on: str, config: FloorConfig) -> Gate:
    """primary: dense's on the gate's documents; None: none were asked."""
    floor = config.floor(name, chance)
    if primary is None:
        return Gate(chance, floor, config.n, "none")
    values, value = primary.measured, primary.value
    lower = NAN
    if values and primary.higher_is_better and min(values) >= 0 and max(values) <= 1:
        lower = wilson_lower(sum(values), len(values), config.confidence)
    elif name in config.floors:  # no bound is known for such a score: it must do itself
        lower = value if primary.higher_is_better else -value
        floor = floor if primary.higher_is_better else -floor
    return Gate(chance, floor, len(values) or len(primary.values), on, value, lower)


def is_possible(name: str, chance: float, config: FloorConfig) -> bool:
    """Whether even a perfect record on the gate's documents would reach the floor."""
    return config.n > 0 and (name in config.floors or can_pass(config.gate(name, chance)))
