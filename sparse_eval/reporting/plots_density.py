"""Recall rows of adaptive policies -> how much they read, by layer and KV head (PNG)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from sparse_eval.reporting.heading import MUTED
from sparse_eval.reporting.plots import new_panels, save
from sparse_eval.reporting.summarise import recall_rows, sparse_rows

PANELS = {
    "density_head": "chosen by a query head",
    "density": "read by its group",
}


def choosing_policies(rows: pd.DataFrame) -> list[str]:
    """Policies whose query heads choose apart, with one list or one union a group."""
    rows = recall_rows(rows)
    if "density_head" not in rows:
        return []
    adaptive = rows[rows["adaptive"].astype(bool) & rows["density_head"].notna()]
    return list(dict.fromkeys(adaptive["policy"]))


def density_heatmap(rows: pd.DataFrame, path: Path | str, policy: str) -> Path:
    """Share of the live tokens read, layer × KV head: on average of the group's query heads by
    itself, and the group's union. Means over prompts; dense layers are hatched."""
    rows = recall_rows(rows)
    own = rows[rows["policy"] == policy]
    dense = own.groupby("layer")["dense_layer"].first().astype(bool)
    tables = {
        name: own[~own["dense_layer"].astype(bool)]
        .pivot_table(index="kv_head", columns="layer", values=name, aggfunc="mean")
        .reindex(columns=dense.index)
        for name in PANELS
    }
    means = {name: sparse_rows(own)[name].mean() for name in PANELS}
    titles = [f"{text}: {means[name]:.1%} of the tokens" for name, text in PANELS.items()]
    num_heads = len(next(iter(tables.values())))
    headline = f"What {policy} reads, by layer and KV head"
    figure, panels = new_panels(own, headline, titles, height=2.3 + 0.28 * num_heads)
    most = max(table.max().max() for table in tables.values())
    for axes, table in zip(panels, tables.values(), strict=True):
        image = draw_density(axes, table, dense, most)
    bar = figure.colorbar(image, ax=panels, pad=0.015, aspect=12, format="%.2f")
    bar.set_label("share of tokens", color=MUTED, fontsize=9)
    bar.outline.set_visible(False)  # type: ignore[operator]
    bar.ax.tick_params(labelsize=8, colors=MUTED, length=0)
    return save(figure, path)


def draw_density(axes: Axes, table: pd.DataFrame, dense: pd.Series, most: float) -> Any:
    extent = (-0.5, len(dense) - 0.5, len(table) - 0.5, -0.5)
    image = axes.imshow(
        table.to_numpy(), aspect="auto", cmap="viridis", vmin=0, vmax=most, extent=extent
    )
    for column, layer in enumerate(dense.index):
        if dense[layer]:
            box = Rectangle((column - 0.5, -0.5), 1, len(table), linewidth=0, hatch="////")
            box.set(facecolor="#f1f3f5", edgecolor="#9aa5b1")
            axes.add_patch(box)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    axes.tick_params(length=0)
    axes.set_xlabel("layer" + (" (hatched: kept dense)" if dense.any() else ""))
    axes.set_ylabel("KV head")
    for side in axes.spines.values():
        side.set_visible(False)
    return image
