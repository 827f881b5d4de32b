"""Rows and summaries -> one self-contained HTML page, from the files of page/ and plotly."""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from itertools import starmap
from pathlib import Path
from string import Template
from typing import Any

import pandas as pd

from sparse_eval.reporting.headline import headline_table
from sparse_eval.reporting.margins import margins
from sparse_eval.reporting.palette import look_of
from sparse_eval.reporting.proportions import wilson
from sparse_eval.reporting.summarise import (
    by_layer,
    dense_policies,
    recall_rows,
    split_settings,
    summarise_recall,
)
from sparse_eval.storage.files import to_json
from sparse_eval.units import byte_size, duration

SCRIPTS = ("format.js", "table.js", "charts.js", "layers.js", "main.js")
DIGITS = 6
"""Significant digits of the numbers on the page."""


def dashboard(
    rows: pd.DataFrame,
    runs: Sequence[Mapping[str, Any]],
    pictures: Sequence[Path] = (),
    answers: pd.DataFrame | None = None,
) -> str:
    """The page. rows: recall. runs: the summaries of the runs that they are from, each with its
    "folder"; pictures: PNGs that stand in for the charts where scripts are off; answers: needle
    rows, whose accuracy stands in the headline beside the same policy's recall."""
    from plotly.offline import get_plotlyjs

    parts = split_settings(rows)
    settings = [setting(name, part) for name, part in parts.items()]
    if answers is not None:
        for facts, part in zip(settings, parts.values(), strict=True):
            add_needles(facts["headline"], needles_of(answers, part.iloc[0]))
    page = files("sparse_eval.reporting") / "page"
    return Template(page.joinpath("page.html").read_text()).substitute(
        title=html.escape(title_of(settings)),
        style=page.joinpath("page.css").read_text(),
        tables="\n".join(headline_table(s, index) for index, s in enumerate(settings)),
        pictures="\n".join(picture(path) for path in pictures),
        runs="\n".join(run_facts(run) for run in runs) or "<p>No summary.json was found.</p>",
        captures=capture_list(rows),
        data=in_script(to_json({"settings": settings})),
        plotly=get_plotlyjs(),
        script="\n".join(page.joinpath(name).read_text() for name in SCRIPTS),
    )


def setting(name: str, rows: pd.DataFrame) -> dict[str, Any]:
    """All that the page's script draws for rows of one setting."""
    table, layers = summarise_recall(rows), by_layer(rows)
    policies = [policy_facts(str(name), part) for name, part in table.groupby("policy", sort=False)]
    mains = [p["label"] for p in policies if p["realisable"] and not p["readsAll"]]
    dense = layers.groupby("layer")["dense_layer"].first()
    return {
        "name": name,
        "model": text_of_first(rows, "model", "weights"),
        "facts": setting_facts(rows),
        "policies": policies,
        "budgets": sorted(int(b) for b in table["budget_tokens"].dropna().unique()),
        "layers": [{"layer": i, "dense": d} for i, d in dense.to_dict().items()],
        "headline": records(collapse_dense(table)),
        "byLayer": records(layers),
        "margins": {label: records(margins(rows, label)) for label in mains},
    }


def needles_of(answers: pd.DataFrame, like: pd.Series) -> dict[tuple[str, Any], dict[str, Any]]:
    """Accuracy by (policy, budget) over all kinds and depths, at the setting of a recall row."""
    rows = answers[answers["outcome"].notna() & (answers["role"] != "gate")]
    for name in ("model", "weights", "revision", "context", "dtype", "device", "backend"):
        if name in rows:
            rows = rows[rows[name].map(str) == str(like.get(name))]
    found = {}
    for (policy, budget), part in rows.groupby(["policy", "budget_tokens"], dropna=False):
        correct, n = int((part["outcome"] == "correct").sum()), len(part)
        interval = wilson(correct, n)
        found[str(policy), budget_key(budget)] = {
            "needle": correct / n,
            "needle_low": interval.low,
            "needle_high": interval.high,
            "needle_n": n,
        }
    return found


def add_needles(
    headline: list[dict[str, Any]], needles: Mapping[tuple[str, Any], dict[str, Any]]
) -> None:
    for line in headline:
        line |= needles.get((line["policy"], budget_key(line["budget_tokens"])), {})


def budget_key(budget: Any) -> int | None:
    return None if pd.isna(budget) else int(budget)


def policy_facts(label: str, table: pd.DataFrame) -> dict[str, Any]:
    look = look_of(label)
    return {
        "label": label,
        "light": look.light,
        "dark": look.dark,
        "marker": look.plotly_marker,
        "dash": look.plotly_dash,
        "realisable": bool(table["realisable"].all()),
        "readsAll": bool(dense_policies(table)),
    }


def collapse_dense(table: pd.DataFrame) -> pd.DataFrame:
    """A policy that reads everything at every budget becomes one line without a budget."""
    reads_all = table["policy"].isin(dense_policies(table))
    once = table[reads_all].drop_duplicates("policy").assign(budget_tokens=float("nan"))
    table = pd.concat([table[~reads_all], once])
    return table.sort_values("recall", ascending=False, kind="stable")


