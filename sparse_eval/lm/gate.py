"""Whether dense attention does a task well enough for a comparison on it to mean anything.

The floor is chance plus a margin (less it, where a score is better when lower), or one that was
given. It is judged on documents that are not
compared where the task has more than those; shares of successes bound any score in [0, 1].
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sparse_eval.lm.config import FloorConfig, is_finite
from sparse_eval.lm.requests import Sample, choices
from sparse_eval.lm.scoring import Metric
from sparse_eval.reporting.proportions import wilson_lower

NAN = float("nan")


@dataclass(frozen=True)
class Gate:
    """on: "own" documents, or the "measured" ones where there are no others; "none" were asked.
    chance: NaN where nobody says what guessing scores. floor: the worst score that is good enough,
    as it was given or from chance; NaN where none is known. value: dense's score there. lower: its
    one-sided bound on the worse side: from above where a score is better when lower."""

    chance: float
    floor: float
    n: int
    on: str
    value: float = NAN
    lower: float = NAN
    higher_is_better: bool = True

    @property
    def gated(self) -> bool:
        """True: nothing here is ranked."""
        if self.higher_is_better:
            return not self.lower >= self.floor
        return not self.lower <= self.floor

    @property
    def line(self) -> str:
        """Why it is gated."""
        own = "task.gate.floors={task: score} gives it one"
        if not self.n:
            return "no documents were asked for its dense gate"
        if math.isnan(self.floor):
            return f"a score that is better when lower has no floor that is known: {own}"
        if self.on == "none":
            return f"{self.n} gate documents cannot show a score of {self.floor:.2f}"
        dense = f"dense scores {self.value:.2f} on {self.n} {self.on} documents"
        if math.isnan(self.lower):
            return f"{dense}, and a score of such a kind has no floor that is known: {own}"
        chance = "" if math.isnan(self.chance) else f" (chance {self.chance:.2f})"
        if self.higher_is_better:
            return f"{dense} (lower bound {self.lower:.2f}), its floor is {self.floor:.2f}{chance}"
        return f"{dense} (upper bound {self.lower:.2f}), it may be {self.floor:.2f} at most{chance}"


def is_higher_better(task: Any) -> bool:
    """Of the task's first metric."""
    directions = task.higher_is_better()
    listed = [entry["metric"] for entry in task.get_config("metric_list") or []]
    first = next((metric for metric in (*listed, *directions) if metric in directions), None)
    return directions.get(first) is not False


def chance_of(task: Any, samples: Sequence[Sample]) -> float:
    """What guessing scores: the task's own word for it, one choice of those given, or nothing. NaN
    for a score that is better when lower, which a guess does not bring to nothing."""
    metadata = task.get_config("metadata") or {}
    stated = metadata.get("chance") if isinstance(metadata, dict) else None
    if stated is not None:
        if not is_finite(stated):
            name = task.get_config("task")
            raise ValueError(
                f"lm-eval task {name}: metadata chance must be a number, got {stated!r}"
            )
        return float(stated)
    if not is_higher_better(task):
        return NAN
    if task.OUTPUT_TYPE == "multiple_choice":
        return sum(1 / len(choices(task, sample.asks)) for sample in samples) / len(samples)
    return 0.0


def judge(
    name: str,
    chance: float,
    primary: Metric | None,
    on: str,
    config: FloorConfig,
    *,
    higher_is_better: bool = True,
) -> Gate:
    """primary: dense's on the gate's documents; None: none were asked. higher_is_better: of the
    task's first metric."""
    floor = config.floor(name, chance, higher_is_better=higher_is_better)
    if primary is None:
        return Gate(chance, floor, config.n, "none", higher_is_better=higher_is_better)
    values, value = primary.measured, primary.value
    lower = NAN
    if values and min(values) >= 0 and max(values) <= 1:
        lower = share_bound(values, config.confidence, higher_is_better=higher_is_better)
    elif name in config.floors:  # no bound is known for such a score: it must do itself
        lower = value
    n = len(values) or len(primary.values)
    return Gate(chance, floor, n, on, value, lower, higher_is_better)


def share_bound(values: Sequence[float], confidence: float, *, higher_is_better: bool) -> float:
    """The one-sided bound, on the worse side, of the mean of scores in [0, 1]."""
    if higher_is_better:
        return wilson_lower(sum(values), len(values), confidence)
    return 1 - wilson_lower(len(values) - sum(values), len(values), confidence)


def is_possible(name: str, chance: float, config: FloorConfig, *, higher_is_better: bool) -> bool:
    """Whether even a perfect record on the gate's documents would reach the floor."""
    if config.n <= 0 or name in config.floors:
        return config.n > 0
    best = [float(higher_is_better)] * config.n
    bound = share_bound(best, config.confidence, higher_is_better=higher_is_better)
    floor = config.floor(name, chance, higher_is_better=higher_is_better)
    return bound >= floor if higher_is_better else bound <= floor
