"""task=latency at the terminal: what will run, and the table of results."""

from __future__ import annotations

import json
from typing import Any

import pandas as pd
from rich.console import Console
from rich.table import Table

from sparse_eval.config import Settings
from sparse_eval.core import Row
from sparse_eval.latency.config import latency_config
from sparse_eval.models import model_info
from sparse_eval.summarise_latency import latency_table, split_latency


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
        console.print(grid_of(latency_table(part), name))


def grid_of(table: pd.DataFrame, name: str) -> Table:
    grid = Table(
        title=f"Decode attention, {name}",
        caption="µs: median (10th to 90th percentile); TB/s: the fewest bytes the work must move, "
        "over its time; in brackets the share of the ceiling measured in this run, * where the "
        "data fit in the L2; speed-up over the fastest SDPA, and over the fastest dense of all",
        title_justify="left",
        caption_justify="left",
    )
    for column in ("batch", "context", "what", "mode", "µs", "TB/s", "vs SDPA", "vs best"):
        grid.add_column(column, justify="left" if column in ("what", "mode") else "right")
    for line in table.to_dict("records"):
        rate, share = line.get("terabytes_per_s"), line.get("ceiling_fraction")
        grid.add_row(
            str(line["batch"]),
            f"{line['context']:,}",
            line.get("baseline") or line["what"],
            "graph" if line["graph"] else "eager",
            f"{line['median_us']:,.1f} ({line['p10_us']:,.1f} to {line['p90_us']:,.1f})",
            ""
            if not rate or pd.isna(rate)
            else f"{rate:.2f} ({share:.0%})" + ("*" if line["l2_resident"] else ""),
            times(line.get("speedup_vs_sdpa")),
            times(line.get("speedup_vs_best")),
        )
    return grid


def times(value: Any) -> str:
    return "" if value is None or pd.isna(value) else f"{value:.2f}×"