def setting_facts(rows: pd.DataFrame) -> list[str]:
    """What was measured, in short phrases with units; what rows do not say is left out."""
    prompts, first = rows["prompt"].nunique(), rows.iloc[0]
    source = f" ({first['prompts']})" if has(first, "prompts") else ""
    facts = [f"{prompts} prompt{'s' if prompts > 1 else ''}{source}"]
    if has(first, "context"):
        facts.append(f"context {first['context']:,.0f} tokens")
    if has(first, "queries") and not isinstance(first["queries"], str):
        facts.append(f"{first['queries']:.0f} decode queries per prompt")
    if "page_size" in rows:
        sizes = sorted(rows["page_size"].dropna().unique())
        facts.append("page " + ", ".join(f"{s:.0f}" for s in sizes) + " tokens")
    if first.get("dense_layers") is not None:
        dense = ", ".join(map(str, first["dense_layers"])) or "none"
        is_all = "dense_layer" in rows and rows["dense_layer"].all()
        facts.append(f"dense layers {dense}" + (", all: nothing is left out" if is_all else ""))
    if has(first, "replay_error"):
        error = rows["replay_error"].max()
        facts.append(f"replayed dense attention within {error:.1e} of the model's own outputs")
    machine = [str(first[name]) for name in ("device", "dtype", "backend") if has(first, name)]
    return facts + ([", ".join(machine)] if machine else [])


def has(row: pd.Series, name: str) -> bool:
    return name in row and row[name] is not None and not pd.isna(row[name]) and row[name] != ""


def text_of_first(rows: pd.DataFrame, *names: str) -> str:
    first = rows.iloc[0]
    return " · ".join(str(first[name]) for name in names if has(first, name))


def records(table: pd.DataFrame) -> list[dict[str, Any]]:
    """Lines of a table with short numbers; NaN stays NaN (null on the page)."""
    return [{str(k): rounded(v) for k, v in line.items()} for line in table.to_dict("records")]


def rounded(value: Any) -> Any:
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def title_of(settings: Sequence[Mapping[str, Any]]) -> str:
    models = list(dict.fromkeys(s["model"] for s in settings if s["model"]))
    return ", ".join(models) or "Recall report"


def picture(path: Path) -> str:
    data = base64.b64encode(path.read_bytes()).decode()
    return f'<img src="data:image/png;base64,{data}" alt="{html.escape(path.stem)}">'


def run_facts(run: Mapping[str, Any]) -> str:
    """One run: how it was started, on what, with which versions; its whole config on demand."""
    origin = dict(run.get("provenance") or {})
    command = run.get("command") or origin.get("command")
    apart = ("command", "folder", "config", "provenance", "headline")
    extra = {k: v for k, v in run.items() if isinstance(v, int | float | str | Mapping)}
    shown = {k: v for k, v in {**origin, **extra}.items() if k not in apart}
    if replayed := [x for x in dict(run.get("replay_error") or {}).values() if x is not None]:
        of = f"{len(replayed)} prompt{'s'[: len(replayed) > 1]}"
        shown["replay_error"] = f"{max(replayed):.1e} (relative L2, worst layer of {of})"
    facts = "".join(
        f"<div><dt>{html.escape(name)}</dt><dd>{text}</dd></div>"
        for name, text in starmap(named_fact, shown.items())
        if text
    )
    config = html.escape(json.dumps(run.get("config") or {}, indent=2, ensure_ascii=False))
    return (
        f'<article class="run"><h3>{html.escape(str(run.get("folder", "run")))}</h3>'
        + (f"<pre><code>{html.escape(command)}</code></pre>" if command else "")
        + f"<dl>{facts}</dl><details><summary>Resolved config</summary>"
        f"<pre><code>{config}</code></pre></details></article>"
    )


def named_fact(key: str, value: Any) -> tuple[str, str]:
    """A key's name and its value as people read it, "" for none: "wall_seconds" is a time,
    "peak_memory_bytes" a size."""
    if value is None:
        return key, ""
    if key.endswith("_seconds") and isinstance(value, int | float):
        return f"{key.removesuffix('_seconds').replace('_', ' ')} time", duration(value)
    if key.endswith("_bytes") and isinstance(value, int | float):
        return key.removesuffix("_bytes").replace("_", " "), byte_size(value)
    return key.replace("_", " "), fact(value)


def fact(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{html.escape(str(k))}: {fact(v)}" for k, v in value.items())
    if isinstance(value, bool) or not isinstance(value, int | float):
        return html.escape(str(value))
    return f"{value:,.6g}" if isinstance(value, float) else f"{value:,}"


def capture_list(rows: pd.DataFrame) -> str:
    """The prompts and the captures that the numbers stand on."""
    rows = recall_rows(rows)
    columns = [name for name in ("sample", "prompt_hash", "capture_hash") if name in rows]
    unique = rows[columns].drop_duplicates()
    head = "".join(f"<th>{name.replace('_', ' ')}</th>" for name in columns)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(str(x))}</td>" for x in line) + "</tr>"
        for line in unique.itertuples(index=False)
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def in_script(text: str) -> str:
    """JSON that cannot end the script element it stands in."""
    return text.replace("<", "\\u003c")
