"""task=lm_eval at the terminal: what will run, the gate, and the tables of results."""

from __future__ import annotations

from typing import Any

import pandas as pd
from rich.console import Console

from sparse_eval.cli.config import Settings
from sparse_eval.core import Row
from sparse_eval.lm.config import lm_config
from sparse_eval.lm.globs import expanded
from sparse_eval.reporting.grid import grid_of
from sparse_eval.reporting.show_needle import records
from sparse_eval.reporting.summarise_lm_eval import (
    gate_table,
    noise_floor,
    split_lm_eval,
    summarise_lm_eval,
    task_table,
)
from sparse_eval.reporting.tables_lm_eval import floor_line, gate_lines, mean_table, scores_table
from sparse_eval.storage.columns import names
from sparse_eval.tasks.live_task import arms_of
from sparse_eval.terminal import labelled

SAMPLE_KEYS = names(
    "lm_task sample policy budget_tokens prompt_hash prompt_tokens chat protocol truncated metric"
    " value dense_value scores expected output output_ids is_over log_likelihoods dense_output"
    " identical_to_dense gated"
)
TASK_KEYS = names(
    "lm_task policy budget_tokens metric value stderr n dense_value difference difference_low"
    " difference_high p_value p_holm resolvable verdict gated truncated identical_to_dense"
    " model_read_fraction"
)


def announce(settings: Settings) -> list[str]:
    config = expanded(lm_config(settings.task, settings.protocol, settings.seed))
    limit = "all" if config.limit is None else config.limit
    arms = len(arms_of(settings))
    return [
        f"tasks     {', '.join(config.tasks)}",
        f"documents {limit} a task, {config.gate.n} more for the dense gate; chat {config.chat}, "
        f"protocol {settings.protocol['name']}, {config.batch_size} decoded together",
        f"policies  {', '.join(named.label for named in settings.policies)}, and dense",
        f"budgets   {', '.join(map(str, settings.budgets))} tokens of {settings.context:,}",
        f"cost      a prefill and {arms} answers a document, one prefill and answer for the gate's",
    ]


def headline(rows: list[Row]) -> dict[str, Any]:
    """What summary.json says of the results: by setting, mean and worst, tasks, gate."""
    return {
        "headline": [
            {
                "setting": name,
                "table": records(summarise_lm_eval(part)),
                "tasks": records(task_table(part).reindex(columns=list(TASK_KEYS))),
                "gate": records(gate_table(part)),
                "noise_floor": records(pd.DataFrame([noise_floor(part)]))[0],
            }
            for name, part in split_lm_eval(pd.DataFrame(rows)).items()
        ]
    }


def samples(rows: list[Row]) -> list[dict[str, Any]]:
    """Lines of samples.jsonl: what each arm answered, beside what dense did."""
    return [
        {key: row[key] for key in SAMPLE_KEYS if key in row}
        for row in rows
        if row["role"] == "sample"
    ]


def print_results(rows: list[Row], settings: Settings, console: Console) -> None:
    for part in split_lm_eval(pd.DataFrame(rows)).values():
        first = part.iloc[0]
        title = (
            f"lm-eval at {first['context']:,} tokens: {first['model']} {first['weights']}, "
            f"protocol {first['protocol']}, chat {first['chat']}"
        )
        console.print()
        console.print(grid_of(scores_table(task_table(part)), title))
        console.print(grid_of(gate_lines(gate_table(part)), "Dense gate"))
        console.print(
            grid_of(mean_table(summarise_lm_eval(part)), "Mean of the tasks that passed the gate")
        )
        refused = gate_table(part)
        refused = refused[refused["gated"].astype(bool)]
        ran = refused["gate_on"] != "none"
        for why, some in (("passed", refused[ran]), ("run", refused[~ran])):
            if len(some):
                listed = ", ".join(some["lm_task"])
                console.print(labelled(f"not ranked, dense gate not {why}:", listed))
        console.print(floor_line(noise_floor(part)))
