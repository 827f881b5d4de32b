"""Needle rows -> the figures people read: accuracy, outcomes, likelihood, what can be told apart.

The sampling unit is the planted prompt. Accuracy over every measured prompt comes first; what is
compared and ranked comes from the prompts where the dense gate passed, paired with dense.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pandas as pd

from sparse_eval.needle.score import OUTCOMES
from sparse_eval.reporting.needle_pairs import Arm, comparison, rank_of
from sparse_eval.reporting.proportions import wilson, wilson_lower
from sparse_eval.reporting.summarise import distinct_labels
from sparse_eval.storage.columns import names
from sparse_eval.storage.table import frame_of

SETTING = names("model revision weights prompts protocol chat dense_layers dtype device backend")
"""Rows that differ in one of these answer different questions: never pooled."""
GRID = ["needle_kind", "context"]
CELL = ["policy", "budget_tokens"]
AVERAGED = names(
    "answer_nll page_hit page_hit_chance page_hit_any page_hit_any_chance heads_above_half heads"
    " tokens_read density model_read_fraction"
)


def needle_rows(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of whole answers, measured and gate samples alike, with each policy label standing
    for one set of fields. Raises ValueError where there are none."""
    rows = frame_of(rows)
    rows = rows[rows["task"] == "needle"]
    if not len(rows) or "outcome" not in rows:
        raise ValueError("expected rows of task needle, got none")
    rows = rows[rows["outcome"].notna()]
    return rows.assign(policy=distinct_labels(rows), correct=rows["outcome"] == "correct")


