"""A capture measured: against the model's own outputs and against plain float64 arithmetic."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from sparse_eval import measure
from sparse_eval.evaluator import Evaluator, check_recall
from sparse_eval.policies.base import Policy
from sparse_eval.policies.full import Full
from sparse_eval.policies.mean_std import MeanStd
from sparse_eval.policies.oracle import Oracle
from sparse_eval.policies.quest import Quest
from sparse_eval.policies.random import Random
from sparse_eval.policies.snapkv import SnapKV
from sparse_eval.policies.window import Window
from tests.broken_policies import BudgetForEveryHead, ReadsOnePageMore, ReturnsATuple
from tests.tiny import tiny_capture, tiny_loaded

SHARED: dict[str, Any] = {"page_size": 8, "sink_pages": 1, "local_pages": 2}
SELECTING: list[Policy] = [
    Quest(**SHARED),
    Quest(**SHARED, group="sum"),
    Quest(**SHARED, group="softmax_sum"),
    Quest(**SHARED, group="per_head"),
    MeanStd(**SHARED),
    Window(**SHARED),
    Random(**SHARED),
    SnapKV(**SHARED),
]


def quest_pages(q_HD, k_GND, length, *, page, budget, sinks, local):
    """Plain float64: the pages Quest reads for one query, one list per KV head."""
    current = (length - 1) // page
    chosen = []
    for g, k in enumerate(k_GND):
        group = q_HD.shape[0] // k_GND.shape[0]
        score = {}
        for p in range(length // page):
            lo, hi = k[p * page : (p + 1) * page].aminmax(dim=0)
            heads = q_HD[g * group : (g + 1) * group]
            score[p] = max(float(torch.maximum(q * lo, q * hi).sum()) for q in heads)
        forced = {p for p in range(current + 1) if p < sinks or p > current - local}
        rest = sorted(set(range(current + 1)) - forced, key=lambda p: (-score[p], p))
        chosen.append(sorted(forced | set(rest[: budget // page - len(forced)])))
    return chosen


def window_pages(q_HD, k_GND, length, *, page, budget, sinks, local):
    current = (length - 1) // page
    recent = budget // page - sinks
    pages = {p for p in range(current + 1) if p < sinks or p > current - recent}
    return [sorted(pages)] * k_GND.shape[0]


def recall_in_float64(path: Path, layer: int, pages_of, **rule) -> list[float]:
    """Mass recall per KV head from a capture file, with safetensors and torch alone."""
    with safe_open(path, "pt") as file:
        scale = json.loads(file.metadata()["sparse_eval"])["scales"][str(layer)]
        keys, queries = (
            file.get_tensor(f"layers.{layer}.{name}").double() for name in ("keys", "queries")
        )
        lengths = file.get_tensor("lengths").tolist()
    group = queries.shape[1] // keys.shape[0]
    recall = torch.zeros(keys.shape[0], len(lengths), dtype=torch.float64)
    for t, n in enumerate(lengths):
        chosen = pages_of(queries[t], keys, n, **rule)
        for g, pages in enumerate(chosen):
            read = torch.zeros(n, dtype=torch.bool)
            for p in pages:
                read[p * rule["page"] : (p + 1) * rule["page"]] = True
            logits = scale * queries[t, g * group : (g + 1) * group] @ keys[g, :n].T
            recall[g, t] = logits.softmax(-1)[:, read].sum(-1).mean()
    return recall.mean(1).tolist()


@pytest.mark.parametrize(
    ("policy", "pages_of"), [(Quest, quest_pages), (Window, window_pages)], ids=["quest", "window"]
)
@pytest.mark.parametrize("budget", [40, 77])
def test_recall_agrees_with_plain_float64_from_the_file(
    capture, tmp_path, policy, pages_of, budget
):
    path = tmp_path / "capture.safetensors"
    capture.save(path)
    rule = {"page": 8, "budget": budget, "sinks": 1, "local": 2}
    table = measure(path, [policy(**SHARED)], [budget], dense_layers=[])
    for layer in sorted(capture.layers):
        expected = recall_in_float64(path, layer, pages_of, **rule)
        ours = table[table.layer == layer].sort_values("kv_head").mass_recall.tolist()
        assert ours == pytest.approx(expected, abs=1e-5)


def test_replaying_full_equals_the_models_own_outputs(capture):
    evaluator = Evaluator(capture, "torch", ())
    assert evaluator.replay_error() < 1e-5
    rows = evaluator.cell(Full(), None)
    assert all(abs(row["mass_recall"] - 1) < 1e-6 and row["density"] == 1 for row in rows)


def test_a_bfloat16_replay_is_as_close_as_bfloat16_allows():
    model = tiny_loaded("tiny_qwen2", "bfloat16").model
    captured = tiny_capture(model, context=120, steps=6)
    evaluator = Evaluator(captured, "torch", ())
    for i, layer in captured.layers.items():
        group = layer.queries_THD.shape[1] // layer.keys_GND.shape[0]
        keys, values = (
            x.double().repeat_interleave(group, 0) for x in (layer.keys_GND, layer.values_GNE)
        )
        logits = layer.scale * torch.einsum("thd,hnd->thn", layer.queries_THD.double(), keys)
        beyond = torch.arange(keys.shape[1]) >= captured.lengths_T[:, None]
        weights = logits.masked_fill(beyond[:, None], -torch.inf).softmax(-1)
        exact = torch.einsum("thn,hne->the", weights, values)
        models_own = (layer.outputs_THE.double() - exact).norm() / exact.norm()
        ours = (evaluator.truth(i, 16).out_THE.double() - exact).norm() / exact.norm()
        assert 0 < ours <= 2 * models_own


def test_dense_lse_equals_a_float64_logsumexp(capture):
    evaluator = Evaluator(capture, "torch")
    for i, layer in capture.layers.items():
        group = layer.queries_THD.shape[1] // layer.keys_GND.shape[0]
        keys = layer.keys_GND.double().repeat_interleave(group, 0)
        logits = layer.scale * torch.einsum("thd,hnd->thn", layer.queries_THD.double(), keys)
        beyond = torch.arange(keys.shape[1]) >= capture.lengths_T[:, None]
        expected = logits.masked_fill(beyond[:, None], -torch.inf).logsumexp(-1)
        torch.testing.assert_close(
            evaluator.truth(i, 16).lse_TH.double(), expected, rtol=1e-6, atol=1e-6
        )


@pytest.mark.parametrize("budget", [24, 40, 64, 104])
def test_no_policy_beats_the_oracle(capture, budget):
    table = measure(capture, [Oracle(**SHARED), *SELECTING], [budget], dense_layers=[])
    best = table[table.policy == "oracle"].set_index(["layer", "kv_head"]).mass_recall
    for i, policy in enumerate(SELECTING):
        alone = measure(capture, [policy], [budget], dense_layers=[])
        mine = alone.set_index(["layer", "kv_head"]).mass_recall
        assert (mine <= best + 1e-5).all(), (i, policy)


@pytest.mark.parametrize("policy", [Full(**SHARED), Oracle(**SHARED), Window(**SHARED)], ids=repr)
def test_recall_never_falls_as_the_budget_grows(capture, policy):
    table = measure(capture, [policy], [24, 32, 48, 80, 120, 160], dense_layers=[])
    curves = table.pivot_table(
        index=["layer", "kv_head"], columns="budget_tokens", values="mass_recall"
    )
    assert (curves.diff(axis=1).iloc[:, 1:] >= -1e-6).all(axis=None)


@pytest.mark.parametrize("policy", [Oracle(**SHARED), *SELECTING], ids=repr)
def test_a_budget_that_covers_the_context_equals_dense(capture, policy):
    table = measure(capture, [policy], [160], dense_layers=[])
    assert (table.mass_recall - 1).abs().max() < 1e-6
    assert table.output_error.max() < 1e-6
    assert (table.density == 1).all() and (table.page_overlap_oracle == 1).all()


def test_dense_layers_are_exactly_those_listed(capture):
    table = measure(capture, [Random(**SHARED)], [24], dense_layers=[1])
    assert set(table[table.dense_layer].layer) == {1}
    assert (table[table.dense_layer].density == 1).all()
    assert (table[~table.dense_layer].density < 0.3).all()


def test_bytes_are_counted_from_what_was_read(capture):
    quest, window = (
        measure(capture, [policy], [40], dense_layers=[0])
        for policy in (Quest(**SHARED), Window(**SHARED))
    )
    layer = capture.layers[1]
    per_token = 4 * (layer.keys_GND.shape[-1] + layer.values_GNE.shape[-1])
    lengths = capture.lengths_T.tolist()
    full_pages = sum(n // 8 for n in lengths) / len(lengths)
    sparse = quest[~quest.dense_layer]
    assert (sparse.bytes_metadata == 2 * 4 * layer.keys_GND.shape[-1] * full_pages).all()
    assert (window.bytes_metadata == 0).all()
    assert sparse.bytes_kv.tolist() == [t * per_token for t in sparse.tokens_read]
    # a page of the five is the partial current one: fewer than 40 tokens on average
    partial = [(n - 1) % 8 + 1 for n in lengths]
    assert (sparse.tokens_read == 32 + sum(partial) / len(partial)).all()
    dense = quest[quest.dense_layer]
    assert (dense.bytes_kv == dense.bytes_dense).all() and (dense.bytes_metadata == 0).all()


def test_the_oracle_has_no_metadata_bytes(capture):
    table = measure(capture, [Oracle(**SHARED)], [40], dense_layers=[0])
    assert table[~table.dense_layer].bytes_metadata.isna().all()


def test_eviction_stores_less_and_selection_everything(capture):
    evict, select = (
        measure(capture, [policy], [40], dense_layers=[])
        for policy in (SnapKV(**SHARED), Quest(**SHARED))
    )
    assert (evict.bytes_stored < evict.bytes_dense).all()
    assert (select.bytes_stored > select.bytes_dense).all()


def test_recall_out_of_range_is_an_error_not_clamped():
    row = {"mass_recall": 1.1, "layer": 3, "kv_head": 0}
    with pytest.raises(RuntimeError, match="layer 3"):
        check_recall([row])


def test_a_damaged_capture_is_refused_in_one_line(capture, tmp_path):
    path = tmp_path / "capture.safetensors"
    capture.save(path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-7])
    with pytest.raises(ValueError, match="not a readable capture"):
        measure(path, [Window()], [64])
    altered = bytearray(whole)
    altered[-9] ^= 1
    path.write_bytes(bytes(altered))
    with pytest.raises(ValueError, match="altered"):
        measure(path, [Window()], [64])
    with pytest.raises(ValueError, match="no capture file"):
        measure(tmp_path / "nothing.safetensors", [Window()], [64])


@pytest.mark.parametrize(
    ("change", "lack"),
    [
        (lambda meta: [1], "its metadata is no mapping"),
        (lambda meta: {k: v for k, v in meta.items() if k != "scales"}, "has no scales"),
        (lambda meta: {k: v for k, v in meta.items() if k != "prompt_length"}, "no prompt_length"),
        (lambda meta: meta | {"scales": [0.25]}, "has no scales"),
        (lambda meta: meta | {"scales": {"0": "wide"}}, "the scale of layer '0' is 'wide'"),
        (lambda meta: meta | {"scales": {"first": 0.25}}, "the scale of layer 'first' is 0.25"),
        (lambda meta: meta | {"scales": {"7": 0.25}}, "it has no layers.7.keys"),
    ],
)
def test_metadata_that_is_no_captures_is_refused_in_one_line(capture, tmp_path, change, lack):
    path = tmp_path / "c.safetensors"
    capture.save(path)
    with safe_open(path, framework="pt") as file:
        meta = json.loads(file.metadata()["sparse_eval"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    save_file(tensors, path, metadata={"sparse_eval": json.dumps(change(meta))})
    with pytest.raises(ValueError, match="not a readable capture .*" + lack) as failure:
        measure(path, [Window()], [64])
    assert "\n" not in str(failure.value)


def test_a_layer_of_other_shapes_is_refused_in_one_line(capture, tmp_path):
    layer = replace(capture.layers[0], queries_THD=capture.layers[0].queries_THD[:-1])
    replace(capture, layers=capture.layers | {0: layer}).save(tmp_path / "c.safetensors")
    with pytest.raises(ValueError, match="layer 0's shapes do not fit each other: keys") as failure:
        measure(tmp_path / "c.safetensors", [Window()], [64])
    assert "\n" not in str(failure.value)


def test_a_capture_comes_back_from_disk_as_it_was(capture, tmp_path):
    capture.save(tmp_path / "c.safetensors")
    ours = measure(capture, [Quest()], [64])
    again = measure(tmp_path / "c.safetensors", [Quest()], [64])
    columns = ["mass_recall", "output_error", "tokens_read", "bytes_metadata"]
    assert ours[columns].equals(again[columns])


def test_a_budget_below_the_forced_pages_names_the_minimum(capture):
    with pytest.raises(ValueError, match=">= 48"):
        measure(capture, [Quest()], [32])


def test_a_policy_that_reads_more_than_its_budget_is_not_measured(capture):
    line = r"read \d+ tokens in one KV head and step \(layer 2\), its budget is 48"
    for broken in (ReadsOnePageMore(**SHARED), BudgetForEveryHead(**SHARED)):
        with pytest.raises(ValueError, match=f"{type(broken).__name__} {line}"):
            measure(capture, [broken], [48], device="cpu")


def test_a_policy_that_returns_no_selection_is_named(capture):
    line = "ReturnsATuple.select must return a Selection, got tuple"
    with pytest.raises(ValueError, match=line):
        measure(capture, [ReturnsATuple(**SHARED)], [48], device="cpu")


@pytest.mark.parametrize(
    ("policies", "budgets", "line"),
    [
        ([Quest], [64], r"instance such as Quest\(\), got the class Quest"),
        (Quest(), [64], r"policies must be a list such as \[Quest\(\)\], got Quest\("),
        ("quest", [64], "policies must be a list such as .* got 'quest'"),
        (["quest"], [64], "instance of Policy, such as .* got 'quest'"),
        ([], [64], "policies must be a list such as .* got an empty one"),
        ([Quest()], 64, r"budgets must be a list such as \[512, 2048\], got 64"),
        ([Quest()], "64", "budgets must be a list such as .* got '64'"),
        ([Quest()], [], "budgets must be a list such as .* got an empty one"),
        ([Quest()], ["64"], "budget must be tokens .* got '64'"),
    ],
)
def test_measure_says_in_one_line_what_it_takes(capture, policies, budgets, line):
    with pytest.raises((TypeError, ValueError), match=line) as caught:
        measure(capture, policies, budgets)
    assert "\n" not in str(caught.value)
