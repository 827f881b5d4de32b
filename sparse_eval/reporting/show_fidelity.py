"""task=fidelity at the terminal: what will run, and the table of results."""

from __future__ import annotations

import json
import math
from typing import Any

import pandas as pd
from rich.console import Console
from rich.table import Table

from sparse_eval.cli.config import Settings
from sparse_eval.core import Row
from sparse_eval.reporting.summarise_fidelity import split_fidelity, summarise_fidelity
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
        table = summarise_fidelity(part)
        console.print()
        console.print(grid_of(table, part.iloc[0]))
        dense = table[table["is_dense"]].iloc[0]
        console.print(
            f"noise floor: stock SDPA, fed in one piece, against dense through the shared kernel: "
            f"KL {dense['stock_kl_mean']:.1e}, {dense['stock_agreement']:.1%} of next tokens equal"
        )


def grid_of(table: pd.DataFrame, first: pd.Series) -> Table:
    num_long, num = table["long_tokens"].max(), table["tokens"].max()
    grid = Table(
        title=f"Fidelity, {first['model']} {first['weights']}, {first['context']:,} tokens of "
        f"{first['prompts']}, protocol {first['protocol']}",
        caption=f"{num:.0f} tokens of {table['n'].max()} prompts, {num_long:.0f} of them need the "
        "long context; KL(dense || policy) and NLL in nats, means over prompts",
        title_justify="left",
        caption_justify="left",
    )
    grid.add_column("policy")
    for name in ("budget", "KV read", "KL mean", "KL p99", "same top 1", "NLL (dense)"):
        grid.add_column(name, justify="right")
    for name in ("long: KL mean", "long: same top 1", "long: NLL (dense)"):
        grid.add_column(name, justify="right")
    for line in table.to_dict("records"):
        grid.add_row(
            line["policy"],
            "all" if math.isnan(line["budget_tokens"]) else f"{line['budget_tokens']:,.0f}",
            f"{line['model_read_fraction']:.1%}",
            f"{line['kl_mean']:.4f}",
            f"{line['kl_p99']:.3f}",
            f"{line['top1_agreement']:.1%}",
            f"{line['nll_sparse']:.3f} ({line['nll_dense']:.3f})",
            f"{line['long_kl_mean']:.4f}",
            f"{line['long_top1_agreement']:.1%}",
            f"{line['long_nll_sparse']:.3f} ({line['long_nll_dense']:.3f})",
        )
    return grid
