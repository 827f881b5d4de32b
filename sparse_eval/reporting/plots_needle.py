"""Needle rows -> pictures (PNG): accuracy by depth and by what is read, outcomes, who read it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from matplotlib.ticker import PercentFormatter

from sparse_eval.needle.kinds import KINDS
from sparse_eval.needle.score import OUTCOMES
from sparse_eval.reporting.heading import (
    BETWEEN,
    INK,
    PANEL,
    line_height,
    new_picture,
    panel_title,
    wrapped,
)
from sparse_eval.reporting.plots import save, with_read
from sparse_eval.reporting.plots_live import (
    draw_line,
    legend_outside,
    line_axes,
    log_axis,
    plain_axes,
    read_axis,
    style_bar,
    with_known_bytes,
)
from sparse_eval.reporting.summarise_needle import (
    depth_table,
    gated_kinds,
    hit_table,
    measured,
    summarise_needle,
)
from sparse_eval.reporting.tables_live import budget_of

PANELS_PER_LINE = 4
OUTCOME_COLOURS = {
    "correct": "#0072B2",
    "garbled": "#7FC4EA",
    "distractor": "#E69F00",
    "fabricated": "#D55E00",
    "off_topic": "#B7A7C9",
    "empty": "#DADFE4",
    "truncated": "#9AA4B0",
}


def needle_pictures(
    rows: pd.DataFrame, answers: pd.DataFrame, folder: Path, end: str
) -> list[Path]:
    """Every picture of one setting, one set per kind. rows: needle rows, of any setting;
    answers: those of whole answers, as split_needle gives them. end: of the files' names."""
    pictures = []
    for kind, part in measured(answers).groupby("needle_kind", sort=False):
        tail = f"{kind}{end}.png"
        heat = folder / f"needle_depth_{tail}"
        pictures.append(needle_heatmap(part, heat, gate_ran=str(kind) in gated_kinds(answers)))
        for context, here in part.groupby("context"):
            only = part["context"].nunique() == 1
            name = tail if only else f"{context}_{tail}"
            pictures.append(needle_curve(here, folder / f"needle_read_{name}"))
            pictures.append(needle_outcomes(here, folder / f"needle_outcomes_{name}"))
            layers = layers_of(rows, here)
            if len(sparse_hits(layers)):  # dense alone reads everything
                pictures.append(needle_hits(layers, here, folder / f"needle_hits_{name}"))
    return pictures


def layers_of(rows: pd.DataFrame, answers: pd.DataFrame) -> pd.DataFrame:
    """The rows of the same cells as these answers', each under its answer's label."""
    labels = answers.drop_duplicates("cell_key").set_index("cell_key")["policy"]
    mine = rows[rows["cell_key"].isin(labels.index)]
    return mine.assign(policy=mine["cell_key"].map(labels))


def needle_heatmap(answers: pd.DataFrame, path: Path | str, *, gate_ran: bool = True) -> Path:
    """Accuracy by depth, a panel per policy, one colour scale. With several contexts the columns
    are contexts, a panel per policy and share of the context read; with one they are budgets."""
    table = depth_table(answers)
    several = table["context"].nunique() > 1
    contexts = sorted(table["context"].unique()) if several else []
    table["column"] = table["context"] if several else table["budget_tokens"]
    panels = heat_panels(table, several)
    hatched = "dense gate not passed" if gate_ran else "dense gate not run"
    lines = math.ceil(len(panels) / PANELS_PER_LINE)
    columns = min(len(panels), PANELS_PER_LINE)
    width = max(8.4, 1.2 + 1.9 * columns)
    room = (width - 1.2) / columns - 0.3
    title_lines = max(len(wrapped(name, room, PANEL)) for name, _ in panels)
    tall = 0.75 + 0.3 * table["depth"].nunique() + (title_lines - 1) * line_height(PANEL)
    figure = new_picture(
        "Answers found, by the needle's depth", subject(answers), width, 1.2 + tall * lines
    )
    grid = figure.subplots(lines, columns, squeeze=False)
    image: Any = None
    for axes, (name, part) in zip(grid.flat, panels, strict=False):
        image = draw_depths(axes, part, contexts)
        panel_title(axes, name, room)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    for axes in grid[:, 0]:
        axes.set_ylabel("depth (0 = first)", color=INK, fontsize=9)
    unit = "context (tokens); a panel per policy and budget" if several else "budget (tokens)"
    figure.supxlabel(f"{unit}; hatched: {hatched}", color=INK, fontsize=9)
    bar = figure.colorbar(image, ax=grid, pad=0.015, aspect=18, format=PercentFormatter(1, 0))
    style_bar(bar, "correct")
    return save(figure, path)


