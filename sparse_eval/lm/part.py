"""One lm-eval task of a run: the documents that are measured, and those of its dense gate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sparse_eval.lm.requests import Sample


@dataclass(frozen=True)
class Part:
    """One lm-eval task. gate: samples that dense alone answers; on: "own" ones, "measured", "none".
    chance: what guessing scores."""

    name: str
    task: Any
    samples: list[Sample]
    gate: list[Sample]
    on: str
    chance: float

    def num_cells(self, num_arms: int) -> int:
        return len(self.samples) * num_arms + len(self.gate)
