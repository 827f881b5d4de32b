"""task=latency at the terminal: what will run, and the table of results."""

from __future__ import annotations

import json
from typing import Any

import pandas as pd
from rich.console import Console

from sparse_eval.cli.config import Settings
from sparse_eval.core import Row
from sparse_eval.latency.config import latency_config
from sparse_eval.models import model_info
from sparse_eval.reporting.grid import grid_of
from sparse_eval.reporting.summarise_latency import latency_table, split_latency
from sparse_eval.reporting.tables_latency import timings_table


def announce(settings: Settings) -> list[str]:
    c = latency_config(settings.task, model_info(settings.model))
    s = c.shapes
    modes = " and ".join("CUDA graph" if graph else "eager" for graph in c.graph)
    return [
        f"shapes    {s.num_heads} query heads, {s.num_kv_heads} KV heads of {s.head_dim}; no "
        "weights are loaded",
        f"grid      batch {', '.join(map(str, c.batches))} × context "
        f"{', '.join(f'{n:,}' for n in c.contexts)}",
        f"timed     {', '.join(c.what)}; {modes}",
        f"step      page {settings.policies[0].policy.page_size}, budget {settings.budgets[0]:,}",
    ]


def headline(rows: list[Row]) -> dict[str, Any]:
    """What summary.json says of the results: every timing."""
    parts = split_latency(pd.DataFrame(rows))
    return {
        "headline": [
            {"setting": name, "table": json.loads(latency_table(part).to_json(orient="records"))}
            for name, part in parts.items()
        ]
    }


def samples(rows: list[Row]) -> list[dict[str, Any]]:
    return []


def print_results(rows: list[Row], settings: Settings, console: Console) -> None:
    for name, part in split_latency(pd.DataFrame(rows)).items():
        console.print()
        console.print(grid_of(timings_table(latency_table(part)), f"Decode attention, {name}"))
