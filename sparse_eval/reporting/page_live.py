"""Needle and fidelity rows -> one self-contained HTML page: tables, pictures, provenance."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import pandas as pd

from sparse_eval.needle.kinds import KINDS
from sparse_eval.needle.score import OUTCOMES
from sparse_eval.reporting.dashboard import picture, run_facts
from sparse_eval.reporting.html_table import html_table
from sparse_eval.reporting.summarise_fidelity import split_fidelity, summarise_fidelity
from sparse_eval.reporting.summarise_latency import latency_table, split_latency
from sparse_eval.reporting.summarise_lm_eval import gate_table as lm_gate_table
from sparse_eval.reporting.summarise_lm_eval import noise_floor as lm_noise_floor
from sparse_eval.reporting.summarise_lm_eval import split_lm_eval, summarise_lm_eval, task_table
from sparse_eval.reporting.summarise_needle import (
    gate_table,
    noise_floor,
    split_needle,
    summarise_needle,
)
from sparse_eval.reporting.tables_latency import timings_table
from sparse_eval.reporting.tables_live import (
    answers_table,
    comparison_table,
    fidelity_floor_line,
    fidelity_table,
    floor_line,
    gate_lines,
)
from sparse_eval.reporting.tables_lm_eval import floor_line as lm_floor_line
from sparse_eval.reporting.tables_lm_eval import gate_lines as lm_gate_lines
from sparse_eval.reporting.tables_lm_eval import mean_table, scores_table, tasks_table


def live_page(
    rows: pd.DataFrame, runs: Sequence[Mapping[str, Any]], pictures: Sequence[Path]
) -> str:
    """runs: the summaries of the runs that the rows are from, each with its "folder"."""
    tasks = set(rows["task"])
    sections = needle_sections(rows) if "needle" in tasks else []
    sections += fidelity_sections(rows) if "fidelity" in tasks else []
    sections += lm_eval_sections(rows) if "lm_eval" in tasks else []
    sections += latency_sections(rows) if "latency" in tasks else []
    first = rows.iloc[0]
    title = html.escape(f"{first['model']} · {first['weights']}")
    style = (files("sparse_eval.reporting") / "page" / "page.css").read_text()
    shown = "\n".join(f"<figure>{picture(path)}</figure>" for path in pictures)
    facts = "\n".join(run_facts(run) for run in runs) or "<p>No summary.json was found.</p>"
    named = html.escape(", ".join(sorted(tasks)))
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; \
img-src data:">
<title>{title}: {named}</title><style>{style}</style></head><body>
<header><p class="eyebrow">sparse_eval · {named}</p><h1>{title}</h1></header>
<main>
{"".join(sections)}
<section><div class="head"><h2>Pictures</h2></div>{shown}</section>
<section><div class="head"><h2>Where the numbers come from</h2></div>{facts}</section>
</main></body></html>
"""


def section(title: str, *parts: str) -> str:
    body = "\n".join(parts)
    return f'<section><div class="head"><h2>{html.escape(title)}</h2></div>{body}</section>\n'


def needle_sections(rows: pd.DataFrame) -> list[str]:
    sections = []
    for name, part in split_needle(rows).items():
        first = part.iloc[0]
        where = f"protocol {first['protocol']}, chat {first['chat']}" + (
            f", {name}" if name else ""
        )
        grid = summarise_needle(part).groupby(["needle_kind", "context"], sort=False)
        for (kind, context), table in grid:
            title = f"Needle {KINDS[str(kind)].label}, {context:,} tokens of {first['prompts']}"
            tables = html_table(answers_table(table)), html_table(comparison_table(table))
            sections.append(section(f"{title}, {where}", *tables))
        floor = f"<p>{html.escape(floor_line(noise_floor(part)))}</p>"
        gate = html_table(gate_lines(gate_table(part)))
        sections.append(section(f"Dense gate and noise floor, {where}", gate, floor))
    return [*sections, section("What the outcomes mean", outcome_list())]


def outcome_list() -> str:
    terms = "".join(
        f"<div><dt>{name}</dt><dd>{html.escape(rule)}</dd></div>" for name, rule in OUTCOMES.items()
    )
    return f'<dl class="terms">{terms}</dl>'


def fidelity_sections(rows: pd.DataFrame) -> list[str]:
    sections = []
    for name, part in split_fidelity(rows).items():
        table = summarise_fidelity(part)
        floor = f"<p>{html.escape(fidelity_floor_line(table))}</p>"
        title = "Fidelity" + (f", {name}" if name else "")
        sections.append(section(title, html_table(fidelity_table(table)), floor))
    return sections


def lm_eval_sections(rows: pd.DataFrame) -> list[str]:
    sections = []
    for name, part in split_lm_eval(rows).items():
        first, tasks, gate = part.iloc[0], task_table(part), lm_gate_table(part)
        where = f"{first['context']:,} tokens, protocol {first['protocol']}, chat {first['chat']}"
        title = f"lm-eval, {where}" + (f", {name}" if name else "")
        floor = f"<p>{html.escape(lm_floor_line(lm_noise_floor(part)))}</p>"
        sections += [
            section(title, html_table(scores_table(tasks))),
            section(
                "Mean of the tasks that passed the gate",
                html_table(mean_table(summarise_lm_eval(part))),
            ),
            section("Task by task against dense", html_table(tasks_table(tasks))),
            section("Dense gate and noise floor", html_table(lm_gate_lines(gate)), floor),
        ]
    return sections


def latency_sections(rows: pd.DataFrame) -> list[str]:
    return [
        section(f"Latency, {name}", html_table(timings_table(latency_table(part))))
        for name, part in split_latency(rows[rows["task"] == "latency"]).items()
    ]
