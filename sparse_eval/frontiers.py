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

from sparse_eval.report import jobs_of, make_console
from sparse_eval.reporting.frontiers import equal_shares, ranking_sentence
from sparse_eval.reporting.summarise import split_settings
from sparse_eval.results import load
from sparse_eval.storage.files import write_atomic


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a table per setting and axis. Returns 2 for arguments that cannot be met."""
    parser = argparse.ArgumentParser(prog="python -m sparse_eval.frontiers", description=__doc__)
    parser.add_argument("paths", nargs="+", metavar="PATH", help="folders of runs or sweeps")
    parser.add_argument("--at", default="0.05,0.1,0.2,0.3", help="shares of what dense reads")
    parser.add_argument("--against", help="the policy that differences are to")
    parser.add_argument("--csv", type=Path, help="also write the table there")
    options = parser.parse_args(arguments)
    try:
        shares = shares_of(options.at)
        rows = load([job for place in options.paths for job in jobs_of(Path(place))])
        console, tables = make_console(), []
        for name, part in split_settings(rows).items():
            table = equal_shares(part, shares, options.against)
            show(table, name, console)
            console.print(ranking_sentence(part), markup=False)
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


def show(table: pd.DataFrame, setting: str, console: Console) -> None:
    """Two tables: at equal tokens, at equal bytes."""
    for axis, part in table.groupby("axis", sort=False):
        grid = Table(title=" · ".join(filter(None, [f"recall at equal {axis}", setting])))
        grid.caption = "in brackets: less the policy given as --against; empty: not reached"
        grid.title_justify = grid.caption_justify = "left"
        grid.add_column("policy")
        for share in part["share"].unique():
            grid.add_column(f"{share:.0%}", justify="right")
        for policy, line in part.groupby("policy", sort=False):
            grid.add_row(str(policy), *(cell(x) for x in line.to_dict("records")))
        console.print(grid)


def cell(x: dict[Any, Any]) -> str:
    if math.isnan(x["recall"]):
        return ""
    text = f"{x['recall']:.3f}{error_of(x['recall_se'])}"
    if math.isnan(x.get("difference", math.nan)):
        return text
    return f"{text} ({x['difference']:+.3f}{error_of(x['difference_se'])})"


def error_of(error: float) -> str:
    return "" if math.isnan(error) else f" ± {error:.3f}"


if __name__ == "__main__":
    sys.exit(main())
