"""Finished runs -> pictures and one page: `python -m sparse_eval.report PATH…`."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from sparse_eval.reporting.compare import (
    Comparison,
    compare,
    comparison_section,
    print_comparison,
    tables_of,
)
from sparse_eval.reporting.dashboard import dashboard, picture
from sparse_eval.reporting.export import export, export_comparison
from sparse_eval.reporting.page_live import (
    fidelity_sections,
    latency_sections,
    live_page,
    lm_eval_sections,
    needle_sections,
)
from sparse_eval.reporting.page_reading import is_reading, reading_section
from sparse_eval.reporting.plots import also_as, recall_by_budget, recall_curve, recall_heatmap
from sparse_eval.reporting.plots_density import choosing_policies, density_heatmap
from sparse_eval.reporting.plots_fidelity import fidelity_curve
from sparse_eval.reporting.plots_frontier import frontiers, lse_curve
from sparse_eval.reporting.plots_latency import latency_pictures
from sparse_eval.reporting.plots_lm_eval import lm_eval_pictures
from sparse_eval.reporting.plots_needle import needle_pictures
from sparse_eval.reporting.summarise import split_settings
from sparse_eval.reporting.summarise_fidelity import split_fidelity
from sparse_eval.reporting.summarise_lm_eval import split_lm_eval
from sparse_eval.reporting.summarise_needle import split_needle
from sparse_eval.results import load, row_sources, write_parquet
from sparse_eval.storage.files import write_atomic
from sparse_eval.terminal import make_console

LIVE_TASKS = {"needle", "fidelity", "lm_eval", "latency"}
VECTOR = ("pdf", "svg")
FORMATS = ("html", *VECTOR, "latex", "csv")
REPORT_WIDTH = 200
PROVENANCE = '\n<section id="provenance">'


def write_report(folder: Path | str) -> Path:
    """rows.parquet, plots/*.png and report.html of a run's or a sweep's folder, from its rows.

    Returns the page's path. Raises ValueError where there are no rows."""
    folder = Path(folder)
    return report_of([folder], folder)


def report_of(
    places: Sequence[Path | str],
    folder: Path,
    formats: Sequence[str] = ("html",),
    comparison: Comparison | None = None,
) -> Path:
    """One report, in `folder`, from the rows of all places; jobs of a sweep count one by one.

    formats: of FORMATS. comparison: a section of the page. Returns the page's path; where html is
    not asked for, the folder of the files."""
    sources = [job for place in places for job in jobs_of(Path(place))]
    rows = load(sources)
    write_parquet(rows, folder / "rows.parquet")
    with also_as([name for name in formats if name in VECTOR]):
        pictures = draw(rows, folder / "plots") if {"html", *VECTOR} & set(formats) else []
    runs = [summary_of(source, folder) for source in sources]
    commands = list(dict.fromkeys(str(run["command"]) for run in runs if run.get("command")))
    export(rows, folder / "tables", formats, commands)
    if comparison is not None:
        export_comparison(tables_of(comparison), folder / "tables", formats)
    if "html" not in formats:
        return folder
    page = page_of(rows, runs, pictures)
    if comparison is not None:
        section = comparison_section(comparison, [str(place) for place in places])
        page = page.replace("<main>", f"<main>\n{section}", 1)
    write_atomic(folder / "report.html", page.encode())
    return folder / "report.html"


def page_of(rows: pd.DataFrame, runs: Sequence[Mapping[str, Any]], pictures: Sequence[Path]) -> str:
    """The interactive page where there is recall of its own, with the live tasks' tables below;
    the live tasks' page where there is not (a needle run's recall belongs to its answers)."""
    is_live = rows["task"].isin(LIVE_TASKS)
    recall = rows[rows["task"] == "recall"]
    if is_live.any() and "needle_kind" in recall:
        recall = recall[recall["needle_kind"].isna()]
    if not len(recall):
        return live_page(rows, runs, [path for path in pictures if not is_reading(path)])
    reading = reading_section(recall, pictures)
    pictures = [path for path in pictures if not is_reading(path)]
    if not is_live.any():
        page = dashboard(rows, runs, pictures)
        return page.replace('<section id="provenance">', reading + PROVENANCE, 1)
    live = rows[is_live]
    tasks = set(live["task"])
    sections = needle_sections(live) if "needle" in tasks else []
    sections += fidelity_sections(live) if "fidelity" in tasks else []
    sections += lm_eval_sections(live) if "lm_eval" in tasks else []
    sections += latency_sections(live) if "latency" in tasks else []
    shown = [path for path in pictures if not path.stem.startswith("recall")]
    figures = "".join(f"<figure>{picture(path)}</figure>" for path in shown)
    sections.append(f'<section><div class="head"><h2>Pictures</h2></div>{figures}</section>')
    answers = live[live["task"] == "needle"] if "needle" in tasks else None
    page = dashboard(recall, runs, [path for path in pictures if path not in shown], answers)
    below = "\n".join([reading, *sections])
    return page.replace('<section id="provenance">', below + PROVENANCE, 1)


def jobs_of(place: Path) -> list[Path]:
    """The folders below that hold rows of their own, else the place itself: a sweep's parquet file
    is made from its jobs and never read in their stead. ValueError where there are none."""
    below = sorted({path.parent for path in place.glob("*/**/rows.jsonl")})
    sources = below or row_sources([place])
    if not sources:
        raise ValueError(f"no rows in {place}: expected folders with rows.jsonl or rows.parquet")
    return sources


