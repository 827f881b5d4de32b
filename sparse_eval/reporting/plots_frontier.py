"""Recall rows -> two frontiers side by side, and the error of the log-sum-exp beside recall."""

from __future__ import annotations

import math
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import PercentFormatter

from sparse_eval.reporting.frontiers import points
from sparse_eval.reporting.plots import (
    GRID,
    draw_legend,
    line_style,
    lowest,
    new_panels,
    save,
)
from sparse_eval.reporting.plots_live import log_axis
from sparse_eval.reporting.summarise import dense_policies

X_LABELS = {
    "tokens_share": "tokens read (share of the context, non-dense layers)",
    "bytes_share": "bytes read, metadata included (share of dense, non-dense layers)",
}
Y_LABELS = {
    "recall": "recall (share of the dense softmax's mass)",
    "lse_error": "error of the log-sum-exp (nats, log scale)",
}


def frontiers(rows: pd.DataFrame, path: Path | str) -> Path:
    """Recall against tokens read and against bytes read; what cannot be built has no bytes."""
    table = curves(rows)
    figure, panels = new_panels(rows, "Recall against what is read", ["tokens", "bytes"])
    for axes, x in zip(panels, X_LABELS, strict=True):
        draw_curves(axes, table, x, "recall")
        axes.set_ylim(lowest(table), 1.0 + 0.03 * (1 - lowest(table)))
    most = table[list(X_LABELS)].max().max()
    for axes in panels:
        axes.set_xlim(0, min(1.03, 1.05 * most))
    draw_legend(panels[-1], table)
    return save(figure, path)


def lse_curve(rows: pd.DataFrame, path: Path | str) -> Path:
    """Recall, and beside it the error of the log-sum-exp, against tokens read."""
    table = curves(rows)
    figure, panels = new_panels(rows, "Recall and the log-sum-exp", ["recall", "log-sum-exp"])
    for axes, y in zip(panels, Y_LABELS, strict=True):
        draw_curves(axes, table, "tokens_share", y)
        axes.set_xlim(0, min(1.03, 1.05 * table["tokens_share"].max()))
    panels[0].set_ylim(lowest(table), 1.0 + 0.03 * (1 - lowest(table)))
    log_axis(panels[1])
    draw_legend(panels[-1], table)
    return save(figure, path)


def curves(rows: pd.DataFrame) -> pd.DataFrame:
    """Means over prompts per policy and budget, under the names of their lines; without policies
    that read everything, unless there are no others."""
    table = points(rows)
    kept = table[~table["policy"].isin(dense_policies(table))]
    table = kept if len(kept) else table
    values = ["recall", "lse_error", "density", *X_LABELS]
    grouped = table.groupby(["line", "policy", "budget_tokens"], dropna=False, sort=False)
    means = grouped[values].mean()
    means["recall_se"], means["lse_error_se"] = grouped["recall"].sem(), grouped["lse_error"].sem()
    means["n"] = grouped["recall"].count()
    means = means.reset_index().drop(columns="policy").rename(columns={"line": "policy"})
    means["realisable"] = means["bytes_share"].notna()
    return means


def draw_curves(axes: Axes, table: pd.DataFrame, x: str, y: str) -> None:
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    best_first = table.groupby("policy")["recall"].mean().sort_values(ascending=False).index
    for policy in best_first:
        line = table[table["policy"] == policy].sort_values(x)
        if y == "lse_error":  # a log scale has no zero
            line = line.assign(**{y: line[y].where(line[y] > 0)})
        errors = [0 if math.isnan(e) else e for e in line[f"{y}_se"]]
        bars = errors if any(errors) else None
        axes.errorbar(line[x], line[y], yerr=bars, **line_style(policy, line))
    axes.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.set_xlabel(X_LABELS[x])
    axes.set_ylabel(Y_LABELS[y])
