"""Latency rows -> tables: every timing, the speed-up of a step, by setting."""

from __future__ import annotations

import pandas as pd

SETTING = ("model", "device", "dtype", "page_size", "budget_tokens", "lists")
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
    """Latency rows by what must be equal in one picture: a name for each setting."""
    parts = {}
    for key, part in rows.groupby(list(SETTING), sort=False, dropna=False):
        model, device, dtype, page_size, budget, lists = key
        name = f"{model} shapes, {device}, {dtype}, page {page_size:.0f}, budget {budget:,.0f}"
        parts[name if lists == "scattered" else f"{name}, lists of {lists}"] = part
    return parts


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