def draw(rows: pd.DataFrame, folder: Path) -> list[Path]:
    """The pictures of each task and setting; several settings carry their name in the file's."""
    tasks = set(rows["task"])
    pictures: list[Path] = []
    for name, part in split_needle(rows).items() if "needle" in tasks else ():
        pictures += needle_pictures(rows, part, folder, file_end(name))
    for name, part in split_fidelity(rows).items() if "fidelity" in tasks else ():
        pictures.append(fidelity_curve(part, folder / f"fidelity{file_end(name)}.png"))
    for name, part in split_lm_eval(rows).items() if "lm_eval" in tasks else ():
        pictures += lm_eval_pictures(part, folder, file_end(name))
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
        pictures.append(frontiers(part, folder / f"read_frontiers{end}"))
        pictures.append(lse_curve(part, folder / f"read_lse{end}"))
        for policy in choosing_policies(part):
            name = f"read_density_{file_end(policy).strip('_')}{end}"
            pictures.append(density_heatmap(part, folder / name, policy))
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
    parser.add_argument(
        "paths",
        nargs="+",
        metavar="PATH",
        help="folder of a run or of a sweep; two are compared, sample by sample",
    )
    parser.add_argument("--out", type=Path, help="folder of the report (default: the one PATH)")
    parser.add_argument(
        "--format", default="html", help=f"any of {','.join(FORMATS)}, with commas (default: html)"
    )
    options = parser.parse_args(arguments)
    try:
        formats = formats_of(options.format)
        folder = options.out or default_folder(options.paths)
        comparison = compared(options.paths) if len(options.paths) == 2 else None
        if comparison is not None:
            print_comparison(comparison, make_console(REPORT_WIDTH))
        print(report_of(options.paths, folder, formats, comparison))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def formats_of(text: str) -> list[str]:
    formats = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in formats if name not in FORMATS]
    if unknown or not formats:
        raise ValueError(f"--format must be of {', '.join(FORMATS)}, got {text!r}")
    return formats


def compared(paths: Sequence[str]) -> Comparison:
    """A against B. Raises ValueError, with one line, where they cannot be paired."""
    rows = [load(jobs_of(Path(path))) for path in paths]
    configs = [dict(summary_of(jobs_of(Path(p))[0], Path(p)).get("config") or {}) for p in paths]
    return compare(rows[0], rows[1], configs[0], configs[1])


def default_folder(paths: Sequence[str]) -> Path:
    """The place itself; for several, a folder named after them in the folder they share."""
    if len(paths) > 1:
        places = [Path(path).resolve() for path in paths]
        shared = Path(os.path.commonpath(places))
        names = [str(p.relative_to(shared)) if p != shared else p.name for p in places]
        short = [re.sub(r"[^\w.-]+", "-", name)[-80:] for name in names]
        if len(places) == 2:
            return shared / f"report_{short[0]}_against_{short[1]}"
        digest = hashlib.sha256("\n".join(map(str, places)).encode()).hexdigest()[:6]
        return shared / f"report_{short[0]}_and_{len(places) - 1}_more_{digest}"
    if not os.path.isdir(paths[0]):
        raise ValueError(f"PATH must be a folder with a run's rows, got {paths[0]}")
    return Path(paths[0])


if __name__ == "__main__":
    sys.exit(main())
