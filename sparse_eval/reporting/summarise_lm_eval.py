"""lm-eval rows -> the figures people read: each task against dense, the mean of tasks, the worst.

The sampling unit is the document. Tasks whose dense gate did not pass are shown and ranked nowhere:
means and worst tasks are of the others.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd

from sparse_eval.reporting.scores import mark
from sparse_eval.reporting.summarise import distinct_labels
from sparse_eval.storage.columns import names
from sparse_eval.storage.table import frame_of

SETTING = names(
    "model revision weights context protocol chat dense_layers dtype device backend seed"
)
"""Rows that differ in one of these answer different questions: never pooled."""
CELL = ["policy", "budget_tokens"]
Z = 1.96


def lm_rows(rows: pd.DataFrame) -> pd.DataFrame:
    """The lm_eval rows, each policy label standing for one set of fields. Raises ValueError where
    there are none."""
    rows = frame_of(rows)
    rows = rows[rows["task"] == "lm_eval"]
    if not len(rows):
        raise ValueError("expected rows of task lm_eval, got none")
    return rows.assign(policy=distinct_labels(rows))


def split_lm_eval(rows: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Rows by setting. One's name tells how it differs from the others ("" if alone). A run that
    was stopped before its last task has rows of documents and none of tasks: it is left out."""
    rows = lm_rows(rows)
    varying = [k for k in SETTING if rows[k].map(str).nunique() > 1]
    parts = {
        ", ".join(f"{k} {part.iloc[0][k]}" for k in varying): part
        for _, part in rows.groupby(list(SETTING), dropna=False, sort=False)
    }
    return {name: part for name, part in parts.items() if (part["role"] == "task").any()}


def task_table(rows: pd.DataFrame) -> pd.DataFrame:
    """One line per task, policy and budget, primary metrics only, of rows of one setting."""
    rows = rows[rows["role"] == "task"]
    primary = rows[rows["is_primary"].astype(bool)]
    return primary.assign(is_dense=primary["verdict"] == "dense").reset_index(drop=True)


def summarise_lm_eval(rows: pd.DataFrame) -> pd.DataFrame:
    """One line per policy and budget over the tasks that passed the gate, of rows of one setting:
    those whose scores are shares, as a perplexity would swamp the mean and win every comparison.

    tasks: how many; n: documents. score, score_se: mean of the tasks' scores and its standard
    error. difference, low, high: mean over tasks of the paired difference from dense, 95 %, from
    the documents' differences within tasks, within [-1, 1]; of one task, its own interval.
    same_as_dense: share of answers. Of every such task whose scores lie in [0, 1], also of those
    that are better when lower: worst_task, what it loses (a difference whose sign is turned where
    lower is better) and its interval. worse: all that passed and are significantly worse (Holm)."""
    table = task_table(rows)
    passed = table[~table["gated"].astype(bool)]
    ranked = passed[passed["lm_task"].isin(shares_of(table))]
    samples = rows[rows["role"] == "sample"]
    lines = []
    for keys, part in table.groupby(CELL, dropna=False, sort=False):
        own = at(ranked, keys)
        line = dict(zip(CELL, keys, strict=True)) | read_of(part)
        line |= over_tasks(own, at(samples, keys)) if len(own) else {"tasks": 0, "n": 0}
        compared = at(passed, keys)
        if len(compared) and not part["is_dense"].all():
            line |= worst_columns(compared)
        lines.append(line)
    return pd.DataFrame(lines)


def shares_of(table: pd.DataFrame) -> list[str]:
    """The tasks all of whose scores lie in [0, 1], higher being better."""
    is_share = table["value"].between(0, 1) & table["higher_is_better"].astype(bool)
    return where_all(is_share, table)


def where_all(holds: pd.Series, table: pd.DataFrame) -> list[str]:
    """The tasks of whose every row something holds."""
    return [str(task) for task, same in holds.groupby(table["lm_task"]) if same.all()]


def at(rows: pd.DataFrame, keys: Any) -> pd.DataFrame:
    policy, budget = keys
    budgets = rows["budget_tokens"]
    same = budgets.isna() if pd.isna(budget) else budgets == budget
    return rows[(rows["policy"] == policy) & same]


