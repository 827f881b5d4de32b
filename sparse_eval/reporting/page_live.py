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
from sparse_eval.reporting.summarise_needle import (
    gate_table,
    noise_floor,
    split_needle,
    summarise_needle,
)


def live_page(
    rows: pd.DataFrame, runs: Sequence[Mapping[str, Any]], pictures: Sequence[Path]
) -> str:
    """runs: the summaries of the runs that the rows are from, each with its "folder"."""
    tasks = set(rows["task"])
    sections = needle_sections(rows) if "needle" in tasks else []
    sections += fidelity_sections(rows) if "fidelity" in tasks else []
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
td, th {{ text-align: left; }} figure {{ margin: 8px 0; }} figure img {{ max-width: 100%; }}
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


def table_of(table: pd.DataFrame) -> str:
    """A table of texts and numbers, four significant digits."""
    head = "".join(f"<th>{html.escape(str(name))}</th>" for name in table.columns)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(short(value))}</td>" for value in line) + "</tr>"
        for line in table.itertuples(index=False, name=None)
    )
    return (
        f'<div class="scroll" tabindex="0"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def short(value: Any) -> str:
    if isinstance(value, float):
        return "–" if math.isnan(value) else f"{value:,.4g}"
    return str(value)


def needle_sections(rows: pd.DataFrame) -> list[str]:
    sections = []
    for name, part in split_needle(rows).items():
        first = part.iloc[0]
        where = f"protocol {first['protocol']}, chat {first['chat']}" + (
            f", {name}" if name else ""
        )
        floor = noise_floor(part)
        for (kind, context), table in summarise_needle(part).groupby(
            ["needle_kind", "context"], sort=False
        ):
            dropped = ["needle_kind", "context", "is_dense"]
            title = f"Needle {KINDS[str(kind)].label}, {context:,} tokens, {where}"
            sections.append(section(title, table_of(table.drop(columns=dropped))))
        sections.append(
            section(
                f"Dense gate, {where}",
                table_of(gate_table(part)),
                f"<p>Noise floor: stock SDPA against dense through the shared kernel on "
                f"{floor['n']} prompts: the true answer's NLL differs by "
                f"{floor['nll_difference']:.1e} nats at most, {floor['same_choice']:.1%} of next "
                "tokens are the same.</p>",
            )
        )
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
            table_of(summarise_fidelity(part).drop(columns="is_dense")),
        )
        for name, part in split_fidelity(rows).items()
    ]


def latency_sections(rows: pd.DataFrame) -> list[str]:
    return [
        section(f"Latency, {name}", table_of(latency_table(part)))
        for name, part in split_latency(rows[rows["task"] == "latency"]).items()
    ]
