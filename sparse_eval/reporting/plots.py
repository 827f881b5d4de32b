"""Recall rows -> pictures (PNG): recall against what is read, against the budget, by layer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import NullLocator, PercentFormatter

from sparse_eval.reporting.heading import BETWEEN, DPI, INK, MUTED, new_picture, panel_title
from sparse_eval.reporting.palette import look_of
from sparse_eval.reporting.summarise import by_layer, dense_policies, recall_rows, summarise_recall

GRID = "#e4e7eb"
MARKER_SIZES = {"*": 12, "P": 8.5, "X": 8.5, "p": 8, "h": 8}
NOT_REALISABLE = "not realisable"


def recall_curve(rows: pd.DataFrame, path: Path | str) -> Path:
    """Mean recall over the non-dense layers against the share of the model's KV really read."""
    table = summarise_recall(rows)
    table["read"] = table["model_read_fraction"].fillna(table["model_kv_fraction"])
    figure, axes = new_figure(rows, "Attention-mass recall against the KV that is read")
    draw_lines(axes, table, "read")
    axes.set_xlim(0, 1.03)
    axes.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.set_xlabel("share of the model's KV read per decode step (KV + metadata, all layers)")
    return save(figure, path)


def recall_by_budget(rows: pd.DataFrame, path: Path | str) -> Path:
    """Mean recall over the non-dense layers against the budget; adaptive policies have none."""
    table = summarise_recall(rows).dropna(subset="budget_tokens")
    if table.empty:
        raise ValueError("expected rows with a budget, got only adaptive policies")
    figure, axes = new_figure(rows, "Attention-mass recall against the budget")
    draw_lines(axes, table, "budget_tokens")
    ticks = sorted(table["budget_tokens"].unique())
    axes.set_xscale("log", base=2)
    axes.set_xlim(ticks[0] / 1.2, ticks[-1] * 1.2)
    axes.set_xticks(ticks, [f"{tick:,.0f}" for tick in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("budget (tokens a KV head may read per decode step, log scale)")
    return save(figure, path)


def recall_heatmap(rows: pd.DataFrame, path: Path | str, budget: int | None = None) -> Path:
    """Recall by policy and layer at one budget (the middle one unless given), dense hatched."""
    table = without_dense_policies(by_layer(rows))
    budgets = sorted(table["budget_tokens"].dropna().unique())
    if budget is None and budgets:
        budget = budgets[(len(budgets) - 1) // 2]
    if budgets and budget not in budgets:
        raise ValueError(f"budget must be one of {', '.join(f'{b:g}' for b in budgets)}")
    here = table[(table["budget_tokens"] == budget) | table["budget_tokens"].isna()]
    here = here.assign(policy=labels_of(here, summarise_recall(rows)))
    recall = here.pivot(index="policy", columns="layer", values="recall")
    recall = recall.loc[list(dict.fromkeys(here["policy"]))]
    dense = here.groupby("layer")["dense_layer"].first()
    height = 1.9 + 0.42 * len(recall)
    title = "Attention-mass recall by layer" + (f" at {budget:,.0f} tokens" if budget else "")
    longest = max(len(str(name)) for name in recall.index)
    width = 8.4 + 0.08 * max(0, longest - 12)
    figure, axes = new_figure(rows, title, height=height, width=width)
    image = draw_heat(axes, recall, dense)
    bar = figure.colorbar(image, ax=axes, pad=0.015, aspect=12, format="%.2f")
    bar.set_label("recall", color=MUTED, fontsize=9)
    bar.outline.set_visible(False)  # type: ignore[operator]
    bar.ax.tick_params(labelsize=8, colors=MUTED, length=0)
    return save(figure, path)


def labels_of(lines: pd.DataFrame, table: pd.DataFrame) -> list[str]:
    """The policies of lines; those without a budget with the share of tokens that they read.
    table: of summarise_recall."""
    chosen = table[table["budget_tokens"].isna()].set_index("policy")["density"].to_dict()
    return [with_read(str(name), chosen.get(name, math.nan)) for name in lines["policy"]]


def with_read(policy: str, density: float) -> str:
    """density: of a policy without a budget, else NaN."""
    return f"{policy} (adaptive: {density:.1%})" if density < 1 else policy


def without_dense_policies(table: pd.DataFrame) -> pd.DataFrame:
    """Leaves out policies that read everything at every budget, unless there are no others."""
    kept = table[~table["policy"].isin(dense_policies(table))]
    return kept if len(kept) else table


def new_figure(
    rows: pd.DataFrame, headline: str, *, height: float = 4.6, width: float = 8.4
) -> tuple[Figure, Axes]:
    """A figure of one panel, its headline, and below that what was measured."""
    figure, (axes,) = new_panels(rows, headline, [""], height=height, width=width)
    return figure, axes


def new_panels(
    rows: pd.DataFrame,
    headline: str,
    titles: Sequence[str],
    *,
    height: float = 4.6,
    width: float | None = None,
) -> tuple[Figure, list[Axes]]:
    """Panels side by side, each with its title, below one headline and what was measured."""
    width = 8.4 + 4.4 * (len(titles) - 1) if width is None else width
    figure = new_picture(headline, subject(rows), width, height)
    panels = list(figure.subplots(1, len(titles), squeeze=False)[0])
    for axes, title in zip(panels, titles, strict=True):
        if title:
            panel_title(axes, title, width / len(titles) - 1.0)
        style(axes)
    return figure, panels


def style(axes: Axes) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color("#b8c0ca")
    axes.tick_params(colors=MUTED, labelsize=9, length=3)
    axes.xaxis.label.set(color=INK, fontsize=9.5)
    axes.yaxis.label.set(color=INK, fontsize=9.5)


def subject(rows: pd.DataFrame) -> str:
    """Model, weights, context, prompts and n of rows of one setting."""
    rows = recall_rows(rows)
    first = rows.iloc[0]
    parts = [str(first[name]) for name in ("model", "weights") if first.get(name)]
    if first.get("context") is not None:
        parts.append(f"context {first['context']:,.0f} tokens")
    if first.get("prompts"):
        parts.append(str(first["prompts"]))
    num_prompts = rows["prompt"].nunique()
    parts.append(f"n = {num_prompts} prompt{'s' if num_prompts > 1 else ''}")
    return BETWEEN.join(parts)


def draw_lines(axes: Axes, table: pd.DataFrame, x: str) -> None:
    """One line a policy; what reads everything is a point; error bars where n > 1."""
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    best_first = table.groupby("policy")["recall"].mean().sort_values(ascending=False).index
    dense = dense_policies(table)
    for policy in best_first:
        line = table[table["policy"] == policy].sort_values(x)
        if policy in dense and x == "read":
            line = line.head(1)
        axes.errorbar(line[x], line["recall"], yerr=error_bars(line), **line_style(policy, line))
    axes.set_ylim(lowest(table), 1.0 + 0.03 * (1 - lowest(table)))
    axes.set_ylabel("recall (share of the dense softmax's mass)")
    draw_legend(axes, table)


def draw_legend(axes: Axes, table: pd.DataFrame) -> None:
    """Beside the panel."""
    bars = "bars: ± 1 standard error" if (table["n"] > 1).any() else ""
    legend = axes.legend(
        loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=9, title=bars or None
    )
    legend.get_title().set(fontsize=8, color=MUTED)


def error_bars(line: pd.DataFrame) -> list[float] | None:
    errors = [0 if math.isnan(e) else e for e in line["recall_se"]]
    return errors if any(errors) else None


def line_style(policy: Any, line: pd.DataFrame) -> dict[str, Any]:
    look = look_of(str(policy))
    realisable = bool(line["realisable"].all())
    return {
        "label": str(policy) if realisable else f"{policy} ({NOT_REALISABLE})",
        "color": look.light,
        "linestyle": look.dash if realisable else (0, (4, 2)),
        "marker": look.marker,
        "markersize": MARKER_SIZES.get(look.marker, 6.5),
        "markerfacecolor": look.light if realisable else "white",
        "markeredgecolor": "white" if realisable else look.light,
        "markeredgewidth": 0.9 if realisable else 1.4,
        "linewidth": 1.9 if realisable else 1.4,
        "capsize": 2.5,
        "elinewidth": 1.2,
        "clip_on": False,
        "zorder": 3,
    }


def lowest(table: pd.DataFrame) -> float:
    """Where the recall axis starts: the tenth below the lowest point."""
    least = (table["recall"] - table["recall_se"].fillna(0)).min()
    return 0.0 if math.isnan(least) else max(0.0, math.floor(10 * least - 0.2) / 10)


def draw_heat(axes: Axes, recall: pd.DataFrame, dense: pd.Series) -> Any:
    measured = recall.loc[:, ~dense.reindex(recall.columns).astype(bool)]
    low = 0.0 if measured.empty else max(0.0, math.floor(10 * measured.min().min()) / 10)
    image = axes.imshow(recall.to_numpy(), aspect="auto", cmap="viridis", vmin=low, vmax=1)
    for column, layer in enumerate(recall.columns):
        if dense[layer]:
            box = Rectangle((column - 0.5, -0.5), 1, len(recall), linewidth=0, hatch="////")
            box.set(facecolor="#f1f3f5", edgecolor="#9aa5b1")
            axes.add_patch(box)
    axes.set_yticks(range(len(recall)), [str(name) for name in recall.index])
    step = max(1, math.ceil(len(recall.columns) / 32))
    shown = range(0, len(recall.columns), step)
    axes.set_xticks(list(shown), [str(recall.columns[i]) for i in shown])
    axes.tick_params(length=0)
    axes.set_xlabel("layer" + (" (hatched: kept dense)" if dense.any() else ""))
    for side in axes.spines.values():
        side.set_visible(False)
    for line in range(1, len(recall)):
        axes.axhline(line - 0.5, color="white", linewidth=2)
    return image


@contextmanager
def also_as(formats: Sequence[str]) -> Iterator[None]:
    """Every picture saved inside is written as pdf or svg too, beside its PNG."""
    token = _also.set(tuple(formats))
    try:
        yield
    finally:
        _also.reset(token)


_also: ContextVar[tuple[str, ...]] = ContextVar("also", default=())


def save(figure: Figure, path: Path | str) -> Path:
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # text stays text in vector files: it can be searched, and set in the reader's font
    with rc_context({"svg.fonttype": "none", "pdf.fonttype": 42, "svg.hashsalt": "sparse_eval"}):
        for suffix in _also.get():
            # a date would make every rebuilt file another one
            metadata = {"CreationDate": None} if suffix == "pdf" else {"Date": None}
            figure.savefig(path.with_suffix(f".{suffix}"), metadata=metadata)
    figure.savefig(path, dpi=DPI)
    return path
