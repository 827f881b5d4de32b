"""Recall rows -> the figures people read: per policy and budget, and per layer.

The sampling unit is the prompt: rows of one prompt (layers, KV heads, seeds) are averaged first,
means and standard errors are taken over prompts. NaN is not measured: left out of a mean, counted
beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd

from sparse_eval.storage.columns import names
from sparse_eval.storage.table import fields_of, frame_of

SETTING = names("model revision weights prompts context protocol dense_layers dtype device backend")
"""Rows that differ in one of these answer different questions: never averaged or compared."""

REPEATED = frozenset({"seed"})
"""Policy fields that only repeat a measurement: averaged, not told apart."""

CELL = ["policy", "budget_tokens"]
AVERAGED = {
    "recall": "mass_recall",
    "contested": "recall_contested",
    "forced": "mass_forced",
    "output_error": "output_error",
    "overlap": "page_overlap_oracle",
    "tokens_read": "tokens_read",
    "density": "density",
    "bytes_kv": "bytes_kv",
    "bytes_metadata": "bytes_metadata",
    "bytes_dense": "bytes_dense",
    "lse_error": "lse_error",
    "density_head": "density_head",
    "output_error_attend": "output_error_attend",
    "lse_error_attend": "lse_error_attend",
    "bytes_kv_attend": "bytes_kv_attend",
}
WITH_ERRORS = ("recall", "contested", "output_error", "lse_error")


def recall_rows(rows: pd.DataFrame) -> pd.DataFrame:
    """The recall rows, with a column `prompt` and each policy label standing for one set of fields;
    rows that went through here once stay as they are. Raises ValueError where there are none, or
    where one prompt was captured in several ways."""
    if "prompt" in rows:
        return rows
    rows = frame_of(rows)
    rows = rows[rows["task"] == "recall"] if "task" in rows else rows
    if not len(rows) or "mass_recall" not in rows:
        raise ValueError("expected rows of task recall, got none")
    rows = rows.assign(prompt=prompts_of(rows), policy=distinct_labels(rows))
    check_one_capture(rows)
    return rows


def prompts_of(rows: pd.DataFrame) -> pd.Series:
    """What identifies a prompt: its hash, or where rows have none the sample's name."""
    sample = rows["sample"].astype(str) if "sample" in rows else pd.Series("0", rows.index)
    if "prompt_hash" not in rows:
        return sample
    return rows["prompt_hash"].where(rows["prompt_hash"].fillna("") != "", sample)


def distinct_labels(rows: pd.DataFrame) -> pd.Series:
    """Policy labels; where one label has several sets of fields, the fields that differ join it."""
    if "policy_config" not in rows:
        return rows["policy"]
    labels = {}
    for label, configs in rows.groupby("policy")["policy_config"].unique().items():
        fields = [fields_of(config) for config in configs]
        keys = dict.fromkeys(k for own in fields for k in own if k not in REPEATED)
        differ = [k for k in keys if len_of(fields, k) > 1]
        for config, own in zip(configs, fields, strict=True):
            extra = ",".join(f"{k}={own[k]}" for k in differ if k in own)
            joint = "," if ":" in str(label) else ":"
            labels[label, config] = f"{label}{joint}{extra}" if extra else label
    pairs = zip(rows["policy"], rows["policy_config"], strict=True)
    return pd.Series([labels.get(pair, pair[0]) for pair in pairs], rows.index)


def len_of(fields: Sequence[dict[str, Any]], key: str) -> int:
    return len({str(own.get(key)) for own in fields})


def check_one_capture(rows: pd.DataFrame) -> None:
    if "capture_hash" not in rows:
        return
    keys = ["prompt"] + [name for name in SETTING if name in rows]
    captures = rows.groupby(keys, dropna=False)["capture_hash"].nunique()
    if (captures > 1).any():
        prompt = captures.index[captures > 1][0]
        prompt = prompt[0] if isinstance(prompt, tuple) else prompt
        raise ValueError(
            f"prompt {str(prompt)[:12]} was captured in {captures.max()} different ways: results "
            "on different captures cannot be compared; report these runs apart"
        )


def replay_line(rows: pd.DataFrame) -> str:
    """How far the replay of dense attention was from what the model itself computed."""
    what = "dense attention, replayed through the shared kernel, against the model's own outputs: "
    errors = rows["replay_error"].dropna() if "replay_error" in rows else pd.Series(dtype=float)
    if not len(errors):
        return f"{what}not recorded in these rows"
    return f"{what}{errors.max():.1e} apart (relative L2, worst layer and prompt)"


