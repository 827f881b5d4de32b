"""The columns of rows: their order, their types, and rows as one typed table."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from sparse_eval.storage.files import to_json

if TYPE_CHECKING:
    from sparse_eval.core import Row

SCHEMA = 1
"""Version of the rows' meaning; rows of different versions are never pooled."""


def names(text: str) -> tuple[str, ...]:
    """The words of a text: a long list of names that still reads."""
    return tuple(text.split())


COMMON_COLUMNS = names(
    "schema task sample prompt_hash prompts model revision weights policy policy_config adaptive"
    " budget_tokens page_size sink_pages local_pages context protocol dense_layers backend device"
    " dtype seed capture_hash cell_key seconds peak_memory"
)
RECALL_COLUMNS = names(
    "layer layer_kind kv_head dense_layer queries mass_recall mass_recall_p10 mass_forced"
    " recall_contested output_error lse_error page_overlap_oracle tokens_read density bytes_kv"
    " bytes_metadata bytes_dense bytes_stored"
)
NEEDLE_COLUMNS = names(
    "needle_kind depth depth_realised outcome answer_nll first_token_rank page_hit"
    " page_hit_chance tokens_read density model_read_fraction gated"
    " role wording chat layer page_hit_any page_hit_any_chance page_hit_heads heads_above_half"
    " heads answer_steps kv_form stock_nll stock_agreement expected output output_ids"
    " dense_output needle value_span"
)
FIDELITY_COLUMNS = names(
    "tokens kl_mean kl_p99 top1_agreement nll_dense nll_sparse tokens_read density"
    " model_read_fraction"
    " long_tokens long_kl_mean long_kl_p99 long_top1_agreement long_nll_dense long_nll_sparse"
    " kv_form stock_kl_mean stock_agreement"
)
LM_EVAL_COLUMNS = names(
    "lm_task metric value stderr n dense_value difference p_value gated truncated"
    " identical_to_dense loglikelihood_mode tokens_read density model_read_fraction"
    " role chat p_holm difference_low difference_high resolvable verdict is_primary"
    " higher_is_better chance gate_value gate_lower gate_floor gate_n gate_on stock_agreement"
    " stock_n kv_form prompt_tokens scores is_over expected output output_ids dense_output"
    " log_likelihoods"
)
LATENCY_COLUMNS = names(
    "what batch num_heads num_kv_heads head_dim graph l2_resident median_us p10_us p90_us bytes"
    " terabytes_per_s ceiling_fraction baseline speedup_vs_sdpa speedup_vs_best"
    " model_speedup_bound tokens_per_second buffers lists"
)
ALL_COLUMNS = tuple(
    dict.fromkeys(
        COMMON_COLUMNS
        + RECALL_COLUMNS
        + NEEDLE_COLUMNS
        + FIDELITY_COLUMNS
        + LM_EVAL_COLUMNS
        + LATENCY_COLUMNS
    )
)

TEXT = frozenset(
    names(
        "task sample prompt_hash prompts model revision weights policy policy_config protocol"
        " backend device dtype capture_hash cell_key layer_kind needle_kind outcome lm_task metric"
        " loglikelihood_mode what baseline role chat kv_form expected output needle"
        " dense_output lists verdict gate_on scores"
    )
)
INTEGER = frozenset(
    names(
        "schema budget_tokens page_size sink_pages local_pages context seed layer kv_head batch"
        " num_heads num_kv_heads head_dim wording heads buffers"
    )
)
FLAG = frozenset(
    names("adaptive dense_layer gated graph l2_resident is_primary higher_is_better is_over")
)
LIST = frozenset(names("dense_layers page_hit_heads output_ids value_span log_likelihoods"))
NUMBER = frozenset(ALL_COLUMNS) - TEXT - INTEGER - FLAG - LIST

CELL_IDENTITY = names(
    "cell_key layer kv_head needle_kind depth lm_task metric what batch graph l2_resident baseline"
)
"""Two rows that agree in all of these are the same measurement, whatever folder they lie in."""


def frame_of(rows: Iterable[Row] | pd.DataFrame) -> pd.DataFrame:
    """Rows as a table: contract order, one type a column, each measurement once (the last wins).

    Text columns hold text or None, list columns tuples, policy_config JSON text; columns that the
    contract does not name follow at the end as they are."""
    frame = rows.copy() if isinstance(rows, pd.DataFrame) else pd.DataFrame(list(rows))
    known = [name for name in ALL_COLUMNS if name in frame]
    frame = frame[known + [name for name in frame if name not in known]]
    for name in known:
        frame[name] = typed(frame[name])
    return once(frame)


def typed(column: pd.Series) -> pd.Series:
    if column.name in TEXT and pd.api.types.infer_dtype(column, skipna=False) == "string":
        return column.astype(object)
    if column.name in TEXT:
        return pd.Series([text_of(x) for x in column], column.index, dtype=object)
    if column.name in LIST:
        return pd.Series([tuple(x) if is_list(x) else None for x in column], column.index, object)
    if column.name in FLAG and not column.isna().any():
        return column.astype(bool)
    if column.name in INTEGER and not column.isna().any():
        return column.astype("int64")
    if column.name in INTEGER | NUMBER | FLAG:
        return column.astype("float64")
    return column


def text_of(value: Any) -> str | None:
    if isinstance(value, dict | list | tuple):
        return to_json(value)
    if value is None or value is pd.NA or (isinstance(value, float) and np.isnan(value)):
        return None
    return str(value)


def is_list(value: Any) -> bool:
    return isinstance(value, list | tuple | np.ndarray)


def once(frame: pd.DataFrame) -> pd.DataFrame:
    """Drops all but the last of rows that are the same measurement; rows without a key stay."""
    if "cell_key" not in frame:
        return frame.reset_index(drop=True)
    identity = [name for name in CELL_IDENTITY if name in frame]
    repeated = frame.duplicated(identity, keep="last") & frame["cell_key"].notna()
    return frame[~repeated].reset_index(drop=True)


def fields_of(policy_config: str | None) -> dict[str, Any]:
    """A policy's fields from its column; {} where there are none."""
    fields = json.loads(policy_config) if policy_config else {}
    return fields if isinstance(fields, dict) else {}
