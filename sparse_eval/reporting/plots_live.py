"""What the pictures of live tasks share: lines against what is read, plain axes."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from sparse_eval.reporting.heading import INK, MUTED
from sparse_eval.reporting.palette import look_of
from sparse_eval.reporting.plots import GRID, MARKER_SIZES

READ_TICKS = (1.0, 0.5, 0.2, 0.1, 0.05, 0.02, 0.01, 0.3, 0.7, 0.15, 0.03, 0.07, 0.4, 0.6, 0.8)
"""Shares that may be labelled, the ones to label first in front."""
TICK_ROOM = 0.11
"""What a label takes of the axis, at least."""
READ_LABEL = "share of the model's KV read per decode step (KV + metadata, all layers; log scale)"


def legend_outside(figure: Figure, axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right", frameon=False, fontsize=9)  # type: ignore[call-overload]


def with_known_bytes(table: pd.DataFrame) -> tuple[pd.DataFrame, str]:
    """The lines that have a place on the axis of bytes read, and the axis's label, which names the
    policies that have none: what an oracle reads to choose is not known."""
    drawn = table[table["model_read_fraction"].notna()]
    absent = [str(p) for p in table["policy"].unique() if p not in set(drawn["policy"])]
    if not absent:
        return drawn, READ_LABEL
    why = "not realisable, so it has no share of bytes read"
    return drawn, f"{READ_LABEL}\nnot drawn: {', '.join(absent)} ({why})"


def read_ticks(least: float, most: float) -> list[float]:
    """The shares to label on a log axis, ascending: as many of READ_TICKS as find room."""
    room = TICK_ROOM * math.log(most / least)
    chosen: list[float] = []
    for tick in READ_TICKS:
        inside = least <= tick <= most
        if inside and all(abs(math.log(tick / other)) >= room for other in chosen):
            chosen.append(tick)
    return sorted(chosen)


def read_axis(axes: Axes, least: float) -> None:
    """Shares of KV from `least` (NaN: nothing is drawn) to 1, log scale, percent."""
    low, high = (0.5 if math.isnan(least) else least) / 1.15, 1.15
    axes.set_xscale("log")
    ticks = read_ticks(low, high)
    axes.set_xticks(ticks, [f"{tick:.0%}" for tick in ticks])
    axes.set_xlim(low, high)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)


def log_axis(axes: Axes) -> None:
    """Log scale whose ticks are plain numbers: 0.5, 1, 2, 5, …; for what is drawn already. Where
    nothing of it is above 0, which has no logarithm, the scale stays and a word says so."""
    if not math.isfinite(axes.dataLim.minposy):
        word = axes.text(
            *(0.5, 0.5, "nothing above 0 to draw"),
            transform=axes.transAxes,
            ha="center",
            color=MUTED,
        )
        word.set_in_layout(False)  # or its width would take the panels' room
        axes.set_yticks([])
        return
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def draw_line(axes: Axes, policy: str, line: pd.DataFrame, y: str, errors: Any) -> None:
    look = look_of(policy)
    axes.errorbar(
        line["model_read_fraction"],
        line[y],
        yerr=errors,
        label=policy,
        color=look.light,
        linestyle=look.dash,
        marker=look.marker,
        markersize=MARKER_SIZES.get(look.marker, 6.5),
        markeredgecolor="white",
        markeredgewidth=0.9,
        linewidth=1.9,
        capsize=2.5,
        elinewidth=1.2,
        clip_on=False,
        zorder=3,
    )


def plain_axes(axes: Axes) -> None:
    axes.tick_params(length=0, labelsize=8, colors=MUTED)
    for side in axes.spines.values():
        side.set_visible(False)


def line_axes(axes: Axes) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color("#b8c0ca")
    axes.tick_params(colors=MUTED, labelsize=9, length=3)
    for label in (axes.xaxis.label, axes.yaxis.label):
        label.set(color=INK, fontsize=9)


def style_bar(bar: Any, label: str) -> None:
    bar.set_label(label, color=MUTED, fontsize=9)
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=8, colors=MUTED, length=0)