def split_settings(rows: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Recall rows by setting. A name tells how a setting differs from the others; "" if alone."""
    rows = recall_rows(rows)
    keys = [name for name in SETTING if name in rows]
    if not keys:
        return {"": rows}
    varying = [k for k in keys if rows[k].map(str).nunique() > 1]
    parts = {}
    for _, part in rows.groupby(keys, dropna=False, sort=False):
        first = part.iloc[0]
        parts[", ".join(f"{k} {first[k]}" for k in varying)] = part
    return parts


def summarise_recall(rows: pd.DataFrame) -> pd.DataFrame:
    """One line per policy and budget, in the rows' order, of rows of one setting.

    recall, contested, output_error, tokens_read, density, bytes_*: means over the non-dense layers
    and KV heads; *_se: standard error over the n prompts, NaN for one. model_read_fraction: bytes
    of KV and metadata read in all layers, dense ones included, over what dense reads; NaN unless
    realisable. model_kv_fraction: the same without metadata, for policies that are not.
    model_bytes, model_dense_bytes: per decode step. nan_*: rows without that value, of `rows`.
    """
    rows = recall_rows(rows)
    check_one_setting(rows)
    sparse = sparse_rows(rows)
    table = over_prompts(sparse, CELL).join(model_reads(rows))
    counted = ["mass_recall", "recall_contested", "output_error", "bytes_metadata"]
    counted = [name for name in counted if name in sparse]
    missing = sparse[counted].isna().groupby([sparse[k] for k in CELL], dropna=False, sort=False)
    short = {v: k for k, v in AVERAGED.items()}
    table = table.join(missing.sum().rename(columns=lambda name: f"nan_{short[name]}"))
    table["rows"] = missing.size()
    table["realisable"] = table["nan_bytes_metadata"] < table["rows"]
    return table.reset_index()


def check_one_setting(rows: pd.DataFrame) -> None:
    for name in SETTING:
        if name in rows and rows[name].map(str).nunique() > 1:
            values = ", ".join(sorted(set(rows[name].map(str))))
            raise ValueError(f"rows of several settings cannot be averaged: {name} is {values}")


def sparse_rows(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows of the layers that the policies acted on; all rows where every layer is dense."""
    sparse = rows[~rows["dense_layer"].astype(bool)]
    return sparse if len(sparse) else rows


def over_prompts(rows: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    """Means of AVERAGED per key over prompts, with standard errors and n, indexed by key."""
    columns = {new: old for new, old in AVERAGED.items() if old in rows}
    renamed = rows[[*keys, "prompt", *columns.values()]].set_axis(
        [*keys, "prompt", *columns], axis=1
    )
    each = renamed.groupby([*keys, "prompt"], dropna=False, sort=False).mean()
    grouped = each.groupby(level=list(range(len(keys))), dropna=False, sort=False)
    table = grouped.mean()
    for name in WITH_ERRORS:
        if name in columns:
            table[f"{name}_se"] = grouped[name].sem()
    table["n"] = grouped["recall"].count()
    return table


def model_reads(rows: pd.DataFrame) -> pd.DataFrame:
    """Bytes that all layers and KV heads read per decode step, and shares: means over prompts."""
    kinds = ["bytes_kv", "bytes_metadata", "bytes_dense"]
    keys = [*CELL, "prompt"]
    head = rows.groupby([*keys, "layer", "kv_head"], dropna=False, sort=False)[kinds].mean()
    prompt = head.groupby(level=[0, 1, 2], dropna=False, sort=False).sum()
    unknown = head.isna().groupby(level=[0, 1, 2], dropna=False, sort=False).any()
    prompt = prompt.where(~unknown)
    total = prompt["bytes_kv"] + prompt["bytes_metadata"]
    reads = pd.DataFrame(
        {
            "model_read_fraction": total / prompt["bytes_dense"],
            "model_kv_fraction": prompt["bytes_kv"] / prompt["bytes_dense"],
            "model_bytes": total,
            "model_dense_bytes": prompt["bytes_dense"],
        }
    )
    return reads.groupby(level=[0, 1], dropna=False, sort=False).mean()


def dense_policies(table: pd.DataFrame) -> set[str]:
    """Policies that read everything at every budget, from a table with policy and density."""
    least = table.groupby("policy")["density"].min()
    return set(least.index[least > 1 - 1e-9])


def by_layer(rows: pd.DataFrame) -> pd.DataFrame:
    """One line per policy, budget and layer: means over KV heads, then over prompts."""
    rows = recall_rows(rows)
    check_one_setting(rows)
    keys = [*CELL, "layer"]
    table = over_prompts(rows, keys)
    dense = rows["dense_layer"].astype(bool).groupby([rows[k] for k in keys], dropna=False)
    table["dense_layer"] = dense.first()
    return table.reset_index()
