"""Latency rows -> pictures (PNG): time against context, speed-ups, shares of the memory ceiling."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.ticker import NullFormatter, PercentFormatter

from sparse_eval.reporting.heading import INK, MUTED, new_picture
from sparse_eval.reporting.plots import GRID, save
from sparse_eval.reporting.plots_live import log_axis
from sparse_eval.reporting.summarise_latency import slope, speedups, split_latency

COLOURS = {
    "sdpa": "#7A828C",
    "dense": "#1F2933",
    "metadata": "#B97900",
    "select": "#B4568F",
    "attend": "#00855F",
    "step": "#0072B2",
    "ffd_select": "#B4568F",
    "ffd_attend": "#00855F",
    "ffd_attend_residual": "#7FB800",
    "ffd_step": "#0072B2",
    "ffd_step_residual": "#56B4E9",
    "top_delta": "#0072B2",
    "top_k": "#D55E00",
    "top_p": "#B97900",
    "flash_attention_3": "#D55E00",
    "flash_attention_3 fa3_fwd": "#D55E00",
    "flashinfer": "#C9A227",
}
MARKERS = {"sdpa": "X", "dense": "*", "metadata": "v", "select": "D", "attend": "s", "step": "o"}
OTHERS = "#D55E00"


def latency_pictures(rows: pd.DataFrame, folder: Path) -> list[Path]:
    """Every picture of every setting."""
    pictures = []
    parts = split_latency(rows[rows["what"] != "generate"])
    for name, part in parts.items():
        tail = "" if len(parts) == 1 else "_" + re.sub(r"[^a-zA-Z0-9.-]+", "_", name)
        pictures.append(latency_curve(part, name, folder / f"latency{tail}.png"))
        if (part["what"] == "step").any() and part["speedup_vs_best"].notna().any():
            pictures.append(speedup_map(part, name, folder / f"latency_speedup{tail}.png"))
        pictures.append(ceiling_bars(part, name, folder / f"latency_ceiling{tail}.png"))
    return pictures


def latency_curve(rows: pd.DataFrame, name: str, path: Path | str) -> Path:
    """Median time against context, log-log, a panel per batch; a band from p10 to p90; hollow
    where the data fit in the L2; dashed: eager."""
    batches = sorted(rows["batch"].unique())
    figure = new_picture("One decode step's attention", name, 4.1 * len(batches) + 1.4, 4.4)
    panels = figure.subplots(1, len(batches), squeeze=False)[0]
    for axes, batch in zip(panels, batches, strict=True):
        here = rows[rows["batch"] == batch]
        for (what, graph), line in here.groupby(["what", "graph"], sort=False):
            draw_time(axes, str(what), bool(graph), line.sort_values("context"))
        frame(axes, sorted(here["context"].unique()))
        log_axis(axes)
        axes.set_title(f"batch {batch}{steepness(here)}", loc="left", fontsize=10, color=INK)
    panels[0].set_ylabel("median µs (log scale)", color=INK, fontsize=9.5)
    figure.supxlabel("context, tokens per row (log scale)", color=INK, fontsize=9.5)
    handles = {}
    for axes in panels:
        handles.update(dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True)))
    place: dict[str, Any] = {"loc": "outside right", "frameon": False, "fontsize": 8.5}
    figure.legend(list(handles.values()), list(handles), **place)
    return save(figure, path)


def steepness(rows: pd.DataFrame) -> str:
    """What a further token of context costs dense attention, where that was timed."""
    dense = rows[(rows["what"] == "dense") & rows["graph"].astype(bool)]
    if len(dense) < 2:
        return ""
    return f": dense {slope(dense['context'], dense['median_us']):.2f} ns a token"


def draw_time(axes: Axes, what: str, graph: bool, line: pd.DataFrame) -> None:
    colour = COLOURS.get(what, OTHERS)
    label = what if graph else f"{what}, eager"
    style: dict[str, Any] = {"color": colour, "linewidth": 1.8 if graph else 1.0}
    label = label if axes.get_subplotspec().is_first_col() else f"_{label}"  # type: ignore[union-attr]
    axes.plot(
        line["context"], line["median_us"], linestyle="-" if graph else "--", label=label, **style
    )
    axes.fill_between(
        line["context"], line["p10_us"], line["p90_us"], color=colour, alpha=0.15, linewidth=0
    )
    if graph:
        for resident, face in ((False, colour), (True, "white")):
            part = line[line["l2_resident"].astype(bool) == resident]
            axes.plot(
                part["context"],
                part["median_us"],
                MARKERS.get(what, "P"),
                color=colour,
                markerfacecolor=face,
                markersize=6,
            )


def frame(axes: Axes, contexts: list[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(contexts, [short(n) for n in contexts], fontsize=8.5)
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=MUTED, labelsize=8.5)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def short(tokens: int) -> str:
    return f"{tokens // 1024:.0f}k" if tokens % 1024 == 0 else f"{tokens:,.0f}"


def speedup_map(rows: pd.DataFrame, name: str, path: Path | str) -> Path:
    """A step's speed-up over the fastest dense by batch and context: blue wins, orange loses, the
    line runs where both are equal; losing cells say so."""
    table = speedups(rows)
    figure = new_picture(
        "A sparse step against the fastest dense attention",
        name,
        max(8.4, 2.6 + 1.1 * table.shape[1]),
        2.0 + 0.62 * table.shape[0],
    )
    axes = figure.subplots()
    values = table.to_numpy(float)
    reach = max(2.0, float(np.nanmax(values)), 1 / float(np.nanmin(values)))
    axes.imshow(values, cmap="PuOr", norm=LogNorm(1 / reach, reach), aspect="auto")
    for (i, j), value in np.ndenumerate(values):
        if np.isnan(value):
            continue
        text = f"{value:.1f}×" if value >= 1 else f"{value:.2f}×\nloses"
        dark = value > reach**0.6 or value < reach**-0.6
        axes.text(j, i, text, ha="center", va="center", color="white" if dark else INK, fontsize=9)
    draw_break_even(axes, values)
    axes.set_xticks(range(table.shape[1]), [short(n) for n in table.columns])
    axes.set_yticks(range(table.shape[0]), [str(b) for b in table.index])
    axes.set_xlabel("context, tokens per row", color=INK, fontsize=9.5)
    axes.set_ylabel("batch", color=INK, fontsize=9.5)
    axes.tick_params(colors=MUTED, labelsize=9, length=0)
    return save(figure, path)


def draw_break_even(axes: Axes, values: np.ndarray) -> None:
    """A line between neighbours of which one wins and one loses."""
    wins = values >= 1
    rows, columns = values.shape
    for i in range(rows):
        for j in range(columns):
            if j + 1 < columns and wins[i, j] != wins[i, j + 1]:
                axes.plot([j + 0.5] * 2, [i - 0.5, i + 0.5], color="#D55E00", linewidth=2.5)
            if i + 1 < rows and wins[i, j] != wins[i + 1, j]:
                axes.plot([j - 0.5, j + 0.5], [i + 0.5] * 2, color="#D55E00", linewidth=2.5)


def ceiling_bars(rows: pd.DataFrame, name: str, path: Path | str) -> Path:
    """Share of the measured memory ceiling that each part reaches under graphs, at the longest
    context; hollow where the data fit in the L2."""
    here = rows[(rows["graph"].astype(bool)) & (rows["context"] == rows["context"].max())]
    if here.empty:
        here = rows[rows["context"] == rows["context"].max()]
    batches = sorted(here["batch"].unique())
    kinds = list(dict.fromkeys(here["what"]))
    title = f"Share of the memory ceiling, {short(int(here['context'].iloc[0]))} tokens"
    figure = new_picture(title, name, 8.4, 1.3 + 0.3 * len(batches) * len(kinds))
    axes = figure.subplots()
    labels: list[str] = []
    for batch in batches:
        for what in kinds:
            line = here[(here["batch"] == batch) & (here["what"] == what)]
            if line.empty:
                continue
            row, colour = line.iloc[-1], COLOURS.get(what, OTHERS)
            share = float(row["ceiling_fraction"])
            face = "white" if row["l2_resident"] else colour
            axes.barh(len(labels), share, color=face, edgecolor=colour, height=0.72)
            note = f" {share:.0%}, {row['terabytes_per_s']:.2f} TB/s, {row['median_us']:,.1f} µs"
            axes.text(share, len(labels), note, va="center", fontsize=8, color=INK)
            labels.append(f"{what}, batch {batch}")
    axes.axvline(1, color="#D55E00", linewidth=1.5)
    axes.set_yticks(range(len(labels)), labels, fontsize=8.5)
    axes.invert_yaxis()
    axes.set_xlim(0, max(1.35, float(here["ceiling_fraction"].max()) * 1.35))
    axes.xaxis.set_major_formatter(PercentFormatter(1, 0))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("of the copy or read measured in the same run, whichever is faster")
    axes.tick_params(colors=MUTED, labelsize=8.5)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return save(figure, path)
