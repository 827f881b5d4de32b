"""The columns of rows: their order, their types, and what makes two rows the same measurement."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
    " density_head output_error_attend lse_error_attend bytes_kv_attend replay_error"
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
    " model_speedup_bound tokens_per_second buffers lists keys density_target delta_target"
    " keep_ratio delta floor_speedup top_delta_speedup run"
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
        " dense_output lists keys verdict gate_on scores run"
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
    " density_target delta_target keep_ratio run"
)
"""Two rows that agree in all of these are the same measurement, whatever folder they lie in. run:
timings belong to the session that took them; results.load says which, other rows have none."""


def flat(fields: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested fields under dotted names: {"score": {"bits": 2}} -> {"score.bits": 2}."""
    named: dict[str, Any] = {}
    for key, value in fields.items():
        is_nested = isinstance(value, Mapping)
        named |= flat(value, f"{prefix}{key}.") if is_nested else {f"{prefix}{key}": value}
    return named