def heat_panels(table: pd.DataFrame, several: bool) -> list[tuple[str, pd.DataFrame]]:
    """A panel per policy; with several contexts one per policy and budget, which is in tokens where
    every context has the same ones and else a share of the context."""
    if not several:
        return [(str(name), part) for name, part in table.groupby("policy", sort=False)]
    by_context = table.dropna(subset="budget_tokens").groupby("context")["budget_tokens"]
    in_tokens = by_context.unique().map(sorted).map(tuple).nunique() <= 1
    share = (table["budget_tokens"] / table["context"]).round(3)
    table = table.assign(level=table["budget_tokens"] if in_tokens else share)
    order = {policy: i for i, policy in enumerate(table["policy"].unique())}
    panels = table.groupby(["policy", "level"], dropna=False, sort=False)
    named: list[Any] = sorted(panels, key=lambda panel: (order[panel[0][0]], panel[0][1]))
    form = "{}, {:,.0f} tokens" if in_tokens else "{}, {:.1%}"
    return [
        (panel_name(str(policy), part) if pd.isna(level) else form.format(policy, level), part)
        for (policy, level), part in named
    ]


def panel_name(policy: str, part: pd.DataFrame) -> str:
    """Of a policy without a budget."""
    return with_read(policy, float(part["density"].mean()))


def draw_depths(axes: Axes, part: pd.DataFrame, columns: list[float]) -> Any:
    """One panel: depths down, columns across, each cell with its accuracy."""
    heat = part.pivot(index="depth", columns="column", values="accuracy").sort_index()
    heat = heat.reindex(columns=columns) if columns else heat
    gated = part.pivot(index="depth", columns="column", values="gated").reindex_like(heat)
    image = axes.imshow(heat.to_numpy(), aspect="auto", cmap="viridis", vmin=0, vmax=1)
    for (line, column), value in np.ndenumerate(heat.to_numpy()):
        if not math.isnan(value):
            ink = INK if value > 0.6 else "white"
            axes.text(column, line, f"{value:.0%}", ha="center", va="center", fontsize=8, color=ink)
        if gated.iloc[line, column] == 1:
            box: dict[str, Any] = {"fill": False, "hatch": "////", "edgecolor": "#ffffff66"}
            axes.add_patch(Rectangle((column - 0.5, line - 0.5), 1, 1, linewidth=0, **box))
    density = float(part["density"].mean())
    labels = [budget_of({"budget_tokens": column, "density": density}) for column in heat.columns]
    axes.set_xticks(range(len(labels)), labels)
    axes.set_yticks(range(len(heat)), [f"{depth:g}" for depth in heat.index])
    plain_axes(axes)
    return image


def needle_curve(answers: pd.DataFrame, path: Path | str) -> Path:
    """Accuracy, and the true answer's NLL, against the share of the model's KV really read."""
    table = summarise_needle(answers)
    figure = new_picture("Does the model still answer?", subject(answers), 9.6, 4.4)
    left, right = figure.subplots(1, 2)
    drawn, label = with_known_bytes(table)
    for policy, line in drawn.groupby("policy", sort=False):
        line = line.sort_values("model_read_fraction")
        errors = [line["accuracy"] - line["low"], line["high"] - line["accuracy"]]
        draw_line(left, str(policy), line, "accuracy", errors)
        draw_line(right, str(policy), line, "answer_nll", line["answer_nll_se"].fillna(0))
    left.set_ylim(-0.03, 1.03)
    left.yaxis.set_major_formatter(PercentFormatter(1, 0))
    left.set_ylabel("correct answers (bars: Wilson 95 %)")
    log_axis(right)
    right.set_ylabel("true answer's NLL (nats, log scale; bars: ± 1 SE)")
    for axes in (left, right):
        read_axis(axes, drawn["model_read_fraction"].min())
        line_axes(axes)
    figure.supxlabel(label, color=INK, fontsize=9.5)
    legend_outside(figure, left)
    return save(figure, path)


