"""task=recall at the terminal: what will run, and the table of results."""

from __future__ import annotations

import json
from typing import Any

import pandas as pd
from rich.console import Console
from rich.table import Table

from sparse_eval.cli.config import Settings
from sparse_eval.core import Row
from sparse_eval.models import model_info
from sparse_eval.reporting.frontiers import ranking_sentence
from sparse_eval.reporting.summarise import replay_line, summarise_recall


def announce(settings: Settings) -> list[str]:
    n, cells = settings.prompts["n"], len(settings.cells()) * settings.prompts["n"]
    return [
        f"prompts   {n} × {settings.context:,} tokens from {settings.prompts['source']}, "
        f"{settings.task['steps']} decode steps each",
        f"policies  {', '.join(named.label for named in settings.policies)}",
        f"budgets   {', '.join(map(str, settings.budgets))} tokens of {settings.context:,}",
        f"cost      {n} prefills at most, {cells} cells",
    ]


def headline(rows: list[Row]) -> dict[str, Any]:
    """What summary.json says of the results."""
    table = summarise_recall(pd.DataFrame(rows))
    return {"headline": json.loads(table.to_json(orient="records"))}


def samples(rows: list[Row]) -> list[dict[str, Any]]:
    """A capture has no answer: no samples."""
    return []


def cell(lines: pd.DataFrame, budget: float) -> str:
    """A policy's recall at a budget."""
    if budget not in lines.index:
        return "failed"
    line = lines.loc[budget]
    return f"{line['recall']:.3f} ({line['contested']:.3f})"


def adaptive_cell(lines: pd.DataFrame) -> str:
    """An adaptive policy's recall and what it read: of all tokens, and where its query heads choose
    apart, by a head for itself."""
    if not len(lines):
        return "failed"
    line = lines.iloc[0]
    own = line.get("density_head", float("nan"))
    alone = "" if pd.isna(own) else f", a head {own:.1%}"
    return f"{line['recall']:.3f} ({line['contested']:.3f}), reads {line['density']:.1%}{alone}"


def print_results(rows: list[Row], settings: Settings, console: Console) -> None:
    """The table: policy × budget -> mean recall over the non-dense layers, and what the policy
    found beyond the forced pages."""
    table = summarise_recall(pd.DataFrame(rows))
    dense = ", ".join(map(str, settings.dense_layers)) or "none"
    is_all_dense = all(row["dense_layer"] for row in rows)
    text = rows[0].get("prompts") or settings.prompts["source"]
    counted = "all dense" if is_all_dense else f"dense, not counted: {dense}"
    grid = Table(
        title=f"Attention-mass recall, {model_info(settings.model).title}, "
        f"{settings.context:,} tokens of {text}, page {rows[0]['page_size']}",
        caption=f"mean over layers ({counted}), KV heads, queries and "
        f"n = {settings.prompts['n']} prompts; in brackets: the share found of the mass that "
        "the forced pages (sinks, local) do not hold",
        title_justify="left",
        caption_justify="left",
    )
    budgets = sorted(table["budget_tokens"].dropna().unique())
    grid.add_column("policy")
    for budget in budgets:
        grid.add_column(f"{int(budget)} tokens", justify="right")
    adaptive = any(named.policy.adaptive for named in settings.policies)
    if adaptive:
        grid.add_column("without a budget", justify="right")
    # yardsticks first: what everything and what the best choice would give
    for named in sorted(settings.policies, key=lambda n: (not n.policy.dense, n.policy.realisable)):
        mine = table[table["policy"] == named.label].set_index("budget_tokens")
        if named.policy.adaptive:
            grid.add_row(named.label, *([""] * len(budgets)), adaptive_cell(mine))
        else:
            grid.add_row(named.label, *(cell(mine, budget) for budget in budgets))
    console.print()
    console.print(grid)
    console.print(replay_line(pd.DataFrame(rows)))
    if len(settings.policies) > 1:
        console.print(ranking_sentence(pd.DataFrame(rows)))
    if is_all_dense:
        console.print(
            f"every layer is dense (dense_layers={list(settings.dense_layers)}): nothing is left "
            "out, so recall is 1 whatever the policy"
        )
