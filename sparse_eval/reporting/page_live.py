"""Needle and fidelity rows -> one self-contained HTML page: tables, pictures, provenance."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import pandas as pd

from sparse_eval.needle.kinds import KINDS
from sparse_eval.needle.score import OUTCOMES
from sparse_eval.reporting.dashboard import picture, run_facts
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
from sparse_eval.reporting.tables_live import (
    TextTable,
    answers_table,
    comparison_table,
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
<title>{title}: {named}</title><style>{style}
.left {{ text-align: left; }} .right {{ text-align: right; }}
figure {{ margin: 8px 0; }} figure img {{ max-width: 100%; }} p.hint {{ margin: 6px 0 14px; }}
</style></head><body>
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


def table_of(table: TextTable) -> str:
    """A table with what its columns mean below."""
    left = {0, *(table.head.index(name) for name in table.left)}

    def cells(tag: str, line: Sequence[str]) -> str:
        sides = ["left" if i in left else "right" for i in range(len(line))]
        return "".join(
            f'<{tag} class="{side}">{html.escape(text)}</{tag}>'
            for side, text in zip(sides, line, strict=True)
        )

    body = "".join(f"<tr>{cells('td', line)}</tr>" for line in table.lines)
    return (
        f'<div class="scroll" tabindex="0"><table><thead><tr>{cells("th", table.head)}</tr></thead>'
        f'<tbody>{body}</tbody></table></div><p class="hint">{html.escape(table.note)}</p>'
    )


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
            tables = table_of(answers_table(table)), table_of(comparison_table(table))
            sections.append(section(f"{title}, {where}", *tables))
        floor = f"<p>{html.escape(floor_line(noise_floor(part)))}</p>"
        gate = table_of(gate_lines(gate_table(part)))
        sections.append(section(f"Dense gate and noise floor, {where}", gate, floor))
    return [*sections, section("What the outcomes mean", outcome_list())]


def outcome_list() -> str:
    terms = "".join(
        f"<div><dt>{name}</dt><dd>{html.escape(rule)}</dd></div>" for name, rule in OUTCOMES.items()
    )
    return f'<dl class="terms">{terms}</dl>'


def fidelity_sections(rows: pd.DataFrame) -> list[str]:
    return [
        section(
            "Fidelity" + (f", {name}" if name else ""),
            table_of(fidelity_table(summarise_fidelity(part))),
        )
        for name, part in split_fidelity(rows).items()
    ]


def lm_eval_sections(rows: pd.DataFrame) -> list[str]:
    sections = []
    for name, part in split_lm_eval(rows).items():
        first, tasks, gate = part.iloc[0], task_table(part), lm_gate_table(part)
        where = f"{first['context']:,} tokens, protocol {first['protocol']}, chat {first['chat']}"
        title = f"lm-eval, {where}" + (f", {name}" if name else "")
        floor = f"<p>{html.escape(lm_floor_line(lm_noise_floor(part)))}</p>"
        sections += [
            section(title, table_of(scores_table(tasks))),
            section("Mean of the ranked tasks", table_of(mean_table(summarise_lm_eval(part)))),
            section("Task by task against dense", table_of(tasks_table(tasks))),
            section("Dense gate and noise floor", table_of(lm_gate_lines(gate)), floor),
        ]
    return sections


def latency_sections(rows: pd.DataFrame) -> list[str]:
    return [
        section(f"Latency, {name}", table_of(as_text(latency_table(part))))
        for name, part in split_latency(rows[rows["task"] == "latency"]).items()
    ]


def as_text(table: pd.DataFrame) -> TextTable:
    """A table of texts and numbers: four significant digits, n/a for what was not measured."""
    lines = [[short(value) for value in line] for line in table.itertuples(index=False, name=None)]
    texts = [name for name in table.columns if not pd.api.types.is_numeric_dtype(table[name])]
    return TextTable([str(name) for name in table.columns], lines, "", tuple(map(str, texts)))


def short(value: Any) -> str:
    if isinstance(value, float):
        return "n/a" if math.isnan(value) else f"{value:.4g}"
    return str(value)
