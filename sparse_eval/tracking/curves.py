"""Rows -> the curves a tracker draws over budget_tokens, under keys such as recall/quest/mass."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pandas as pd

from sparse_eval.reporting.summarise import split_settings, summarise_recall
from sparse_eval.reporting.summarise_fidelity import split_fidelity, summarise_fidelity
from sparse_eval.reporting.summarise_lm_eval import split_lm_eval, summarise_lm_eval, task_table
from sparse_eval.reporting.summarise_needle import split_needle, summarise_needle

CURVES = {
    "recall": "mass",
    "recall_se": "mass_se",
    "contested": "contested",
    "output_error": "output_error",
    "tokens_read": "tokens_read",
    "model_read_fraction": "model_read_fraction",
    "model_bytes": "model_bytes",
}
"""Column of the summary -> last part of its key, recall/<policy>/<part>."""

NEEDLE_CURVES = {
    "accuracy": "correct",
    "low": "correct_low",
    "high": "correct_high",
    "answer_nll": "answer_nll",
    "page_hit": "page_hit",
    "tokens_read": "tokens_read",
    "model_read_fraction": "model_read_fraction",
}
LM_MEAN_CURVES = {
    "score": "score",
    "difference": "difference",
    "worst": "worst_difference",
    "same_as_dense": "same_as_dense",
    "model_read_fraction": "model_read_fraction",
}
LM_TASK_CURVES = {
    "difference": "difference",
    "identical_to_dense": "same_as_dense",
    "model_read_fraction": "model_read_fraction",
}
FIDELITY_CURVES = {
    "kl_mean": "kl_mean",
    "kl_mean_se": "kl_mean_se",
    "kl_p99": "kl_p99",
    "top1_agreement": "top1_agreement",
    "tokens_read": "tokens_read",
    "model_read_fraction": "model_read_fraction",
}


def curve_tables(frame: pd.DataFrame) -> Iterator[tuple[pd.DataFrame, str]]:
    """(policy, budget_tokens, task/value columns) of every task and setting, with the setting's
    name for the keys: "" where there is one."""
    tasks = set(frame["task"])
    if "recall" in tasks:
        for name, part in split_settings(frame).items():
            yield named(summarise_recall(part), "recall", CURVES), in_brackets(name)
    if "needle" in tasks:
        for name, part in split_needle(frame).items():
            cells = summarise_needle(part).groupby(["needle_kind", "context"], sort=False)
            for (kind, context), table in cells:
                setting = in_brackets(", ".join(filter(None, [f"{kind} {context:.0f}", name])))
                yield named(table, "needle", NEEDLE_CURVES), setting
    if "fidelity" in tasks:
        for name, part in split_fidelity(frame).items():
            yield named(summarise_fidelity(part), "fidelity", FIDELITY_CURVES), in_brackets(name)
    if "lm_eval" in tasks:
        for name, part in split_lm_eval(frame).items():
            yield named(summarise_lm_eval(part), "lm_eval/mean", LM_MEAN_CURVES), in_brackets(name)
            for task, table in task_table(part).groupby("lm_task", sort=False):
                curves = {"value": str(table["metric"].iloc[0])} | LM_TASK_CURVES
                yield named(table, f"lm_eval/{task}", curves), in_brackets(name)


def named(table: pd.DataFrame, task: str, curves: Mapping[str, str]) -> pd.DataFrame:
    columns = {old: f"{task}/{new}" for old, new in curves.items() if old in table}
    return table[["policy", "budget_tokens", *columns]].rename(columns=columns)


def in_brackets(name: str) -> str:
    return f" [{name}]" if name else ""
