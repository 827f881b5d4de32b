"""Recall at equal tokens and at equal bytes: `python -m sparse_eval.frontiers PATH…`."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console
from rich.table import Table

from sparse_eval.report import REPORT_WIDTH, jobs_of
from sparse_eval.reporting.frontiers import AXES, equal_shares, points, ranking_sentence
from sparse_eval.reporting.summarise import split_settings
from sparse_eval.results import load
from sparse_eval.storage.files import write_atomic
from sparse_eval.terminal import make_console

AT = "0.05,0.1,0.2,0.3"


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a table per setting and axis. Returns 2 for arguments that cannot be met."""
    parser = argparse.ArgumentParser(prog="python -m sparse_eval.frontiers", description=__doc__)
    parser.add_argument("paths", nargs="+", metavar="PATH", help="folders of runs or sweeps")
    parser.add_argument(
        "--at",
        default=AT,
        metavar="SHARE,SHARE",
        help=f"shares of what dense reads, in (0, 1], with commas (default: {AT})",
    )
    parser.add_argument("--against", help="the policy that differences are to (default: none)")
    parser.add_argument("--csv", type=Path, help="also write the table there")
    options = parser.parse_args(arguments)
    try:
        shares = shares_of(options.at)
        rows = load([job for place in options.paths for job in jobs_of(Path(place))])
        console, tables = make_console(REPORT_WIDTH), []
        for name, part in split_settings(rows).items():
            table = equal_shares(part, shares, options.against)
            show(with_ends(table, part), name, console, options.against)
            console.print(ranking_sentence(part))
            tables.append(table.assign(setting=name))
        if options.csv is not None:
            write_atomic(options.csv, pd.concat(tables).to_csv(index=False).encode())
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def shares_of(text: str) -> list[float]:
    try:
        shares = [float(word) for word in text.split(",")]
    except ValueError:
        shares = []
    if not shares or not all(0 < share <= 1 for share in shares):
        raise ValueError(f"--at must be shares in (0, 1] with commas, got {text!r}")
    return shares


def with_ends(table: pd.DataFrame, rows: pd.DataFrame) -> pd.DataFrame:
    """Columns least, most: the shares between which a line was measured on an axis, over prompts;
    NaN where they are not known."""
    ends = pd.concat(
        [
            points(rows).groupby("line")[column].agg(["min", "max"]).assign(axis=axis)
            for axis, column in AXES.items()
        ]
    )
    ends = ends.set_axis(["least", "most", "axis"], axis=1).reset_index(names="policy")
    return table.merge(ends, on=["axis", "policy"], how="left")


def show(table: pd.DataFrame, setting: str, console: Console, against: str | None) -> None:
    """Two tables: at equal tokens, at equal bytes."""
    less = f"in brackets: less {against}; " if against is not None else ""
    for axis, part in table.groupby("axis", sort=False):
        grid = Table(title=" · ".join(filter(None, [f"recall at equal {axis}", setting])))
        grid.caption = (
            f"{less}reads ≤: not reached at any budget measured; reads ≥: overshot, the least "
            "that it read is more; unknown: bytes read by what cannot be built"
        )
        grid.title_justify = grid.caption_justify = "left"
        grid.add_column("policy")
        for share in part["share"].unique():
            grid.add_column(f"{100 * share:.3g}%", justify="right")
        for policy, line in part.groupby("policy", sort=False):
            grid.add_row(str(policy), *(cell(x) for x in line.to_dict("records")))
        console.print(grid)


def cell(x: dict[Any, Any]) -> str:
    if math.isnan(x["recall"]):
        return missing(x)
    text = f"{x['recall']:.3f}{error_of(x['recall_se'])}"
    if math.isnan(x.get("difference", math.nan)):
        return text
    return f"{text} ({x['difference']:+.3f}{error_of(x['difference_se'])})"


def missing(x: dict[Any, Any]) -> str:
    """Why a share has no recall."""
    if math.isnan(x["least"]):
        return "unknown"
    if x["share"] > x["most"]:
        return f"reads ≤ {x['most']:.1%}"
    return f"reads ≥ {x['least']:.1%}" if x["share"] < x["least"] else "between prompts"


def error_of(error: float) -> str:
    return "" if math.isnan(error) else f" ± {error:.3f}"


if __name__ == "__main__":
    sys.exit(main())
