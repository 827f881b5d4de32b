"""Tables of lm-eval runs as texts: what the terminal and the page both show."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pandas as pd

from sparse_eval.reporting.scores import mark
from sparse_eval.reporting.tables_live import TextTable, budget_of, gate_cell, lines_of


def mean_table(table: pd.DataFrame) -> TextTable:
    """The mean of the tasks that passed beside the worst one. table: of summarise_lm_eval."""
    head = ["policy", "budget", "KV read", "tasks", "score", "minus dense", "worst task"]
    head += ["minus dense there", "worse", "as dense"]
    return TextTable(
        head,
        [mean_line(line) for line in lines_of(table)],
        "mean over tasks that passed the dense gate and whose scores are shares ± standard error; "
        "differences paired by document, 95 %; worst task: negative is worse, its sign turned "
        "where lower is better; worse: tasks significantly worse than dense (Holm over tasks); "
        "as dense: share of identical answers",
        ("worst task",),
    )


def mean_line(line: Mapping[str, Any]) -> list[str]:
    first = [line["policy"], budget_of(line), share(line["model_read_fraction"])]
    last = share(line["same_as_dense"], 0)
    of = f"{line['tasks']}/{line['all_tasks']}"
    score = plus_minus(line["score"], line["score_se"]) if line["tasks"] else ""
    if line["is_dense"]:
        return [*first, of, score, "", "", "", "", last]
    has_worst = isinstance(line.get("worst_task"), str)
    return [
        *first,
        of,
        score,
        interval(line["difference"], line["low"], line["high"]) if line["tasks"] else "",
        line["worst_task"] if has_worst else "",
        interval(line["worst"], line["worst_low"], line["worst_high"]) if has_worst else "",
        "" if math.isnan(line.get("worse", math.nan)) else f"{line['worse']:.0f}",
        last,
    ]


def scores_table(table: pd.DataFrame) -> TextTable:
    """Every task's score, a column per policy and budget. table: of task_table."""
    arms = list(dict.fromkeys(arm_of(line) for line in lines_of(table)))
    lines = []
    for task, part in table.groupby("lm_task", sort=False):
        gated = bool(part["gated"].all())
        name = f"{task} †" if gated else str(task)
        found = {arm_of(line): score_cell(line) for line in lines_of(part)}
        cells = [found.get(arm, "") for arm in arms]
        lines.append([name, f"{part['n'].max():.0f}", *cells])
    note = (
        "lm-eval's scores; ▼ ▲ significantly worse or better than dense (Holm over tasks); † not "
        "ranked: the dense gate was not passed, or not run"
    )
    return TextTable(["task", "n", *arms], lines, note)


def arm_of(line: Mapping[str, Any]) -> str:
    """The policy, with its budget where it has one: what it read differs from task to task."""
    if not math.isnan(line["budget_tokens"]):
        return f"{line['policy']} {budget_of(line)}"
    return f"{line['policy']} all" if line["is_dense"] else str(line["policy"])


def score_cell(line: Mapping[str, Any]) -> str:
    return f"{line['value']:.2f}{mark(line['verdict'])}"


def tasks_table(table: pd.DataFrame) -> TextTable:
    """Every task, ranked or not, under every arm. table: of task_table."""
    head = ["task", "policy", "budget", "metric", "score", "n", "minus dense", "p", "p Holm"]
    head += ["cut", "as dense", "verdict"]
    lines = [
        [
            line["lm_task"],
            line["policy"],
            budget_of(line),
            line["metric"],
            plus_minus(line["value"], line["stderr"]),
            f"{line['n']:.0f}",
            *compared(line),
            f"{line['truncated']:.0f}" if line["truncated"] else "",
            share(line["identical_to_dense"], 0),
            line["verdict"],
        ]
        for line in lines_of(table)
    ]
    note = (
        "scores are lm-eval's own, ± its standard error; minus dense: paired by document, 95 %, "
        "exact McNemar for right and wrong, sign flips else; cut: prompts that did not fit"
    )
    return TextTable(head, lines, note, ("policy", "metric", "verdict"))


def compared(line: Mapping[str, Any]) -> list[str]:
    if line["is_dense"]:
        return ["", "", ""]
    return [
        interval(line["difference"], line["difference_low"], line["difference_high"]),
        p_text(line["p_value"]),
        p_text(line["p_holm"]),
    ]


def gate_lines(table: pd.DataFrame) -> TextTable:
    """table: of gate_table."""
    head = [
        "task",
        "dense",
        "gate: dense",
        "of",
        "bound",
        "floor",
        "chance",
        "resolvable",
        "gate",
    ]
    lines = [
        [
            line["lm_task"],
            f"{line['value']:.2f}",
            number(line["gate_value"]),
            "not run" if line["gate_on"] == "none" else f"{line['gate_n']:.0f} {line['gate_on']}",
            number(line["gate_lower"]),
            floor_of(line),
            number(line["chance"]),
            number(line["resolvable"]) or "n too small",
            gate_cell(not line["gated"], ran=line["gate_on"] != "none"),
        ]
        for line in lines_of(table)
    ]
    note = (
        "dense on the gate's documents, own ones or those measured, one-sided bound on the worse "
        "side, which must reach the floor; resolvable: the smallest difference that the task's n "
        "can tell from none"
    )
    return TextTable(head, lines, note)


def floor_of(line: Mapping[str, Any]) -> str:
    floor = number(line["gate_floor"])
    return floor if not floor or line["higher_is_better"] else f"at most {floor}"


def floor_line(floor: Mapping[str, float]) -> str:
    return (
        f"noise floor: stock SDPA against dense through the shared kernel, {floor['n']:.0f} "
        f"documents: {floor['same_answer']:.1%} of answers are the same"
    )


def plus_minus(value: float, error: float) -> str:
    return f"{value:.3f}" if math.isnan(error) else f"{value:.3f} ± {error:.3f}"


def interval(value: float, low: float, high: float) -> str:
    return f"{value:+.2f}" + ("" if math.isnan(low) else f" [{low:+.2f}, {high:+.2f}]")


def number(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.2f}"


def p_text(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.3f}"


def share(value: float, digits: int = 1) -> str:
    return "n/a" if math.isnan(value) else f"{value:.{digits}%}"