def needle_outcomes(answers: pd.DataFrame, path: Path | str) -> Path:
    """What the answers were, a bar per policy and budget."""
    table = summarise_needle(answers)
    names = [
        policy if pd.isna(budget) else f"{policy} {budget:,.0f}"
        for policy, budget in zip(table["policy"], table["budget_tokens"], strict=True)
    ]
    figure = new_picture("What was answered", subject(answers), 8.4, 1.9 + 0.3 * len(table))
    axes = figure.subplots()
    done = np.zeros(len(table))
    for outcome in OUTCOMES:
        share = (table[outcome] / table["n"]).to_numpy()
        if share.any():
            axes.barh(names, share, left=done, label=outcome, color=OUTCOME_COLOURS[outcome])
        done += share
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.xaxis.set_major_formatter(PercentFormatter(1, 0))
    axes.set_xlabel("share of answers; policy, budget in tokens")
    line_axes(axes)
    legend_outside(figure, axes)
    return save(figure, path)


def sparse_hits(rows: pd.DataFrame) -> pd.DataFrame:
    """Of hit_table the lines of policies that leave something out."""
    table = hit_table(rows)
    return table[table["budget_tokens"].notna() | (table["page_hit_chance"] < 1)]


def needle_hits(rows: pd.DataFrame, answers: pd.DataFrame, path: Path | str) -> Path:
    """What share of the pages of the needle's value each layer and KV head read, a panel per policy
    at one budget (the middle one), beside chance."""
    sparse = sparse_hits(rows)
    budgets = sorted(sparse["budget_tokens"].dropna().unique())
    budget = budgets[(len(budgets) - 1) // 2] if budgets else math.nan
    here = sparse[(sparse["budget_tokens"] == budget) | sparse["budget_tokens"].isna()]
    panels = list(here.groupby("policy", sort=False))
    heads = here["kv_head"].nunique()
    read = answers.groupby("policy")["density"].mean()
    height = 1.3 + len(panels) * (0.55 + 0.2 * heads)
    figure = new_picture("Which heads read the needle", subject(answers), 8.4, height)
    grid = figure.subplots(len(panels), 1, squeeze=False, sharex=True)
    image: Any = None
    for axes, (policy, part) in zip(grid[:, 0], panels, strict=True):
        heat = part.pivot(index="kv_head", columns="layer", values="hit")
        image = axes.imshow(heat.to_numpy(), aspect="auto", cmap="viridis", vmin=0, vmax=1)
        own = part["budget_tokens"].iloc[0]
        adaptive = with_read(str(policy), float(read[policy]))
        name = adaptive if pd.isna(own) else f"{policy}, {own:,.0f} tokens"
        title = (
            f"{name}: {part['hit'].mean():.1%} of the value's pages read, "
            f"chance {part['page_hit_chance'].mean():.1%}; "
            f"{part['above_half'].sum():.1f} of {len(part)} heads read over half"
        )
        panel_title(axes, title, 8.4 - 2.0)
        step = max(1, math.ceil(len(heat.columns) / 32))
        shown = range(0, len(heat.columns), step)
        axes.set_xticks(list(shown), [f"{heat.columns[i]:.0f}" for i in shown])
        axes.set_yticks(range(heads))
        plain_axes(axes)
    figure.supxlabel("layer (those kept dense are left out)", color=INK, fontsize=9)
    figure.supylabel("KV head", color=INK, fontsize=9)
    bar = figure.colorbar(image, ax=grid, pad=0.015, aspect=18, format=PercentFormatter(1, 0))
    style_bar(bar, "share of the value's pages read")
    return save(figure, path)


def subject(answers: pd.DataFrame) -> str:
    """Model, needle, protocol, chat format and n of answer rows of one setting."""
    first = answers.iloc[0]
    contexts = sorted(answers["context"].unique())
    span = f"{contexts[0]:,}" if len(contexts) == 1 else f"{contexts[0]:,} to {contexts[-1]:,}"
    parts = [
        *(str(first[name]) for name in ("model", "weights") if first[name]),
        f"{span} tokens of {first['prompts']}",
        f"needle {KINDS[first['needle_kind']].label}",
        f"protocol {first['protocol']}",
        f"chat {first['chat']}",
        f"n = {answers['prompt_hash'].nunique()}",
    ]
    return BETWEEN.join(parts)
