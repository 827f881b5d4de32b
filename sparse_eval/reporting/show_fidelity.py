"""task=fidelity at the terminal: what will run, and the table of results."""

from __future__ import annotations

import json
from typing import Any

import pandas as pd
from rich.console import Console

from sparse_eval.cli.config import Settings
from sparse_eval.core import Row
from sparse_eval.reporting.grid import grid_of
from sparse_eval.reporting.summarise_fidelity import split_fidelity, summarise_fidelity
from sparse_eval.reporting.tables_live import fidelity_floor_line, fidelity_table
from sparse_eval.storage.columns import names
from sparse_eval.tasks.live_task import arms_of

SAMPLE_KEYS = names(
    "sample context policy budget_tokens prompt_hash protocol expected_ids output_ids"
    " dense_output_ids top1_agreement kl_mean"
)


def announce(settings: Settings) -> list[str]:
    n, task = settings.prompts["n"], settings.task
    return [
        f"prompts   {n} × {settings.context:,} tokens from {settings.prompts['source']}, the next "
        f"{task['steps']} fed one by one",
        f"long      tokens that dense predicts better by {task['long_gain']:g} nats than with its "
        f"last {task['short_window']} tokens alone",
        f"policies  {', '.join(named.label for named in settings.policies)}, and dense",
        f"budgets   {', '.join(map(str, settings.budgets))} tokens of {settings.context:,}",
        f"cost      {n} prefills at most, "
        f"{n * len(arms_of(settings)) * task['steps']} decode steps",
    ]


def headline(rows: list[Row]) -> dict[str, Any]:
    """What summary.json says of the results, by setting."""
    parts = split_fidelity(pd.DataFrame(rows)).items()
    return {
        "headline": [
            {"setting": name, "table": json.loads(table.to_json(orient="records"))}
            for name, table in ((name, summarise_fidelity(part)) for name, part in parts)
        ]
    }


def samples(rows: list[Row]) -> list[dict[str, Any]]:
    """Per arm: the text fed, and what dense and the policy would have said in each place."""
    return [{key: row[key] for key in SAMPLE_KEYS if key in row} for row in rows]


def print_results(rows: list[Row], settings: Settings, console: Console) -> None:
    for part in split_fidelity(pd.DataFrame(rows)).values():
        first, table = part.iloc[0], summarise_fidelity(part)
        title = (
            f"Fidelity, {first['context']:,} tokens of {first['prompts']}: {first['model']} "
            f"{first['weights']}, protocol {first['protocol']}"
        )
        console.print()
        console.print(grid_of(fidelity_table(table), title))
        console.print(fidelity_floor_line(table))
