"""task=needle at the terminal: what will run, the gate, and the table of results."""

from __future__ import annotations

import json
import math
from typing import Any

import pandas as pd
from rich.console import Console
from rich.table import Table

from sparse_eval.cli.config import Settings
from sparse_eval.core import Row
from sparse_eval.needle.config import needle_config
from sparse_eval.needle.gate import can_pass
from sparse_eval.needle.kinds import KINDS
from sparse_eval.needle.score import OUTCOMES
from sparse_eval.reporting.summarise_needle import (
    gate_table,
    noise_floor,
    split_needle,
    summarise_needle,
)
from sparse_eval.storage.columns import names
from sparse_eval.tasks.live_task import arms_of

SAMPLE_KEYS = names(
    "sample role needle_kind context depth depth_realised wording policy budget_tokens prompt_hash"
    " chat protocol needle expected output output_ids outcome answer_nll dense_output"
)

SHORT = {
    "garbled": "garb.",
    "distractor": "distr.",
    "fabricated": "fabr.",
    "off_topic": "off",
    "empty": "empty",
    "truncated": "trunc.",
}


def announce(settings: Settings) -> list[str]:
    config = needle_config(
        settings.task,
        context=settings.context,
        n=settings.prompts["n"],
        protocol=settings.protocol["name"],
    )
    spots = len(config.contexts) * len(config.kinds) * len(config.depths)
    gate = config.gate.n if can_pass(config.gate) else 0
    return [
        f"needles   {', '.join(KINDS[kind].label for kind in config.kinds)}, chat {config.chat}, "
        f"protocol {settings.protocol['name']}",
        f"haystack  {', '.join(f'{c:,}' for c in config.contexts)} tokens of "
        f"{settings.prompts['source']}; depths {', '.join(f'{d:g}' for d in config.depths)}; "
        f"{config.n} samples each, {gate} more for the dense gate",
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
        console.print()
        table = summarise_needle(part)
        for (kind, context), here in table.groupby(["needle_kind", "context"], sort=False):
            console.print(
                answers_table(here, f"{KINDS[str(kind)].label}, {context:,} tokens", part)
            )
            console.print(comparison_table(here))
        print_gate(part, console)
        floor = noise_floor(part)
        console.print(
            f"noise floor: stock SDPA against dense through the shared kernel, {floor['n']} "
            f"prompts: the true answer's NLL differs by {floor['nll_difference']:.1e} nats at "
            f"most, {floor['same_choice']:.1%} of next tokens are the same"
        )


def print_gate(part: pd.DataFrame, console: Console) -> None:
    gate = gate_table(part)
    refused = gate[gate["not_ranked"]]
    if not len(refused):
        return
    lines = [
        f"{line['needle_kind']} {line['context']:,} at {line['depth']:g} "
        f"({line['gate_correct']} of {line['gate_n']})"
        for line in refused.to_dict("records")
    ]
    console.print(f"[yellow]not ranked, dense gate not passed:[/yellow] {'; '.join(lines)}")


def answers_table(table: pd.DataFrame, what: str, rows: pd.DataFrame) -> Table:
    """Every measured prompt, whatever the gate said."""
    first = rows.iloc[0]
    grid = Table(
        title=f"Needle {what}: {first['model']} {first['weights']}, protocol {first['protocol']}, "
        f"chat {first['chat']}, {first['prompts']}",
        caption="n correct of all prompts, Wilson 95 %; the other answers by kind; NLL of the true "
        "answer, nats",
        title_justify="left",
        caption_justify="left",
    )
    others = [name for name in OUTCOMES if name != "correct"]
    grid.add_column("policy")
    for name in ("budget", "KV read", "correct", "interval", *(SHORT[o] for o in others), "NLL"):
        grid.add_column(name, justify="right")
    for line in lines_of(table):
        grid.add_row(
            line["policy"],
            budget_of(line),
            f"{line['model_read_fraction']:.1%}",
            f"{line['correct']} of {line['n']}",
            f"{line['low']:.2f}-{line['high']:.2f}",
            *(str(line[name] or "") for name in others),
            f"{line['answer_nll']:.2f}",
        )
    return grid


def comparison_table(table: pd.DataFrame) -> Table:
    """Who read the value; and against dense, on the prompts whose gate passed."""
    resolvable = table["resolvable"].max() if "resolvable" in table else math.nan
    smallest = "none" if math.isnan(resolvable) else f"{resolvable:.2f}"
    grid = Table(
        caption="hit: reads of the value's pages, beside chance; heads above one half; wordings: "
        "spread of accuracy. less dense: paired, Tango 95 %, exact McNemar's p; smallest "
        f"difference it can resolve: {smallest}",
        caption_justify="left",
    )
    grid.add_column("policy")
    for name in ("budget", "hit", "chance", "heads > ½", "wordings", "less dense", "p", "rank"):
        grid.add_column(name, justify="right")
    grid.add_column("verdict")
    for line in lines_of(table):
        grid.add_row(
            line["policy"],
            budget_of(line),
            f"{line['page_hit']:.1%}",
            f"{line['page_hit_chance']:.1%}",
            f"{line['heads_above_half']:.1f}/{line['heads']:.0f}",
            f"{line['wording_spread']:.2f}",
            *compared_cells(line),
        )
    return grid


def lines_of(table: pd.DataFrame) -> list[dict[str, Any]]:
    return [{str(name): value for name, value in line.items()} for line in table.to_dict("records")]


def budget_of(line: dict[str, Any]) -> str:
    return "all" if math.isnan(line["budget_tokens"]) else f"{line['budget_tokens']:,.0f}"


def compared_cells(line: dict[str, Any]) -> list[str]:
    if line["is_dense"]:
        return ["", "", "", "dense"]
    if math.isnan(line["difference"]):
        return ["", "", "", str(line["verdict"])]
    interval = f"[{line['diff_low']:+.2f}, {line['diff_high']:+.2f}]"
    rank = "" if math.isnan(line["rank"]) else f"{line['rank']:.0f}"
    return [
        f"{line['difference']:+.2f} {interval}",
        f"{line['p_value']:.3f}",
        rank,
        line["verdict"],
    ]
