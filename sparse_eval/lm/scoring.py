"""Answers handed back to lm-eval: its own filters, metrics and aggregation make the scores."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lm_eval.api.model import LM
from lm_eval.evaluator import evaluate

from sparse_eval.lm.config import LmConfig
from sparse_eval.lm.quiet import quiet
from sparse_eval.lm.requests import Sample, build_options, hash_of
from sparse_eval.lm.suite import Told, naming, seed_everything
from sparse_eval.lm.texts import TextSide

NAN = float("nan")
BOOTSTRAP = 1000
"""Resamples for the standard error of metrics that are not plain means."""


@dataclass(frozen=True)
class Metric:
    """One of a task's metrics under one arm. value, stderr: lm-eval's. values: by document, NaN
    where the metric is not a number of its own there: all are where its score is not their mean, as
    a perplexity's log-likelihoods may run the other way. is_primary: the task's first."""

    name: str
    value: float
    stderr: float
    values: dict[int, float]
    higher_is_better: bool
    is_primary: bool

    @property
    def measured(self) -> list[float]:
        return [value for value in self.values.values() if value == value]


@dataclass(frozen=True)
class Scores:
    """metrics: by name, the primary one first. raw: lm-eval's record of the task, for groups."""

    metrics: dict[str, Metric]
    raw: Mapping[str, Any]

    @property
    def primary(self) -> Metric:
        return next(iter(self.metrics.values()))


class StoredLM(LM):
    """Answers requests with what was measured. answers: by (place among the documents, request)."""

    def __init__(
        self, answers: Mapping[tuple[int, int], Any], asked: Mapping[tuple[int, int], str]
    ) -> None:
        super().__init__()
        self.answers, self.asked = answers, asked

    def of(self, request: Any) -> Any:
        place = request.doc_id, request.idx
        if self.asked[place] != hash_of(request):
            raise Told(
                f"lm-eval task {request.task_name} makes another prompt each time it is asked for "
                f"document {request.doc_id}: its answers cannot be scored"
            )
        return self.answers[place]

    def generate_until(self, requests: list[Any]) -> list[str]:
        return [self.of(request)["text"] for request in requests]

    def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
        return [(float(of[0]), bool(of[1])) for of in map(self.of, requests)]

    def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:
        raise NotImplementedError("loglikelihood_rolling is refused when tasks are loaded")


class ChatStoredLM(StoredLM):
    """The same with a chat format, which lm-eval asks the model for."""

    def __init__(self, *arguments: Any, side: TextSide) -> None:
        super().__init__(*arguments)
        self.side = side

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        return self.side.chat(chat_history, add_generation_prompt)

    @property
    def tokenizer_name(self) -> str:
        return str(self.side.tokenizer.name_or_path)


def score(
    name: str,
    task: Any,
    samples: Sequence[Sample],
    answers: Sequence[Sequence[Any]],
    config: LmConfig,
    side: TextSide,
) -> Scores:
    """The task's metrics. answers: of each sample, as the cells keep them."""
    given = {(i, j): one for i, row in enumerate(answers) for j, one in enumerate(row)}
    asked = {(i, j): a.arguments for i, s in enumerate(samples) for j, a in enumerate(s.asks)}
    seed_everything(task, config.seed)
    with quiet(), naming(name, "score its answers"):
        results: Any = evaluate(
            ChatStoredLM(given, asked, side=side),
            {"tasks": {name: task}},
            samples={name: [sample.doc_id for sample in samples]},
            bootstrap_iters=BOOTSTRAP,
            log_samples=True,
            **build_options(config, side),
        )
    found = results["results"][name]
    better = results["higher_is_better"][name]
    metrics = metrics_of(task, found, results["samples"][name], better)
    if not metrics:
        raise ValueError(f"lm-eval task {name} has no metric that is a number")
    return Scores({metric.name: metric for metric in metrics}, found)


def metrics_of(
    task: Any,
    found: Mapping[str, Any],
    logged: Sequence[Mapping[str, Any]],
    better: Mapping[str, bool],
) -> list[Metric]:
    keys = [key for key in found if "," in key and "_stderr," not in key]
    filters = {key.partition(",")[2] for key in keys}
    metrics: list[Metric] = []
    for key in sorted(keys, key=lambda key: place_of(task, key)):
        metric, _, filter_name = key.partition(",")
        values = {
            line["doc_id"]: number(line.get(metric), metric)
            for line in logged
            if line["filter"] == filter_name
        }
        if not isinstance(found[key], int | float) or (
            metric.isdigit() and all(value != value for value in values.values())
        ):
            continue
        if not is_mean(float(found[key]), values):
            values = dict.fromkeys(values, NAN)
        metrics.append(
            Metric(
                name=metric if len(filters) == 1 else key,
                value=float(found[key]),
                stderr=error_of(found.get(f"{metric}_stderr,{filter_name}")),
                values=values,
                higher_is_better=better.get(metric) is not False,
                is_primary=not metrics,
            )
        )
    return metrics


def is_mean(score: float, values: Mapping[int, float]) -> bool:
    measured = [value for value in values.values() if value == value]
    return bool(measured) and math.isclose(
        sum(measured) / len(measured), score, rel_tol=1e-6, abs_tol=1e-9
    )


def place_of(task: Any, key: str) -> int:
    """Metrics in the order in which the task lists them, the others behind."""
    listed = [entry["metric"] for entry in task.get_config("metric_list") or []]
    metric = key.partition(",")[0]
    return listed.index(metric) if metric in listed else len(listed)


def number(value: Any, metric: str) -> float:
    """A document's own value. RULER's metrics are lengths, -1 for documents of another length."""
    if isinstance(value, bool | int | float) or hasattr(value, "item"):
        found = float(value)
        return NAN if metric.isdigit() and found == -1 else found
    return NAN


def error_of(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else NAN
