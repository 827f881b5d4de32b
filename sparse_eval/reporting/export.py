"""Tables for papers: the summary of every task and setting as LaTeX (booktabs) and as CSV."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from sparse_eval.reporting.summarise import split_settings, summarise_recall
from sparse_eval.reporting.summarise_fidelity import split_fidelity, summarise_fidelity
from sparse_eval.reporting.summarise_latency import latency_table, split_latency
from sparse_eval.reporting.summarise_lm_eval import split_lm_eval, summarise_lm_eval, task_table
from sparse_eval.reporting.summarise_needle import split_needle, summarise_needle
from sparse_eval.reporting.tables_latency import mode_of, work_of
from sparse_eval.reporting.tables_live import TextTable, lines_of
from sparse_eval.storage.files import write_atomic

COLUMNS = {
    "recall": {
        "policy": "Policy",
        "budget_tokens": "Budget (tokens)",
        "recall": "Recall",
        "contested": "Contested",
        "output_error": "Output error",
        "tokens_read": "Tokens read",
        "model_read_fraction": "KV read (share)",
        "n": "$n$",
    },
    "needle": {
        "policy": "Policy",
        "budget_tokens": "Budget (tokens)",
        "accuracy": "Correct",
        "answer_nll": "Answer NLL (nats)",
        "page_hit": "Page hit",
        "model_read_fraction": "KV read (share)",
        "n": "$n$",
    },
    "fidelity": {
        "policy": "Policy",
        "budget_tokens": "Budget (tokens)",
        "kl_mean": "KL (nats)",
        "top1_agreement": "Same top token",
        "model_read_fraction": "KV read (share)",
        "n": "$n$",
    },
    "lm_eval": {
        "policy": "Policy",
        "budget_tokens": "Budget (tokens)",
        "score": "Mean score",
        "difference": "Less dense",
        "worst_task": "Worst task",
        "worst": "Less dense there",
        "model_read_fraction": "KV read (share)",
        "tasks": "Tasks",
        "n": "$n$",
    },
    "lm_eval_tasks": {
        "lm_task": "Task",
        "policy": "Policy",
        "budget_tokens": "Budget (tokens)",
        "value": "Score",
        "difference": "Less dense",
        "p_holm": "$p$ (Holm)",
        "model_read_fraction": "KV read (share)",
        "n": "$n$",
    },
    "latency": {
        "work": "Work",
        "batch": "Batch",
        "context": "Context (tokens)",
        "mode": "Mode",
        "median_us": "Time (\\textmu s)",
        "terabytes_per_s": "TB/s",
        "ceiling_fraction": "Share of ceiling",
        "speedup_vs_sdpa": "vs SDPA",
        "speedup_vs_best": "vs best dense",
    },
}
INTERVALS = {
    "recall": "$\\pm$: one standard error over the $n$ prompts.",
    "needle": "In brackets: Wilson's 95 \\% interval of the $n$ prompts.",
    "fidelity": "$\\pm$: one standard error over the $n$ prompts.",
    "lm_eval": "Over tasks that passed the dense gate; $\\pm$: one standard error; less dense "
    "there: negative is worse.",
    "lm_eval_tasks": "Differences are paired by document; without $p$: not ranked.",
    "latency": "Median of the repeats; in brackets: their 10th to 90th percentile.",
}


SIGNS = {"µ": r"\textmu{}", "−": "$-$", "≥": r"$\geq$", "×": r"$\times$", "–": "--"}


def tables(rows: pd.DataFrame) -> Iterator[tuple[str, str, pd.DataFrame]]:
    """(task, setting's name, summary) of everything that the rows hold."""
    tasks = set(rows["task"])
    if "recall" in tasks:
        for name, part in split_settings(rows).items():
            yield "recall", name, summarise_recall(part)
    if "needle" in tasks:
        for name, part in split_needle(rows).items():
            for kind, table in summarise_needle(part).groupby("needle_kind", sort=False):
                yield "needle", ", ".join(filter(None, [str(kind), name])), table
    if "fidelity" in tasks:
        for name, part in split_fidelity(rows).items():
            yield "fidelity", name, summarise_fidelity(part)
    if "lm_eval" in tasks:
        for name, part in split_lm_eval(rows).items():
            yield "lm_eval", name, summarise_lm_eval(part)
            table = task_table(part)
            yield "lm_eval_tasks", name, table.assign(value_se=table["stderr"])
    if "latency" in tasks:
        for name, part in split_latency(rows[rows["task"] == "latency"]).items():
            table = latency_table(part)
            told = lines_of(table)
            words = {"work": list(map(work_of, told)), "mode": list(map(mode_of, told))}
            yield "latency", name, table.assign(**words)


def export(
    rows: pd.DataFrame, folder: Path, formats: Sequence[str], commands: Sequence[str]
) -> list[Path]:
    """Writes <folder>/<task>[_<setting>].tex and .csv. commands: how the rows were made, for a
    comment in the LaTeX."""
    written = []
    for task, name, table in tables(rows):
        end = re.sub(r"[^a-zA-Z0-9.-]+", "_", name).strip("_")
        path = folder / f"{task}{f'_{end}' if end else ''}"
        if "latex" in formats:
            written.append(path.with_name(path.name + ".tex"))
            write_atomic(written[-1], latex(task, name, table, commands).encode())
        if "csv" in formats:
            written.append(path.with_name(path.name + ".csv"))
            write_atomic(written[-1], table.to_csv(index=False).encode())
    return written


def export_comparison(
    tables: Mapping[str, TextTable], folder: Path, formats: Sequence[str]
) -> list[Path]:
    """Writes <folder>/comparison_<title>.tex and .csv of each table."""
    written = []
    for title, table in tables.items():
        path = folder / f"comparison_{title.lower()}"
        if "latex" in formats:
            written.append(path.with_name(path.name + ".tex"))
            lines = [[escaped(text) for text in line] for line in table.lines]
            text = booktabs([escaped(h) for h in table.head], lines, escaped(table.note))
            write_atomic(written[-1], text.encode())
        if "csv" in formats:
            written.append(path.with_name(path.name + ".csv"))
            frame = pd.DataFrame(table.lines, columns=[h or "verdict" for h in table.head])
            write_atomic(written[-1], frame.to_csv(index=False).encode())
    return written


def latex(task: str, name: str, table: pd.DataFrame, commands: Sequence[str]) -> str:
    """A booktabs table with n and intervals."""
    columns = {key: title for key, title in COLUMNS[task].items() if key in table}
    body = [[latex_cell(key, line) for key in columns] for line in table.to_dict("records")]
    comments = [f"% made by: {command}" for command in commands]
    comments.append(f"% setting: {name}" if name else "% one setting")
    return "\n".join([*comments, booktabs(list(columns.values()), body, INTERVALS[task])])


def booktabs(head: Sequence[str], lines: Sequence[Sequence[str]], note: str) -> str:
    """head, lines and note are LaTeX already."""
    return "\n".join(
        [
            "% needs \\usepackage{booktabs}",
            rf"\begin{{tabular}}{{l{'r' * (len(head) - 1)}}}",
            r"\toprule",
            " & ".join(head) + r" \\",
            r"\midrule",
            *(" & ".join(line) + r" \\" for line in lines),
            r"\bottomrule",
            r"\end{tabular}",
            f"\\par\\smallskip\\footnotesize {note}",
            "",
        ]
    )


def latex_cell(key: str, line: dict[Any, Any]) -> str:
    value = line[key]
    if isinstance(value, str):
        return escaped(value)
    if math.isnan(value):
        return "--"
    if key in ("batch", "context"):
        return f"{value:,.0f}"
    if key == "median_us":
        return f"{value:,.1f} [{line['p10_us']:,.1f}, {line['p90_us']:,.1f}]"
    if key in ("terabytes_per_s", "ceiling_fraction", "speedup_vs_sdpa", "speedup_vs_best"):
        return f"{value:.2f}"
    if key in ("budget_tokens", "n", "tasks"):
        return f"{value:.0f}"
    if key == "tokens_read":
        return f"{value:.1f}"
    text = f"{value:.3f}"
    if key == "accuracy":
        return f"{text} [{line['low']:.2f}, {line['high']:.2f}]"
    error = line.get(f"{key}_se", math.nan)
    return text if math.isnan(error) else f"{text} $\\pm$ {error:.3f}"


def escaped(text: str) -> str:
    """Plain text as LaTeX, the signs that tables of results use among it."""
    text = re.sub(r"([&%$#_{}])", r"\\\1", text).replace("~", r"\textasciitilde{}")
    for sign, command in SIGNS.items():
        text = text.replace(sign, command)
    return text
