"""Whether dense attention answers well enough for a comparison to mean anything.

Decided per (context, depth, kind) on samples of the gate's own seeds, by the one-sided lower bound
of dense accuracy: choosing by the compared samples themselves would favour dense luck.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sparse_eval.needle.config import GateConfig
from sparse_eval.reporting.proportions import wilson_lower


@dataclass(frozen=True)
class Gate:
    """passed: None where too few samples were asked for any result to pass."""

    correct: int
    n: int
    lower: float
    passed: bool | None

    @property
    def gated(self) -> bool:
        """True: nothing here is ranked."""
        return not self.passed


def can_pass(config: GateConfig) -> bool:
    """Whether even a perfect record would reach the floor."""
    return config.n > 0 and wilson_lower(config.n, config.n, config.confidence) >= config.dense_min


def not_run_line(config: GateConfig) -> str:
    """Why the gate is not run, where it cannot pass."""
    samples = f"{config.n} gate sample" + ("" if config.n == 1 else "s")
    return (
        f"{samples} cannot show dense accuracy of {config.dense_min:g} even if all are right: the "
        "gate is not run and nothing is ranked"
    )


def judge(correct: Sequence[bool], config: GateConfig) -> Gate:
    if not correct:
        return Gate(0, 0, float("nan"), None)
    lower = wilson_lower(sum(correct), len(correct), config.confidence)
    return Gate(sum(correct), len(correct), lower, lower >= config.dense_min)
