"""Finished runs -> pictures and one page: `python -m sparse_eval.report PATH…`."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from sparse_eval.dashboard import dashboard
from sparse_eval.files import write_atomic
from sparse_eval.page_live import live_page
from sparse_eval.plots import recall_by_budget, recall_curve, recall_heatmap
from sparse_eval.plots_fidelity import fidelity_curve
from sparse_eval.plots_latency import latency_pictures
from sparse_eval.plots_needle import needle_pictures
from sparse_eval.results import load, row_sources, write_parquet
from sparse_eval.summarise import split_settings
from sparse_eval.summarise_fidelity import split_fidelity
from sparse_eval.summarise_needle import split_needle

LIVE_TASKS = {"needle", "fidelity", "latency"}


def write_report(folder: Path | str) -> Path:
    """rows.parquet, plots/*.png and report.html of a run's or a sweep's folder, from its rows.

    Returns the page's path. Raises ValueError where there are no recall rows."""
    folder = Path(folder)
    return report_of([folder], folder)


def report_of(places: Sequence[Path | str], folder: Path) -> Path:
    """One report, in `folder`, from the rows of all places; jobs of a sweep count one by one."""
    sources = [job for place in places for job in jobs_of(Path(place))]
    rows = load(sources)
    write_parquet(rows, folder / "rows.parquet")
    pictures = draw(rows, folder / "plots")
    runs = [summary_of(source, folder) for source in sources]
    is_live = bool(set(rows["task"]) & LIVE_TASKS)
    page = (live_page if is_live else dashboard)(rows, runs, pictures)
    write_atomic(folder / "report.html", page.encode())
    return folder / "report.html"


def jobs_of(place: Path) -> list[Path]:
    """The folders below that hold rows of their own, else the place itself: a sweep's parquet file
    is made from its jobs and never read in their stead."""
    below = sorted({path.parent for path in place.glob("*/**/rows.jsonl")})
    return below or row_sources([place])


def draw(rows: pd.DataFrame, folder: Path) -> list[Path]:
    """The pictures of each task and setting; several settings carry their name in the file's."""
    tasks = set(rows["task"])
    pictures: list[Path] = []
    for name, part in split_needle(rows).items() if "needle" in tasks else ():
        pictures += needle_pictures(rows, part, folder, file_end(name))
    for name, part in split_fidelity(rows).items() if "fidelity" in tasks else ():
        pictures.append(fidelity_curve(part, folder / f"fidelity{file_end(name)}.png"))
    if "latency" in tasks:
        pictures += latency_pictures(rows[rows["task"] == "latency"], folder)
    return pictures + (draw_recall(rows, folder) if "recall" in tasks else [])


def file_end(setting: str) -> str:
    return f"_{re.sub(r'[^a-zA-Z0-9.-]+', '_', setting).strip('_')}" if setting else ""


def draw_recall(rows: pd.DataFrame, folder: Path) -> list[Path]:
    pictures = []
    for name, part in split_settings(rows).items():
        end = f"{file_end(name)}.png"
        pictures.append(recall_curve(part, folder / f"recall_curve{end}"))
        if part["budget_tokens"].nunique() > 1:
            pictures.append(recall_by_budget(part, folder / f"recall_by_budget{end}"))
        pictures.append(recall_heatmap(part, folder / f"recall_heatmap{end}"))
    return pictures


def summary_of(source: Path, below: Path) -> Mapping[str, Any]:
    """A run's summary.json with the folder's name; an unfinished run has none yet."""
    source = source if source.is_dir() else source.parent
    name = source.name if source == below else os.path.relpath(source, below)
    path = source / "summary.json"
    try:
        summary = json.loads(path.read_text()) if path.exists() else {}
    except ValueError as error:
        raise ValueError(f"{path}: expected JSON, {error}") from error
    return {**summary, "folder": name}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m sparse_eval.report", description=__doc__)
    parser.add_argument("paths", nargs="+", metavar="PATH", help="folder of a run or of a sweep")
    parser.add_argument("--out", type=Path, help="folder of the report (default: the one PATH)")
    options = parser.parse_args(arguments)
    try:
        folder = options.out or default_folder(options.paths)
        print(report_of(options.paths, folder))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def default_folder(paths: Sequence[str]) -> Path:
    """The place itself; for several, `report` in the folder they share."""
    if len(paths) > 1:
        return Path(os.path.commonpath([Path(path).resolve() for path in paths])) / "report"
    if not Path(paths[0]).is_dir():
        raise ValueError(f"PATH must be a folder with a run's rows, got {paths[0]}")
    return Path(paths[0])


if __name__ == "__main__":
    sys.exit(main())
