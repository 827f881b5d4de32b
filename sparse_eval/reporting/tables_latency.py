"""Timings as texts: what the terminal, the page and papers show of latency rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from sparse_eval.reporting.tables_live import TextTable, lines_of

NOTE = (
    "µs: median (10th to 90th percentile); TB/s: the fewest bytes the work must move, over its "
    "time; in brackets the share of the ceiling measured in this run, * where the data fit in the "
    "L2; speed-up over the fastest SDPA, and over the fastest dense of all"
)
BOUND = "; model at most: what a whole decode step can gain, weights read once at the ceiling"
HEAD = ("batch", "context", "what", "mode", "µs", "TB/s", "vs SDPA", "vs best")
OPTIONAL = {
    "floor": "floor_speedup",
    "by top-δ": "top_delta_speedup",
    "model at most": "model_speedup_bound",
    "tokens/s": "tokens_per_second",
}
"""Columns shown where some row has them."""


def timings_table(table: pd.DataFrame) -> TextTable:
    """table: of latency_table."""
    extra = [head for head, name in OPTIONAL.items() if name in table]
    lines = [
        [
            str(line["batch"]),
            f"{line['context']:,}",
            work_of(line),
            mode_of(line),
            microseconds(line["median_us"], line["p10_us"], line["p90_us"]),
            rate_of(line),
            times(line.get("speedup_vs_sdpa")),
            times(line.get("speedup_vs_best")),
            *(optional(head, line) for head in extra),
        ]
        for line in lines_of(table)
    ]
    note = NOTE + (BOUND if "model at most" in extra else "")
    return TextTable([*HEAD, *extra], lines, note, ("what", "mode"))


def optional(head: str, line: Mapping[str, Any]) -> str:
    value = line[OPTIONAL[head]]
    if head == "tokens/s":
        return "" if pd.isna(value) else f"{value:,.1f}"
    return times(value)


def work_of(line: Mapping[str, Any]) -> str:
    """What was timed, and the share of the tokens that it really read where no budget sets that;
    of a baseline, its own name."""
    name, density = line.get("baseline"), line.get("density")
    if name and not pd.isna(name):
        return str(name)
    return line["what"] + ("" if density is None or pd.isna(density) else f", {density:.1%}")


def mode_of(line: Mapping[str, Any]) -> str:
    return "graph" if line["graph"] else "eager"


def microseconds(median: float, p10: float, p90: float) -> str:
    return f"{median:,.1f} ({p10:,.1f} to {p90:,.1f})"


def rate_of(line: Mapping[str, Any]) -> str:
    rate = line.get("terabytes_per_s")
    if not rate or pd.isna(rate):
        return ""
    return f"{rate:.2f} ({line['ceiling_fraction']:.0%})" + ("*" if line["l2_resident"] else "")


def times(value: Any) -> str:
    return "" if value is None or pd.isna(value) else f"{value:.2f}×"
