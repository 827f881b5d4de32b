"""What a task needs around it: the measuring class, and how its run and results are told.

A new task is a class in tasks/, a yaml in conf/task/ and a line here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from rich.console import Console

from sparse_eval.cli.config import Settings
from sparse_eval.cli.progress import Progress
from sparse_eval.core import Row
from sparse_eval.reporting import (
    show_fidelity,
    show_latency,
    show_lm_eval,
    show_needle,
    show_recall,
)
from sparse_eval.results import CellStore
from sparse_eval.tasks.fidelity import Fidelity
from sparse_eval.tasks.latency import Latency
from sparse_eval.tasks.lm_eval import LmEval
from sparse_eval.tasks.needle import Needle
from sparse_eval.tasks.recall import Recall


class Task(Protocol):
    """Measures; run yields the rows of one finished cell at a time. facts: further keys of
    summary.json."""

    def run(self, store: CellStore) -> Iterator[list[Row]]: ...
    def facts(self) -> dict[str, Any]: ...


class Show(Protocol):
    """announce: lines said before anything slow starts. headline: keys of summary.json.
    samples: lines of samples.jsonl that a cell's rows make."""

    def announce(self, settings: Settings) -> list[str]: ...
    def headline(self, rows: list[Row]) -> dict[str, Any]: ...
    def samples(self, rows: list[Row]) -> list[dict[str, Any]]: ...
    def print_results(self, rows: list[Row], settings: Settings, console: Console) -> None: ...


@dataclass(frozen=True)
class Kit:
    """has_samples: the task has answers, so the run has a samples.jsonl."""

    task: Callable[[Settings, Progress], Task]
    show: Show
    has_samples: bool = True


KITS = {
    "recall": Kit(Recall, show_recall, has_samples=False),
    "needle": Kit(Needle, show_needle),
    "fidelity": Kit(Fidelity, show_fidelity),
    "lm_eval": Kit(LmEval, show_lm_eval),
    "latency": Kit(Latency, show_latency, has_samples=False),
}
