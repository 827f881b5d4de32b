"""The figures people read, against numbers worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd
import pytest

from sparse_eval.reporting.margins import margins
from sparse_eval.reporting.summarise import by_layer, split_settings
from sparse_eval.results import summarise_recall
from tests.factories import NAN, recall_rows

SMALL: dict[str, Any] = {
    "policies": ("quest", "oracle"),
    "budgets": (512,),
    "num_layers": 4,
    "num_kv_heads": 2,
}


def line(rows, policy: str) -> pd.Series:
    table = summarise_recall(pd.DataFrame(rows))
    return table[table["policy"] == policy].iloc[0]


def row(policy: str, layer: int, sample: int, recall: float, read: float, **more) -> dict:
    dense = layer == 0
    return {
        "policy": policy,
        "budget_tokens": 512,
        "layer": layer,
        "kv_head": 0,
        "sample": sample,
        "dense_layer": dense,
        "mass_recall": recall,
        "recall_contested": recall / 2,
        "output_error": 1 - recall,
        "density": read / 1000,
        "bytes_kv": 1000 if dense else read,
        "bytes_metadata": 0.0,
        "bytes_dense": 1000,
    } | more


def test_read_fraction_by_hand():
    """A dense layer of 1000 bytes; two sparse ones of 1000 that read 100 KV + 50 metadata each."""
    rows = [row("quest", layer, 0, 0.9, 100) for layer in range(3)]
    for sparse in rows[1:]:
        sparse["bytes_metadata"] = 50.0
    found = line(rows, "quest")
    assert found["model_read_fraction"] == pytest.approx((1000 + 2 * 150) / 3000)
    assert found["model_kv_fraction"] == pytest.approx((1000 + 2 * 100) / 3000)
    assert found["model_bytes"] == pytest.approx(1300)
    assert found["bytes_kv"] == 100 and found["bytes_metadata"] == 50


def test_unknown_metadata_makes_a_policy_not_realisable():
    rows = recall_rows(**SMALL)
    oracle, quest = line(rows, "oracle"), line(rows, "quest")
    assert math.isnan(oracle["model_read_fraction"]) and not oracle["realisable"]
    assert oracle["nan_bytes_metadata"] == oracle["rows"] == 4
    assert oracle["model_kv_fraction"] == pytest.approx((2 + 2 * 512 / 4096) / 4)
    assert quest["realisable"] and quest["nan_bytes_metadata"] == 0


def test_mean_and_standard_error_are_over_prompts_not_rows():
    values = {0: (0.5, 0.7), 1: (0.9, 0.9)}
    rows = [
        row("quest", layer, sample, recall, 100)
        for sample, recalls in values.items()
        for layer, recall in enumerate((1.0, *recalls))
    ]
    found = line(rows, "quest")
    assert found["n"] == 2
    assert found["recall"] == pytest.approx((0.6 + 0.9) / 2)
    assert found["recall_se"] == pytest.approx(0.15)


def test_one_prompt_has_no_standard_error():
    found = line(recall_rows(**SMALL), "quest")
    assert found["n"] == 1 and math.isnan(found["recall_se"])


def test_dense_layers_do_not_lift_the_mean():
    rows = [row("quest", 0, 0, 1.0, 1000), row("quest", 1, 0, 0.4, 100)]
    assert line(rows, "quest")["recall"] == pytest.approx(0.4)


def test_nan_is_left_out_and_counted():
    rows = recall_rows(**SMALL)
    sparse = [r for r in rows if r["policy"] == "quest" and not r["dense_layer"]]
    sparse[0]["recall_contested"] = NAN
    found = line(rows, "quest")
    rest = [r["recall_contested"] for r in sparse[1:]]
    assert found["contested"] == pytest.approx(sum(rest) / len(rest))
    assert found["nan_contested"] == 1 and found["nan_recall"] == 0 and found["rows"] == 4


def test_a_value_nobody_measured_stays_nan():
    rows = [r | {"recall_contested": NAN} for r in recall_rows(**SMALL)]
    found = line(rows, "quest")
    assert math.isnan(found["contested"]) and found["nan_contested"] == found["rows"]


def test_adaptive_policies_have_a_line_without_a_budget():
    rows = recall_rows(**SMALL) + [
        r | {"budget_tokens": NAN} for r in recall_rows(("top_p",), (512,))
    ]
    assert math.isnan(line(rows, "top_p")["budget_tokens"])


def test_one_label_with_two_configs_becomes_two_lines():
    coarse = {"page_size": 64, "sink_pages": 1, "local_pages": 2}
    rows = recall_rows(**SMALL) + recall_rows(**SMALL, policy_config=coarse)
    labels = set(summarise_recall(pd.DataFrame(rows))["policy"])
    assert {"quest:page_size=16", "quest:page_size=64"} <= labels


def test_seeds_of_one_policy_are_averaged():
    rows = [
        row("random", layer, 0, recall, 100, policy_config={"seed": seed})
        for seed, recall in enumerate((0.2, 0.4))
        for layer in (0, 1)
    ]
    found = line(rows, "random")
    assert found["recall"] == pytest.approx(0.3) and found["n"] == 1


def test_settings_are_reported_apart_and_never_averaged():
    rows = pd.DataFrame(recall_rows(**SMALL) + recall_rows(**SMALL, dtype="bfloat16", context=8192))
    assert list(split_settings(rows)) == [
        "context 4096, dtype float32",
        "context 8192, dtype bfloat16",
    ]
    with pytest.raises(ValueError, match="several settings cannot be averaged"):
        summarise_recall(rows)


def test_different_captures_of_one_prompt_are_refused():
    rows = recall_rows(**SMALL) + recall_rows(("window",), (512,), capture_hash="other")
    with pytest.raises(ValueError, match="captured in 2 different ways"):
        summarise_recall(pd.DataFrame(rows))


def test_rows_of_other_tasks_are_not_recall():
    with pytest.raises(ValueError, match="task recall, got none"):
        summarise_recall(pd.DataFrame([{"task": "needle", "policy": "quest"}]))


def test_layers_keep_their_own_figures():
    rows = [row("quest", layer, 0, recall, 100) for layer, recall in enumerate((1, 0.4, 0.8))]
    table = by_layer(pd.DataFrame(rows)).set_index("layer")
    assert table["recall"].tolist() == [1, 0.4, 0.8]
    assert table["dense_layer"].tolist() == [True, False, False]


def test_margin_is_paired_and_against_the_best_rival_that_reads_no_more():
    recalls = {"quest": (0.6, 0.8), "window": (0.7, 0.8), "random": (0.1, 0.2), "dear": (0.9, 0.9)}
    reads = {"quest": 150, "window": 100, "random": 100, "dear": 400}
    rows = [
        row(policy, layer, sample, recall, reads[policy])
        for policy, both in recalls.items()
        for sample, recall in enumerate(both)
        for layer in (0, 1)
    ]
    table = margins(pd.DataFrame(rows), "quest")
    assert len(table) == 2  # the mean of the layers and layer 1: dense layers say nothing
    for found in table.to_dict("records"):
        assert found["rival"] == "window" and found["n"] == 2
        assert found["margin"] == pytest.approx(-0.05)
        assert found["margin_se"] == pytest.approx(0.05)


def test_what_is_not_realisable_is_no_rival():
    rows = recall_rows(("quest", "oracle"), (512,), num_layers=4)
    assert margins(pd.DataFrame(rows), "quest").empty
