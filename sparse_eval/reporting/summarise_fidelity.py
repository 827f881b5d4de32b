"""Fidelity rows -> one line per policy and budget: means over prompts, with standard errors."""

from __future__ import annotations

import pandas as pd

from sparse_eval.reporting.summarise import SETTING, distinct_labels
from sparse_eval.storage.columns import names
from sparse_eval.storage.table import frame_of

CELL = ["policy", "budget_tokens"]
AVERAGED = names(
    "kl_mean kl_p99 top1_agreement nll_dense nll_sparse long_kl_mean long_kl_p99"
    " long_top1_agreement long_nll_dense long_nll_sparse tokens_read density model_read_fraction"
)


def fidelity_rows(rows: pd.DataFrame) -> pd.DataFrame:
    """The fidelity rows, each policy label standing for one set of fields. Raises ValueError where
    there are none."""
    rows = frame_of(rows)
    rows = rows[rows["task"] == "fidelity"]
    if not len(rows):
        raise ValueError("expected rows of task fidelity, got none")
    return rows.assign(policy=distinct_labels(rows))


def split_fidelity(rows: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Rows by setting. One's name tells how it differs from the others ("" if alone)."""
    rows = fidelity_rows(rows)
    varying = [k for k in SETTING if rows[k].map(str).nunique() > 1]
    return {
        ", ".join(f"{k} {part.iloc[0][k]}" for k in varying): part
        for _, part in rows.groupby(list(SETTING), dropna=False, sort=False)
    }


def summarise_fidelity(rows: pd.DataFrame) -> pd.DataFrame:
    """Of rows of one setting: means of AVERAGED over the n prompts, *_se standard errors, NaN for
    one; tokens, long_tokens: fed in all, and those that need the long context; is_dense."""
    grouped = rows.groupby(CELL, dropna=False, sort=False)
    table = grouped[list(AVERAGED)].mean()
    for name in ("kl_mean", "top1_agreement", "nll_sparse", "long_kl_mean"):
        table[f"{name}_se"] = grouped[name].sem()
    table[["tokens", "long_tokens"]] = grouped[["tokens", "long_tokens"]].sum()
    table["n"] = grouped["prompt_hash"].nunique()
    table["stock_kl_mean"] = grouped["stock_kl_mean"].mean()
    table["stock_agreement"] = grouped["stock_agreement"].mean()
    table["is_dense"] = table["stock_kl_mean"].notna()
    return table.reset_index()