def read_of(part: pd.DataFrame) -> dict[str, Any]:
    return {
        "is_dense": bool(part["is_dense"].all()),
        "tokens_read": float(part["tokens_read"].mean()),
        "density": float(part["density"].mean()),
        "model_read_fraction": float(part["model_read_fraction"].mean()),
        "all_tasks": len(part),
        "truncated": int(part["truncated"].sum()),
        "same_as_dense": float((part["identical_to_dense"] * part["n"]).sum() / part["n"].sum()),
    }


def over_tasks(own: pd.DataFrame, samples: pd.DataFrame) -> dict[str, Any]:
    """own: the arm's tasks that passed the gate; samples: its documents."""
    count = len(own)
    line = {
        "tasks": count,
        "n": int(own["n"].sum()),
        "score": float(own["value"].mean()),
        "score_se": math.sqrt(float((own["stderr"] ** 2).sum(skipna=False))) / count,
    }
    if own["is_dense"].all():
        return line
    error = math.sqrt(sum(error_of(samples, task) ** 2 for task in own["lm_task"])) / count
    mean = float(own["difference"].mean())
    low, high = mean - Z * error, mean + Z * error
    if count == 1:
        low, high = (float(own[f"difference_{end}"].iloc[0]) for end in ("low", "high"))
    # shares differ by one at most; NaN stays
    return line | {"difference": mean, "low": np.maximum(low, -1.0), "high": np.minimum(high, 1.0)}


def worst_columns(passed: pd.DataFrame) -> dict[str, Any]:
    """passed: an arm's tasks whose dense gate passed."""
    found = {"worse": int((passed["verdict"].map(mark) == "▼").sum())}
    comparable = passed[passed["value"].between(0, 1) & passed["dense_value"].between(0, 1)]
    comparable = comparable[comparable["difference"].notna()]
    if not len(comparable):
        return found
    worst = worst_of(comparable)
    ends = [worst["difference_low"], worst["difference_high"]]
    ends = ends if worst["higher_is_better"] else [0.0 - end for end in reversed(ends)]
    return found | {
        "worst_task": worst["lm_task"],
        "worst": gain_of(worst["difference"], worst["higher_is_better"]),
        "worst_low": float(ends[0]),
        "worst_high": float(ends[1]),
    }


def worst_of(own: pd.DataFrame) -> pd.Series:
    """The task that loses most against dense."""
    gains = map(gain_of, own["difference"], own["higher_is_better"])
    return own.iloc[int(np.nanargmin(list(gains)))]


def gain_of(difference: float, higher_is_better: float) -> float:
    """Negative where it is a loss. A flag read back from a file is 1.0 or 0.0."""
    return float(difference) if higher_is_better else 0.0 - float(difference)


def error_of(samples: pd.DataFrame, task: str) -> float:
    """Of a task's mean difference from dense. Documents that all differ alike say nothing of the
    spread: the rule of three's bound stands in."""
    found = samples.loc[samples["lm_task"] == task, "difference"].astype(float).dropna()
    if len(found) < 2:
        return math.nan
    spread = float(found.std(ddof=1))
    return spread / math.sqrt(len(found)) if spread else min(1.0, 3 / len(found)) / Z


def gate_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Per task: dense's score on the gate's documents, its bound and floor; gated: not ranked."""
    table = task_table(rows)
    keep = names(
        "lm_task metric value n gate_value gate_lower gate_floor gate_n gate_on chance gated"
        " truncated resolvable stock_agreement stock_n higher_is_better"
    )
    wanted = [*table, *(name for name in keep if name not in table)]
    table = table.reindex(columns=wanted)  # of dense alone nothing is resolvable
    resolvable = table[~table["is_dense"]].groupby("lm_task")["resolvable"].max()
    dense = table[table["is_dense"]]
    dense = dense.assign(resolvable=dense["lm_task"].map(resolvable))
    return dense[list(keep)].reset_index(drop=True)


def noise_floor(rows: pd.DataFrame) -> dict[str, float]:
    """Stock SDPA's answers against dense's through the shared kernel, on some documents of each
    task: the share that is the same."""
    gate = gate_table(rows).dropna(subset="stock_agreement")
    n = float(gate["stock_n"].sum())
    same = float((gate["stock_agreement"] * gate["stock_n"]).sum())
    return {"same_answer": same / n if n else math.nan, "n": n}
