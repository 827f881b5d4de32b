"""task=needle at the terminal: what will run, the gate, and the table of results."""

from __future__ import annotations

import json
from typing import Any

import pandas as pd
from rich.console import Console

from sparse_eval.cli.config import Settings
from sparse_eval.core import Row
from sparse_eval.needle.config import needle_config
from sparse_eval.needle.gate import can_pass
from sparse_eval.needle.kinds import KINDS
from sparse_eval.reporting.grid import grid_of
from sparse_eval.reporting.summarise_needle import (
    gate_table,
    noise_floor,
    split_needle,
    summarise_needle,
)
from sparse_eval.reporting.tables_live import (
    answers_table,
    comparison_table,
    floor_line,
    gate_lines,
)
from sparse_eval.storage.columns import names
from sparse_eval.tasks.live_task import arms_of
from sparse_eval.terminal import labelled

SAMPLE_KEYS = names(
    "sample role needle_kind context depth depth_realised wording policy budget_tokens prompt_hash"
    " chat protocol needle expected output output_ids outcome answer_nll dense_output"
)


def announce(settings: Settings) -> list[str]:
    config = needle_config(
        settings.task,
        context=settings.context,
        n=settings.prompts["n"],
        protocol=settings.protocol["name"],
    )
    spots = len(config.contexts) * len(config.kinds) * len(config.depths)
    gate = config.gate.n if can_pass(config.gate) else 0
    more = f"{gate} more for the dense gate" if gate else "dense gate not run"
    return [
        f"needles   {', '.join(KINDS[kind].label for kind in config.kinds)}, chat {config.chat}, "
        f"protocol {settings.protocol['name']}",
        f"haystack  {', '.join(f'{c:,}' for c in config.contexts)} tokens of "
        f"{settings.prompts['source']}; depths {', '.join(f'{d:g}' for d in config.depths)}; "
        f"{config.n} samples each, {more}",
        f"policies  {', '.join(named.label for named in settings.policies)}, and dense",
        f"budgets   {', '.join(map(str, settings.budgets_asked))} (fractions are of the context)",
        f"cost      {spots * (config.n + gate)} prefills at most, "
        f"{spots * (config.n * len(arms_of(settings)) + gate)} answers",
    ]


def headline(rows: list[Row]) -> dict[str, Any]:
    """What summary.json says of the results: by setting, the table, the gate, the noise floor."""
    return {
        "headline": [
            {
                "setting": name,
                "table": records(summarise_needle(part)),
                "gate": records(gate_table(part)),
                "noise_floor": records(pd.DataFrame([noise_floor(part)]))[0],
            }
            for name, part in split_needle(pd.DataFrame(rows)).items()
        ]
    }


def records(table: pd.DataFrame) -> list[dict[str, Any]]:
    return json.loads(table.to_json(orient="records"))


def samples(rows: list[Row]) -> list[dict[str, Any]]:
    """Lines of samples.jsonl: what each arm answered, beside what dense did."""
    return [
        {key: row[key] for key in SAMPLE_KEYS if key in row}
        for row in rows
        if row["task"] == "needle" and "outcome" in row
    ]


def print_results(rows: list[Row], settings: Settings, console: Console) -> None:
    for part in split_needle(pd.DataFrame(rows)).values():
        first, table = part.iloc[0], summarise_needle(part)
        for (kind, context), here in table.groupby(["needle_kind", "context"], sort=False):
            title = (
                f"Needle {KINDS[str(kind)].label}, {context:,} tokens of {first['prompts']}: "
                f"{first['model']} {first['weights']}, protocol {first['protocol']}, "
                f"chat {first['chat']}"
            )
            console.print()
            console.print(grid_of(answers_table(here), title))
            console.print(grid_of(comparison_table(here)))
        print_gate(part, console)
        console.print(floor_line(noise_floor(part)))


def print_gate(part: pd.DataFrame, console: Console) -> None:
    gate = gate_table(part)
    refused = gate[gate["not_ranked"]]
    ran = refused["gate_n"] > 0
    for why, some in (("passed", refused[ran]), ("run", refused[~ran])):
        places = [
            f"{kind} {n} at {depth}" + (f" ({found})" if why == "passed" else "")
            for kind, n, depth, found, *_ in gate_lines(some).lines
        ]
        if places:
            console.print(labelled(f"not ranked, dense gate not {why}:", "; ".join(places)))
