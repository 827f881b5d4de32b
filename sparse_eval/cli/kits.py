"""What a task needs around it: the measuring class, and how its run and results are told.

A new task is a class in tasks/, a yaml in conf/task/ and a line here.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from rich.console import Console

    from sparse_eval.cli.config import Settings
    from sparse_eval.cli.progress import Progress
    from sparse_eval.core import Row
    from sparse_eval.storage.cells import CellStore


class Task(Protocol):
    """Measures; run yields the rows of one finished cell at a time. facts: further keys of
    summary.json. A task with prompts has check_inputs too (cli/preflight.py)."""

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
    """Named by import path and imported on use: a run loads its own task's libraries, no other's.

    task_path: "package.module:Class". show_path: a module. has_samples: the task has answers, so
    the run has a samples.jsonl."""

    task_path: str
    show_path: str
    has_samples: bool = True

    @property
    def task(self) -> Callable[[Settings, Progress], Any]:
        return pkgutil.resolve_name(self.task_path)

    @property
    def show(self) -> Show:
        return pkgutil.resolve_name(self.show_path)


def kit(task: str, name: str, *, has_samples: bool = True) -> Kit:
    """Of tasks/<name>.py and reporting/show_<name>.py. task: the class's name."""
    return Kit(
        f"sparse_eval.tasks.{name}:{task}",
        f"sparse_eval.reporting.show_{name}",
        has_samples=has_samples,
    )


KITS = {
    "recall": kit("Recall", "recall", has_samples=False),
    "needle": kit("Needle", "needle"),
    "fidelity": kit("Fidelity", "fidelity"),
    "lm_eval": kit("LmEval", "lm_eval"),
    "latency": kit("Latency", "latency", has_samples=False),
}
