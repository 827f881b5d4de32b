"""Latency rows -> tables: every timing, the speed-up of a step, by setting."""

from __future__ import annotations

import pandas as pd

SETTING = ("model", "device", "dtype", "page_size", "budget_tokens", "lists")
WORK = ("what", "baseline", "batch", "context", "graph")
TABLE = (
    "batch",
    "context",
    "what",
    "graph",
    "median_us",
    "p10_us",
    "p90_us",
    "terabytes_per_s",
    "ceiling_fraction",
    "l2_resident",
    "baseline",
    "speedup_vs_sdpa",
    "speedup_vs_best",
    "model_speedup_bound",
    "tokens_per_second",
)


def split_latency(rows: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Latency rows by what must be equal in one picture: a name for each setting, and each run
    where runs timed the same."""
    parts: dict[str, pd.DataFrame] = {}
    for key, part in rows.groupby(list(SETTING), sort=False, dropna=False):
        model, device, dtype, page_size, budget, lists = key
        name = f"{model} shapes, {device}, {dtype}, page {page_size:.0f}, budget {budget:,.0f}"
        name = name if lists == "scattered" else f"{name}, lists of {lists}"
        parts |= split_runs(name, part)
    return parts


def split_runs(name: str, part: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """One setting's rows; by run where several runs timed the same work."""
    work = [column for column in WORK if column in part]
    if "run" not in part or not part.duplicated(work).any():
        return {name: part}
    runs = part.groupby("run", sort=False, dropna=False)
    return {f"{name}, run {run}": own for run, own in runs}


def latency_table(rows: pd.DataFrame) -> pd.DataFrame:
    """One line a timing, graphs first, in the order of the grid."""
    shown = [name for name in TABLE if name in rows]
    order = rows.sort_values(["graph", "batch", "context"], ascending=[False, True, True])
    return order[shown].dropna(axis="columns", how="all")


def speedups(rows: pd.DataFrame, column: str = "speedup_vs_best") -> pd.DataFrame:
    """batch × context of a step's speed-up under graphs (eager where there are none)."""
    steps = rows[rows["what"] == "step"]
    if steps["graph"].any():
        steps = steps[steps["graph"].astype(bool)]
    return steps.pivot_table(index="batch", columns="context", values=column, aggfunc="last")


def slope(contexts: pd.Series, times: pd.Series) -> float:
    """Nanoseconds per token of context, by least squares."""
    x, y = contexts.astype(float), times.astype(float)
    spread = ((x - x.mean()) ** 2).sum()
    return float(((x - x.mean()) * (y - y.mean())).sum() / spread * 1e3) if spread else float("nan")
