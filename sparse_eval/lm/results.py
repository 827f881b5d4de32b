"""A task's answers under every arm -> rows: one per document and arm, one per metric and arm."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sparse_eval.core import Row
from sparse_eval.lm.cell import READ
from sparse_eval.lm.config import LmConfig
from sparse_eval.lm.gate import Gate, judge
from sparse_eval.lm.part import Part
from sparse_eval.lm.requests import choices
from sparse_eval.lm.scoring import NAN, Metric, Scores, score
from sparse_eval.lm.texts import TextSide
from sparse_eval.needle.cell import mean
from sparse_eval.reporting.paired import holm
from sparse_eval.reporting.scores import Difference, difference, verdict
from sparse_eval.storage.cells import cell_key
from sparse_eval.tasks.live_task import Arm

OF_DOCUMENTS = (
    "sample",
    "prompt_tokens",
    "answers",
    "stock",
    "cell_key",
    "seconds",
    "peak_memory",
    "truncated",
    *READ,
)
"""Columns of cells that a task's rows do not simply take over."""


@dataclass(frozen=True)
class Answered:
    """One task, every arm (dense first): its rows by document, lm-eval's scores, the gate's word.
    identical: by arm and document, whether the answer is dense's own."""

    part: Part
    arms: Sequence[Arm]
    rows: list[list[Row]]
    scores: list[Scores]
    identical: list[list[bool]]
    gate: Gate

    @staticmethod
    def of(
        part: Part,
        arms: Sequence[Arm],
        rows: list[list[Row]],
        gate_rows: list[list[Row]],
        config: LmConfig,
        side: TextSide,
    ) -> Answered:
        def scored(samples: Any, found: list[Row]) -> Scores:
            answers = [row["answers"] for row in found]
            return score(part.name, part.task, samples, answers, config, side)

        scores = [scored(part.samples, of_arm) for of_arm in rows]
        on_gate = {
            "own": lambda: scored(part.gate, gate_rows[0]).primary,
            "measured": lambda: scores[0].primary,
            "none": lambda: None,
        }[part.on]()
        better = scores[0].primary.higher_is_better
        asked = (part.name, part.chance, on_gate, part.on, config.gate)
        gate = judge(*asked, higher_is_better=better)
        identical = [
            [
                is_same(part.task, a["answers"], b["answers"])
                for a, b in zip(of_arm, rows[0], strict=True)
            ]
            for of_arm in rows
        ]
        return Answered(part, arms, rows, scores, identical, gate)

    def difference(self, i: int, name: str) -> Difference:
        """Of arm i from dense in a metric, document by document."""
        dense, arm = (self.scores[k].metrics[name].values for k in (0, i))
        return difference(list(dense.values()), [arm[doc] for doc in dense])


def is_same(task: Any, first: Sequence[Any], second: Sequence[Any]) -> bool:
    """Whether two answers to one document are the same text, or the same choice."""
    return said(task, first) == said(task, second)


def said(task: Any, answers: Sequence[Any]) -> str:
    """An answer in words: its text; of several continuations the likeliest, by number; of one
    whether greedy decoding would have said it."""
    first, answers = answers[0], choices(task, answers)
    if isinstance(first, Mapping):
        return str(first["text"])
    if len(answers) == 1:
        return "greedy" if first[1] else "not greedy"
    return str(max(range(len(answers)), key=lambda i: (answers[i][0], -i)))


def rows_of_samples(answered: Answered) -> Iterator[list[Row]]:
    """For each arm a row per document: the primary metric's value, all metrics in `scores`."""
    dense_rows, dense = answered.rows[0], answered.scores[0].primary
    for rows, scores, identical in zip(
        answered.rows, answered.scores, answered.identical, strict=True
    ):
        yield [
            sample_row(row, answered, i, scores, identical[i], dense, dense_rows[i])
            for i, row in enumerate(rows)
        ]


def sample_row(
    row: Row,
    answered: Answered,
    i: int,
    scores: Scores,
    identical: bool,
    dense: Metric,
    dense_row: Row,
) -> Row:
    sample, primary = answered.part.samples[i], scores.primary
    value, of_dense = primary.values[sample.doc_id], dense.values[sample.doc_id]
    answers = row["answers"]
    columns = {
        **{name: x for name, x in row.items() if name not in ("answers", "stock")},
        "cell_key": cell_key(labels_of(row) | {"cell": row["cell_key"], "document": sample.doc_id}),
        "role": "sample",
        "metric": primary.name,
        "value": value,
        "dense_value": of_dense,
        "difference": value - of_dense,
        "scores": {name: metric.values[sample.doc_id] for name, metric in scores.metrics.items()},
        "expected": sample.target,
        "output": said(answered.part.task, answers),
        "dense_output": said(answered.part.task, dense_row["answers"]),
        "identical_to_dense": float(identical),
        "gated": answered.gate.gated,
    }
    if isinstance(answers[0], Mapping):
        columns["output_ids"] = answers[0]["ids"]
        columns["is_over"] = answers[0]["is_over"]
    else:
        columns["log_likelihoods"] = [answer[0] for answer in answers]
    if "stock" in row:
        columns["stock_agreement"] = float(is_same(answered.part.task, row["stock"], answers))
    return columns


