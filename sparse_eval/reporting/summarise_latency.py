"""Latency rows -> tables: every timing, the speed-up of a step, by setting."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

SETTING = ("model", "device", "dtype", "page_size", "budget_tokens", "lists")
TARGETS = ("density_target", "keep_ratio", "keys", "layer", "delta_target")
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
    "density",
    "delta",
    "baseline",
    "speedup_vs_sdpa",
    "speedup_vs_best",
    "model_speedup_bound",
    "floor_speedup",
    "top_delta_speedup",
    "tokens_per_second",
)


def split_latency(rows: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Latency rows by what must be equal in one picture: a name for each setting, and each run
    where runs timed the same."""
    parts: dict[str, pd.DataFrame] = {}
    # rows of older runs have no targets
    targets = [name for name in TARGETS if name in rows]
    for key, part in rows.groupby([*SETTING, *targets], sort=False, dropna=False):
        model, device, dtype, page_size, budget, lists = key[: len(SETTING)]
        name = f"{model} shapes, {device}, {dtype}, page {page_size:.0f}, "
        name += aim_of(dict(zip(targets, key[len(SETTING) :], strict=True)), budget)
        name = name if lists == "scattered" else f"{name}, lists of {Path(lists).name}"
        parts |= split_runs(name, part)
    return parts


def aim_of(targets: Mapping[str, Any], budget: float) -> str:
    """What a setting's rows were to read."""
    density, ratio, keys, layer, delta = (targets.get(name, float("nan")) for name in TARGETS)
    if pd.notna(delta):
        return f"top-δ at δ = {delta:g}, layer {layer:.0f} of {Path(keys).name}"
    if pd.notna(density):
        return f"top-δ, {density:.0%} read by a KV head"
    if pd.notna(ratio):
        return f"rules, {ratio:.1%} kept by a query head"
    return f"budget {budget:,.0f}"


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
