"""Fidelity rows -> a picture (PNG): how far from dense, against what is read."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from matplotlib.ticker import PercentFormatter

from sparse_eval.reporting.heading import BETWEEN, INK, new_picture
from sparse_eval.reporting.plots import save
from sparse_eval.reporting.plots_live import (
    draw_line,
    legend_outside,
    line_axes,
    log_axis,
    read_axis,
    with_known_bytes,
)
from sparse_eval.reporting.summarise_fidelity import summarise_fidelity


def fidelity_curve(rows: pd.DataFrame, path: Path | str) -> Path:
    """KL to dense over all tokens, over those that need the long context, and top-1 agreement,
    against the share of the model's KV really read. rows: of one setting."""
    table = summarise_fidelity(rows)
    sparse, label = with_known_bytes(table[~table["is_dense"]])
    figure = new_picture("How far from dense?", subject(rows), 12.0, 4.3)
    panels = figure.subplots(1, 3)
    drawn = (("kl_mean", "all tokens"), ("long_kl_mean", "tokens that need the long context"))
    for axes, (column, what) in zip(panels, drawn, strict=False):
        for policy, line in sparse.groupby("policy", sort=False):
            line = line.sort_values("model_read_fraction")
            draw_line(axes, str(policy), line, column, line[f"{column}_se"].fillna(0))
        log_axis(axes)
        axes.set_ylabel("KL(dense || policy), nats (log scale)")
        axes.set_title(what, loc="left", fontsize=9.5, color=INK)
    for policy, line in sparse.groupby("policy", sort=False):
        line = line.sort_values("model_read_fraction")
        errors = line["top1_agreement_se"].fillna(0)
        draw_line(panels[2], str(policy), line, "top1_agreement", errors)
    panels[2].yaxis.set_major_formatter(PercentFormatter(1, 0))
    panels[2].set_ylabel("same likeliest token as dense")
    for axes in panels:
        read_axis(axes, sparse["model_read_fraction"].min())
        line_axes(axes)
    figure.supxlabel(label, color=INK, fontsize=9.5)
    legend_outside(figure, panels[0])
    return save(figure, path)


def subject(rows: pd.DataFrame) -> str:
    """Model, text, protocol and counts of rows of one setting."""
    first = rows.iloc[0]
    n = rows["prompt_hash"].nunique()
    return BETWEEN.join(
        [
            *(str(first[name]) for name in ("model", "weights") if first[name]),
            f"{first['context']:,.0f} tokens of {first['prompts']}",
            f"protocol {first['protocol']}",
            f"{first['tokens']:.0f} tokens fed to each of n = {n} prompts",
            "bars: ± 1 SE" if n > 1 else "",
        ]
    ).rstrip(" ·")