def rows_of_tasks(done: Sequence[Answered], groups: Mapping[str, Any]) -> Iterator[list[Row]]:
    """For each arm a row per task and metric. p_holm: the primary metrics' p-values, corrected for
    all tasks of the arm that are ranked."""
    for i in range(len(done[0].arms) if done else 0):
        raw = [
            NAN if answered.gate.gated or i == 0 else answered.difference(i, primary_of(answered)).p
            for answered in done
        ]
        for answered, corrected in zip(done, holm(raw), strict=True):
            yield task_rows(answered, i, corrected)
        rows = list(group_rows(done, i, groups))
        if rows:
            yield rows


def labels_of(row: Row) -> Row:
    """What tells rows apart that share a measurement: two tasks, or runs, that ask the same."""
    return {name: row[name] for name in ("lm_task", "context", "seed")}


def primary_of(answered: Answered) -> str:
    return answered.scores[0].primary.name


def task_rows(answered: Answered, i: int, corrected: float) -> list[Row]:
    gate, rows = answered.gate, answered.rows[i]
    keys = sorted({row["cell_key"] for row in rows})
    common = {
        **{name: x for name, x in rows[0].items() if name not in OF_DOCUMENTS},
        "role": "task",
        "sample": "all",
        "prompt_hash": cell_key({"prompts": [row["prompt_hash"] for row in rows]})[:16],
        "capture_hash": cell_key({"captures": [row["capture_hash"] for row in rows]}),
        "cell_key": cell_key(labels_of(rows[0]) | {"cells": keys}),
        "seconds": sum(row["seconds"] for row in rows),
        "peak_memory": max(row["peak_memory"] for row in rows),
        "prompt_tokens": mean([row["prompt_tokens"] for row in rows]),
        "truncated": sum(row["truncated"] for row in rows),
        "identical_to_dense": mean([float(x) for x in answered.identical[i]]),
        "gated": gate.gated,
        "gate_value": gate.value,
        "gate_lower": gate.lower,
        "gate_floor": gate.floor,
        "gate_n": gate.n,
        "gate_on": gate.on,
        "chance": gate.chance,
        **{name: mean([row[name] for row in rows]) for name in READ},
    }
    task = answered.part.task
    stock = [is_same(task, row["stock"], row["answers"]) for row in rows if "stock" in row]
    if stock:
        common |= {"stock_agreement": sum(stock) / len(stock), "stock_n": len(stock)}
    return [
        common | metric_columns(answered, i, metric, corrected)
        for metric in answered.scores[i].metrics.values()
    ]


def metric_columns(answered: Answered, i: int, metric: Metric, corrected: float) -> Row:
    dense = answered.scores[0].metrics[metric.name]
    columns = {
        "metric": metric.name,
        "is_primary": metric.is_primary,
        "higher_is_better": metric.higher_is_better,
        "value": metric.value,
        "stderr": metric.stderr,
        "n": len(metric.measured) or len(metric.values),
        "dense_value": dense.value,
    }
    if i == 0:
        return columns | {"verdict": "dense"}
    found, gated = answered.difference(i, metric.name), answered.gate.gated
    p = NAN if gated else found.p
    of_primary = corrected if metric.is_primary else NAN
    columns |= {
        "difference": metric.value - dense.value,
        "difference_low": found.low,
        "difference_high": found.high,
        "p_value": p,
        "p_holm": of_primary,
        "resolvable": found.resolvable,
    }
    if metric.is_primary:
        columns["verdict"] = verdict(
            found,
            of_primary,
            gated=gated,
            higher_is_better=metric.higher_is_better,
            gate_ran=answered.gate.on != "none",
        )
    return columns


def group_rows(done: Sequence[Answered], i: int, groups: Mapping[str, Any]) -> Iterator[Row]:
    """lm-eval's own aggregate of each group that has one."""
    by_arm = [{a.part.name: a.scores[k].raw for a in done} for k in (0, i)]
    first = task_rows(done[0], i, NAN)[0]
    keep = {k: v for k, v in first.items() if not k.startswith(("gate", "p_", "stock", "chance"))}
    for name, group in groups.items():
        dense, found = (group.aggregate(of_arm) for of_arm in by_arm)
        for key, value in found.items():
            metric, comma, _ = key.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            error = found.get(key.replace(",", "_stderr,"), NAN)
            yield keep | {
                "role": "group",
                "lm_task": name,
                "metric": metric,
                "cell_key": cell_key(
                    {"group": name, "cells": [a.part.name for a in done], "of": first["cell_key"]}
                ),
                "value": float(value),
                "stderr": float(error) if isinstance(error, int | float) else NAN,
                "n": found["sample_len"],
                "dense_value": float(dense[key]),
                "difference": float(value) - float(dense[key]),
                "difference_low": NAN,
                "difference_high": NAN,
                "resolvable": NAN,
                "gated": all(a.gate.gated for a in done),
                "verdict": "group",
                **{n: mean([row[n] for a in done for row in a.rows[i]]) for n in READ},
            }