def split_needle(rows: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Answer rows by setting. One's name tells how it differs from the others ("" if alone)."""
    rows = needle_rows(rows)
    varying = [k for k in SETTING if rows[k].map(str).nunique() > 1]
    return {
        ", ".join(f"{k} {part.iloc[0][k]}" for k in varying): part
        for _, part in rows.groupby(list(SETTING), dropna=False, sort=False)
    }


def measured(rows: pd.DataFrame) -> pd.DataFrame:
    """Without the gate's own samples."""
    return rows[rows["role"] == "measured"]


def gated_kinds(rows: pd.DataFrame) -> set[str]:
    """The kinds of needle that a dense gate was run for: it left samples of its own."""
    return {str(kind) for kind in rows.loc[rows["role"] == "gate", "needle_kind"].unique()}


def dense_label(rows: pd.DataFrame) -> str:
    """The policy that read everything: the one without a budget that left nothing out, and not
    because its rule happened to ask for all."""
    rows = rows[~rows["adaptive"].astype(bool)]
    reads_all = rows.groupby("policy")["density"].min() == 1
    free = rows.groupby("policy")["budget_tokens"].count() == 0
    return str(next(p for p in rows["policy"].unique() if reads_all[p] and free[p]))


def gate_table(rows: pd.DataFrame, confidence: float = 0.95) -> pd.DataFrame:
    """Per kind, context and depth: dense on the gate's own samples; not_ranked: it did not pass,
    or was not asked."""
    keys = [*GRID, "depth"]
    gate = rows[rows["role"] == "gate"].groupby(keys)["correct"].agg(["sum", "size"])
    table = measured(rows).groupby(keys)["gated"].max().astype(bool).to_frame("not_ranked")
    table = table.join(gate.set_axis(["gate_correct", "gate_n"], axis=1))
    table = table.fillna({"gate_correct": 0, "gate_n": 0}).astype(
        {"gate_correct": int, "gate_n": int}
    )
    table["gate_lower"] = [
        wilson_lower(line["gate_correct"], line["gate_n"], confidence)
        for line in table.to_dict("records")
    ]
    return table.reset_index()


def summarise_needle(rows: pd.DataFrame) -> pd.DataFrame:
    """One line per kind, context, policy and budget, of answer rows of one setting.

    accuracy, low, high: over all n measured prompts, Wilson 95 %. Counts of each outcome. Means of
    AVERAGED; answer_nll_se over prompts. wording_spread: best less worst wording's accuracy.
    same_as_dense: share of answers that are dense's own, letter for letter.
    Compared, over the pairs prompts that passed the gate: difference (policy minus dense),
    diff_low, diff_high (Tango 95 %), p_value (exact McNemar), resolvable (the smallest difference
    that test can tell from none). verdict in words. rank: 1 + the policies at this budget that are
    significantly better; NaN where nothing is ranked."""
    kinds = gated_kinds(rows)
    lines = [
        line
        for keys, part in measured(rows).groupby(GRID, sort=False)
        for line in grid_lines(
            dict(zip(GRID, keys, strict=True)), part, gate_ran=str(keys[0]) in kinds
        )
    ]
    return pd.DataFrame(lines)


def grid_lines(
    keys: dict[str, Any], rows: pd.DataFrame, *, gate_ran: bool
) -> Iterator[dict[str, Any]]:
    dense = dense_label(rows)
    arms = {Arm.of(policy, budget): part for (policy, budget), part in by_arm(rows)}
    of_dense = next(arm for arm in arms if arm.policy == dense)
    answers = answers_of(rows[~rows["gated"].astype(bool)])
    for arm, part in arms.items():
        is_dense = arm.policy == dense
        rivals = [a for a in arms if a.policy != dense and a.budget == arm.budget]
        yield {
            **keys,
            "policy": arm.policy,
            "budget_tokens": math.nan if arm.budget is None else arm.budget,
            **arm_line(part),
            **({} if is_dense else comparison(answers, of_dense, arm, gate_ran=gate_ran)),
            "rank": math.nan if is_dense else rank_of(answers, arm, rivals),
            "is_dense": is_dense,
        }


def by_arm(rows: pd.DataFrame) -> Any:
    return rows.groupby(CELL, dropna=False, sort=False)


def answers_of(rows: pd.DataFrame) -> dict[Arm, pd.Series]:
    """Whether each arm was right, by prompt."""
    return {
        Arm.of(policy, budget): part.set_index("prompt_hash")["correct"]
        for (policy, budget), part in by_arm(rows)
    }


def arm_line(part: pd.DataFrame) -> dict[str, Any]:
    n, correct = len(part), int(part["correct"].sum())
    interval = wilson(correct, n)
    by_wording = part.groupby("wording")["correct"].mean().to_numpy(dtype=float)
    return {
        "n": n,
        "accuracy": correct / n,
        "low": interval.low,
        "high": interval.high,
        "wording_spread": float(by_wording.max() - by_wording.min()),
        "same_as_dense": float((part["output"] == part["dense_output"]).mean()),
        **{name: float(part[name].mean()) for name in AVERAGED},
        "answer_nll_se": part["answer_nll"].astype(float).std(ddof=1) / math.sqrt(n),
        **{name: int((part["outcome"] == name).sum()) for name in OUTCOMES},
    }


def depth_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Accuracy and density per kind, context, policy, budget and depth, with n and whether it is
    ranked."""
    keys = [*GRID, *CELL, "depth"]
    grouped = measured(rows).groupby(keys, dropna=False, sort=False)
    table = grouped["correct"].agg(["mean", "size"]).set_axis(["accuracy", "n"], axis=1)
    table["density"] = grouped["density"].mean()
    table["gated"] = grouped["gated"].max().astype(bool)
    return table.reset_index()


def hit_table(rows: pd.DataFrame) -> pd.DataFrame:
    """The share of the value's pages that was read, and chance, per kind, context, policy, budget,
    layer and KV head, over prompts; above_half: the share of answers in which the head read over
    half of them."""
    rows = frame_of(rows)
    rows = rows[(rows["task"] == "needle") & rows["layer"].notna() & (rows["role"] == "measured")]
    rows = rows.assign(policy=distinct_labels(rows))
    heads = rows[[*GRID, *CELL, "layer", "page_hit_chance"]].assign(
        kv_head=rows["page_hit_heads"].map(lambda hits: range(len(hits))),
        hit=rows["page_hit_heads"],
    )
    heads = heads.explode(["kv_head", "hit"]).astype({"hit": float})
    heads["above_half"] = heads["hit"] > 0.5
    keys = [*GRID, *CELL, "layer", "kv_head"]
    grouped = heads.groupby(keys, dropna=False, sort=False)
    return grouped[["hit", "page_hit_chance", "above_half"]].mean().reset_index()


def noise_floor(rows: pd.DataFrame) -> dict[str, float]:
    """Stock SDPA against dense through the shared kernel, on the same prompts: the largest
    difference in the true answer's NLL, and the share of its steps with the same choice."""
    dense = measured(rows)
    dense = dense[dense["policy"] == dense_label(dense)].dropna(subset="stock_nll")
    gap = (dense["stock_nll"] - dense["answer_nll"]).abs()
    return {
        "nll_difference": float(gap.max()),
        "same_choice": float(dense["stock_agreement"].mean()),
        "n": len(dense),
    }
