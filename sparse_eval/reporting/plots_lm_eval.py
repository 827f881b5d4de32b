"""lm-eval rows -> pictures (PNG): scores against what is read, and every task under every arm."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from sparse_eval.reporting.heading import BETWEEN, INK, new_picture
from sparse_eval.reporting.plots import save
from sparse_eval.reporting.plots_live import (
    draw_line,
    legend_outside,
    line_axes,
    plain_axes,
    read_axis,
    style_bar,
    with_known_bytes,
)
from sparse_eval.reporting.summarise_lm_eval import summarise_lm_eval, task_table


def lm_eval_pictures(rows: pd.DataFrame, folder: Path, end: str) -> list[Path]:
    """rows: of one setting. end: of the files' names."""
    pictures = [lm_eval_tasks(rows, folder / f"lm_eval_tasks{end}.png")]
    table = summarise_lm_eval(rows)
    if table["tasks"].max() > 0:
        pictures.append(lm_eval_curve(rows, table, folder / f"lm_eval{end}.png"))
    return pictures


def lm_eval_curve(rows: pd.DataFrame, table: pd.DataFrame, path: Path | str) -> Path:
    """The mean score of the tasks that passed the gate, and the worst task's difference from dense,
    against the share of the model's KV really read."""
    figure = new_picture("Scores on lm-eval's tasks", subject(rows), 9.6, 4.4)
    left, right = figure.subplots(1, 2)
    drawn, label = with_known_bytes(table)
    for policy, line in drawn.groupby("policy", sort=False):
        line = line.sort_values("model_read_fraction")
        draw_line(left, str(policy), line, "score", line["score_se"].fillna(0))
        if not line["is_dense"].all():
            errors = [line["worst"] - line["worst_low"], line["worst_high"] - line["worst"]]
            draw_line(right, str(policy), line, "worst", [e.clip(lower=0) for e in errors])
    left.set_ylabel("mean score, tasks that passed the gate (bars: ± 1 SE)")
    right.axhline(0, color="#b8c0ca", linewidth=1)
    right.set_ylabel("worst task, minus dense (bars: 95 %)")
    for axes in (left, right):
        read_axis(axes, drawn["model_read_fraction"].min())
        line_axes(axes)
    figure.supxlabel(label, color=INK, fontsize=9.5)
    legend_outside(figure, left)
    return save(figure, path)


def lm_eval_tasks(rows: pd.DataFrame, path: Path | str) -> Path:
    """Every task's score, a column per policy and budget; hatched: dense gate not passed, or not
    run."""
    table = task_table(rows)
    budget = table["budget_tokens"].map(lambda b: "" if pd.isna(b) else f" {b:,.0f}")
    table = table.assign(arm=table["policy"] + budget)
    arms, tasks = list(table["arm"].unique()), list(table["lm_task"].unique())
    heat = table.pivot(index="lm_task", columns="arm", values="value").loc[tasks, arms]
    gated = table.groupby("lm_task")["gated"].max().astype(bool)
    width, height = 3.4 + 0.78 * len(arms), 2.0 + 0.32 * len(tasks)
    figure = new_picture("Every task, every policy", subject(rows), max(8.4, width), height)
    axes = figure.subplots()
    image = draw_scores(axes, heat, [bool(gated[task]) for task in tasks])
    figure.supxlabel(
        "policy and budget (tokens); hatched: dense gate not passed, or not run", fontsize=9
    )
    style_bar(figure.colorbar(image, ax=axes, pad=0.015, aspect=18), "score")
    return save(figure, path)


def draw_scores(axes: Axes, heat: pd.DataFrame, gated: list[bool]) -> Any:
    values = heat.to_numpy(dtype=float)
    top = max([1.0, *values[~np.isnan(values)]])
    image = axes.imshow(values, aspect="auto", cmap="viridis", vmin=0, vmax=top)
    for (line, column), value in np.ndenumerate(values):
        if not math.isnan(value):
            ink = INK if value > 0.6 * top else "white"
            axes.text(column, line, f"{value:.2f}", ha="center", va="center", fontsize=8, color=ink)
    box: dict[str, Any] = {"fill": False, "hatch": "////", "edgecolor": "#ffffff66", "linewidth": 0}
    for line in np.flatnonzero(gated):
        axes.add_patch(Rectangle((-0.5, line - 0.5), len(heat.columns), 1, **box))
    axes.set_xticks(range(len(heat.columns)), heat.columns, rotation=30, ha="right")
    axes.set_yticks(range(len(heat)), heat.index)
    plain_axes(axes)
    return image


def subject(rows: pd.DataFrame) -> str:
    """Model, prompt length, protocol, chat format and n of one setting."""
    first, n = rows.iloc[0], rows.loc[rows["role"] == "task", "n"]
    span = f"{n.min():.0f}" if n.min() == n.max() else f"{n.min():.0f} to {n.max():.0f}"
    parts = [
        *(str(first[name]) for name in ("model", "weights") if first[name]),
        f"{first['context']:,} tokens",
        f"protocol {first['protocol']}",
        f"chat {first['chat']}",
        f"n = {span} a task",
    ]
    return BETWEEN.join(parts)
