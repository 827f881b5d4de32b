"""The headline as an HTML table: every policy and budget, sortable, readable without scripts."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

COLUMNS = (
    ("policy", "Policy", ""),
    ("budget_tokens", "Budget", "tokens"),
    ("recall", "Recall", "share of mass"),
    ("contested", "Contested", "share of the rest"),
    ("output_error", "Output error", "relative L2"),
    ("tokens_read", "Tokens read", "per KV head"),
    ("model_read_fraction", "Model KV read", "% of dense"),
    ("bytes_kv", "KV", "KiB per head"),
    ("bytes_metadata", "Metadata", "KiB per head"),
    ("n", "n", "prompts"),
    ("unmeasured", "Unmeasured", "contested, rows"),
)


NEEDLE = ("needle", "Needle", "correct of all")
"""A column of its own, where the same policies were asked for needles too."""


def columns_of(facts: Mapping[str, Any]) -> tuple[tuple[str, str, str], ...]:
    asked = any("needle" in line for line in facts["headline"])
    return (*COLUMNS[:3], NEEDLE, *COLUMNS[3:]) if asked else COLUMNS


def headline_table(facts: Mapping[str, Any], index: int) -> str:
    """A sortable table of every policy and budget; readable without scripts."""
    columns = columns_of(facts)
    head = "".join(
        f'<th scope="col" data-key="{key}"><button type="button">{label}'
        f"<small>{unit}</small></button></th>"
        for key, label, unit in columns
    )
    dark = {p["label"]: p for p in facts["policies"]}
    body = "\n".join(
        headline_line(line, dark[line["policy"]], columns) for line in facts["headline"]
    )
    return (
        f'<table class="headline" data-setting="{index}"{" hidden" if index else ""}>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    )


def headline_line(
    line: Mapping[str, Any], policy: Mapping[str, Any], columns: Sequence[tuple[str, str, str]]
) -> str:
    tag = "" if policy["realisable"] else ' <span class="tag">not realisable</span>'
    swatch = f'<i class="swatch" style="--light:{policy["light"]};--dark:{policy["dark"]}"></i>'
    recall = (
        f'<span class="bar" style="--share:{100 * line["recall"]:.2f}%"></span>'
        f"{number(line['recall'], '.3f')}{plus_minus(line.get('recall_se'))}"
    )
    cells = {
        "policy": f"{swatch}{breakable(line['policy'])}{tag}",
        "budget_tokens": number(
            line["budget_tokens"], ",.0f", "any" if policy["readsAll"] else "adaptive"
        ),
        "recall": recall,
        "contested": number(line["contested"], ".3f") + plus_minus(line.get("contested_se")),
        "output_error": number(line["output_error"], ".3f")
        + plus_minus(line.get("output_error_se")),
        "tokens_read": number(line["tokens_read"], ",.0f"),
        "model_read_fraction": read_share(line),
        "bytes_kv": number(line["bytes_kv"] / 1024, ",.1f"),
        "bytes_metadata": number(line["bytes_metadata"] / 1024, ",.1f"),
        "n": str(line["n"]),
        "unmeasured": unmeasured(line),
    }
    if NEEDLE in columns:
        cells["needle"] = needle_cell(line)
    sort = {"needle": None, **line, "unmeasured": line["nan_recall"] + line["nan_contested"]}
    tds = "".join(
        f'<td data-key="{key}" data-sort="{html.escape(sort_key(sort[key]))}">{cells[key]}</td>'
        for key, _, _ in columns
    )
    budget = "" if pd.isna(line["budget_tokens"]) else f"{line['budget_tokens']:.0f}"
    return f'<tr data-budget="{budget}">{tds}</tr>'


def needle_cell(line: Mapping[str, Any]) -> str:
    """The share of answers that are correct, Wilson's 95 % and n."""
    if line.get("needle") is None:
        return number(float("nan"), "")
    low, high = line["needle_low"], line["needle_high"]
    return (
        f"{line['needle']:.0%} "
        f'<span class="se">[{low:.0%}, {high:.0%}], n {line["needle_n"]}</span>'
    )


def breakable(label: str) -> str:
    """A policy's label that may break between its fields."""
    return html.escape(label).replace(":", ":<wbr>").replace(",", ",<wbr>")


def number(value: float, form: str, missing: str = "n/a") -> str:
    return f'<span class="none">{missing}</span>' if pd.isna(value) else format(value, form)


def plus_minus(error: float | None) -> str:
    return "" if error is None or pd.isna(error) else f' <span class="se">± {error:.3f}</span>'


def read_share(line: Mapping[str, Any]) -> str:
    if pd.isna(line["model_read_fraction"]):
        kv = line["model_kv_fraction"]
        return f'<span class="none" title="KV alone, choosing not counted">({kv:.1%})</span>'
    return f"{line['model_read_fraction']:.1%}"


def unmeasured(line: Mapping[str, Any]) -> str:
    """Rows without contested recall; rows without recall, a rarer thing, on their own line."""
    recall = f"<small>recall {line['nan_recall']}</small>" if line["nan_recall"] else ""
    return (f"{line['nan_contested']} of {line['rows']}" if line["nan_contested"] else "0") + recall


def sort_key(value: Any) -> str:
    return "" if value is None or (isinstance(value, float) and pd.isna(value)) else str(value)
