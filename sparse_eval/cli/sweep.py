"""The end of a sweep: rows of all its jobs, pictures, one page, and the list of what failed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparse_eval.cli.failure import read_failure
from sparse_eval.report import write_report
from sparse_eval.storage.files import to_json, write_atomic

FAILURES_FILE = "failures.json"


@dataclass(frozen=True)
class SweepResult:
    """page: None where no job left a row. failures: lines of failures.json."""

    folder: Path
    num_jobs: int
    failures: list[dict[str, Any]]
    page: Path | None


def finish_sweep(folder: Path, jobs: Sequence[Sequence[str]]) -> SweepResult:
    """Writes the sweep folder's rows.parquet, plots/, report.html and failures.json.

    jobs: the overrides of each, in the launcher's order. Raises OSError where nothing can be
    written; ValueError where the jobs' rows cannot be put together."""
    failures = failures_of(folder, jobs)
    write_atomic(folder / FAILURES_FILE, (to_json(failures, indent=2) + "\n").encode())
    has_rows = any(path.stat().st_size for path in folder.glob("*/rows.jsonl"))
    page = write_report(folder) if has_rows else None
    return SweepResult(folder, len(jobs), failures, page)


def failures_of(folder: Path, jobs: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
    """Jobs that failed, ended without a word (killed), or never began."""
    folders = job_folders(folder)
    failures = []
    for number, overrides in enumerate(jobs):
        here = folders.get(number)
        failure: dict[str, Any] | None
        if here is None:
            failure = {"error": "never started", "traceback": "", "parts": []}
        elif (failure := read_failure(here)) is None and not (here / "summary.json").is_file():
            failure = {"error": "ended without a word: killed?", "traceback": "", "parts": []}
        if failure is not None:
            name = here.name if here else None
            failures.append({"job": number, "folder": name, "overrides": list(overrides)} | failure)
    return failures


def job_folders(folder: Path) -> dict[int, Path]:
    """Subfolders of jobs by their number, which their names begin with; of two, left by two sweeps
    in one folder, the one that was written last."""
    found = {}
    for path in sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns):
        number = re.match(r"(\d+)_", path.name + "_")
        if number and path.is_dir():
            found[int(number[1])] = path
    return found
