"""Policies without a budget, through every path: capture to rows, live models, the command line."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from rich.console import Console

from sparse_eval import measure, patched
from sparse_eval.cli.compose import Composer
from sparse_eval.cli.progress import Progress
from sparse_eval.cli.settings import resolve
from sparse_eval.evaluator import Evaluator
from sparse_eval.ledger import ReadRecorder
from sparse_eval.live import Live
from sparse_eval.needle.cell import certain
from sparse_eval.policies.base import Policy
from sparse_eval.policies.ffd import FFD
from sparse_eval.policies.full import Full
from sparse_eval.policies.quest import Quest
from sparse_eval.policies.scored import SCORES, TopDelta, TopK, TopP
from sparse_eval.prefill import decode_step, prefill
from sparse_eval.reporting.show_recall import print_results
from sparse_eval.results import CellStore
from sparse_eval.storage.files import to_json
from sparse_eval.storage.table import frame_of
from sparse_eval.tasks.fidelity import Fidelity
from sparse_eval.tasks.live_task import Arm, arms_of
from sparse_eval.tasks.recall import Recall
from tests.tiny import random_ids, tiny_model

SHARED: dict[str, Any] = {"page_size": 8, "sink_pages": 1, "local_pages": 2}
ADAPTIVE: list[Policy] = [
    FFD(delta=0.3, **SHARED),
    TopDelta(score="bound", delta=0.3, **SHARED),
    TopP(score="thumbnail", p=0.7, **SHARED),
]
LIMITS: list[Policy] = [
    FFD(delta=math.inf, **SHARED),
    FFD(delta=math.inf, pseudo_max="exact", **SHARED),
    TopDelta(score="exact", delta=math.inf, **SHARED),
    TopP(score="bound", p=1, **SHARED),
    TopP(score="exact", p=1, **SHARED),
]


def cell(capture, policy: Policy):
    """Rows of the layers that the policy acts on."""
    return [r for r in Evaluator(capture, "torch").cell(policy, None) if not r["dense_layer"]]


# Capture to rows


@pytest.mark.parametrize("policy", LIMITS, ids=str)
def test_without_a_limit_recall_is_that_of_dense(capture, policy):
    for row in cell(capture, policy):
        assert row["mass_recall"] == pytest.approx(1, abs=1e-6)
        assert row["output_error"] < 1e-6 and row["density"] == 1


@pytest.mark.parametrize("policy", ADAPTIVE, ids=str)
def test_a_head_by_itself_reads_no_more_than_its_group(capture, policy):
    rows = cell(capture, policy)
    assert all(0 < row["density_head"] <= row["density"] < 1 for row in rows)
    assert any(row["density_head"] < row["density"] for row in rows)


def test_heads_without_a_choice_of_their_own_have_no_density(capture):
    evaluator = Evaluator(capture, "torch")
    shared, apart = (
        evaluator.cell(Quest(group=group, **SHARED), 48) for group in ("max", "per_head")
    )
    assert all(math.isnan(row["density_head"]) for row in shared)
    own = [row for row in apart if not row["dense_layer"]]
    assert all(0 < row["density_head"] <= row["density"] for row in own)
    assert all(math.isnan(row["density_head"]) for row in apart if row["dense_layer"])


def test_density_of_a_head_counts_the_tokens_it_chose(capture):
    policy, layer = FFD(delta=0.3, **SHARED), 2
    call = capture.replay_call(layer)
    wanted = policy.select(call, policy.init(call), None).wanted_BH
    assert wanted is not None
    expected = (wanted.double() / call.lengths_B.double().mean()).unflatten(1, (2, -1)).mean((0, 2))
    rows = [row["density_head"] for row in cell(capture, policy)]
    assert rows == pytest.approx(expected.tolist())


def test_residual_keys_are_measured_apart_and_recall_stays_exact(capture):
    exact, residual = (
        cell(capture, FFD(delta=0.3, attend=attend, **SHARED)) for attend in ("exact", "residual")
    )
    for a, b in zip(exact, residual, strict=True):
        same = ("mass_recall", "output_error", "lse_error", "tokens_read", "bytes_metadata")
        assert [a[name] for name in same] == [b[name] for name in same]
        assert math.isnan(a["output_error_attend"]) and math.isnan(a["bytes_kv_attend"])
        assert 0 < abs(b["output_error_attend"] - b["output_error"]) < 0.05
        assert 0 < abs(b["lse_error_attend"] - b["lse_error"]) < 0.05
        assert b["bytes_kv_attend"] < b["bytes_kv"]


def test_attention_over_residual_keys_is_that_of_the_dequantised_cache(capture):
    """At delta = inf and one step, against float64 over the keys that the policy names."""
    policy, layer, step = FFD(delta=math.inf, attend="residual", **SHARED), 2, 5
    call = capture.step_call(layer, step)
    state = policy.init(capture.step_call(layer, capture.num_queries - 1))
    n = int(call.lengths_B)
    keys = policy.attended_keys(call, state)[0, :, :n].double()
    assert torch.equal(keys[:, n // 8 * 8 :], call.k_BGND[0, :, n // 8 * 8 : n].double())
    q = call.q_BHD[0].double().unflatten(0, (2, -1))
    lse = (call.scale * q @ keys.mT).logsumexp(-1).flatten()
    x = Evaluator(capture, "torch")._attend_layer(policy, None, layer)
    assert x.own_keys is not None
    assert torch.allclose(x.own_keys.lse_TH[step].double(), lse, atol=1e-5)


def test_a_cap_is_kept_and_a_table_mixes_both_kinds(capture):
    capped = FFD(delta=3.0, max_tokens=40, **SHARED)
    table = measure(capture, [capped, Quest(**SHARED)], [48, 64], device="cpu")
    sparse = table[~table["dense_layer"]]
    assert sparse.groupby("policy")["budget_tokens"].nunique(dropna=False).to_dict() == {
        "ffd": 1,
        "quest": 2,
    }
    ours = sparse[sparse["policy"] == "ffd"]
    assert ours["tokens_read"].max() <= 40 and ours["budget_tokens"].isna().all()
    assert (ours["density_head"] > ours["density"]).any()  # what heads want goes beyond the cap
    frame = frame_of(table)
    assert frame["adaptive"].tolist() == [p == "ffd" for p in frame["policy"]]


def test_infinity_is_kept_in_a_row(capture):
    (row, *_) = measure(capture, [LIMITS[0]], [48], device="cpu").to_dict("records")
    assert '"delta":"inf"' in to_json(row["policy_config"])


@pytest.mark.parametrize(
    "policy",
    [
        Quest(metadata_dtype="int8", **SHARED),
        FFD(attend="residual", **SHARED),
        FFD(scales="token", pseudo_max="exact", **SHARED),
        TopK(score="mean", **SHARED),
    ],
    ids=str,
)
def test_what_records_reads_changes_no_choice_and_misses_no_tensor(capture, policy):
    call = capture.replay_call(2)
    state = policy.init(call)
    recorder = ReadRecorder(state)
    budget = None if policy.adaptive else 48
    plain, recorded = (policy.select(call, s, budget) for s in (state, recorder))
    assert torch.equal(plain.pages_BSK, recorded.pages_BSK)
    chosen_by = {name for name in state.paged if not name.startswith("residual")}
    assert recorder.touched == chosen_by


# Live


def generated(policy: Policy, budget: int | None = None) -> tuple[torch.Tensor, Any]:
    """Logits of 6 teacher-forced steps after a prompt of 90 tokens."""
    model, ids = tiny_model("tiny_llama"), random_ids(96)[0]
    cache = prefill(model, ids[:91]).fork()
    with patched(model, policy, budget=budget) as trace:
        logits = [decode_step(model, cache, int(token)) for token in ids[90:]]
    return torch.stack(logits), trace


def test_without_a_limit_a_live_model_answers_as_dense():
    dense, _ = generated(Full(**SHARED))
    for policy in (LIMITS[0], LIMITS[-1]):
        logits, trace = generated(policy)
        assert torch.allclose(logits, dense, atol=1e-4) and trace.density == 1


def test_a_live_model_reports_what_it_read():
    dense, _ = generated(Full(**SHARED))
    for policy in ADAPTIVE[:2]:
        logits, trace = generated(policy)
        assert not torch.allclose(logits, dense, atol=1e-4)
        assert 0 < trace.density < 1 and trace.density < trace.read_fraction < 1.2


def test_a_live_model_attends_with_residual_keys_and_counts_their_bytes():
    (exact, plain), (near, residual) = (
        generated(FFD(delta=0.3, attend=attend, **SHARED)) for attend in ("exact", "residual")
    )
    assert 0 < (exact - near).abs().max() < 0.05 * exact.abs().max()
    assert residual.density == pytest.approx(plain.density, abs=0.05)
    assert residual.read_fraction < plain.read_fraction


def test_a_budget_for_an_adaptive_policy_is_refused():
    with pytest.raises(ValueError, match="FFD is adaptive and takes no budget .*got budget=64"):
        generated(FFD(**SHARED), 64)


def test_a_live_policy_forgets(monkeypatch):
    kept: list[Live] = []
    forget = Live.forget

    def watched(self: Live) -> None:
        kept.append(self)
        forget(self)

    monkeypatch.setattr(Live, "forget", watched)
    generated(FFD(**SHARED, attend="residual"))
    assert kept and not kept[-1].states


def test_pages_that_a_hybrid_always_reads_are_no_luck():
    hybrid = TopK(score="bound", local_share=0.5, **SHARED)
    assert certain(Arm("hybrid", hybrid, 160)).local_pages == 10
    assert certain(Arm("hybrid", hybrid, 24)) is hybrid
    assert certain(Arm("ffd", FFD(**SHARED), None)) == FFD(**SHARED)


# The command line


def settings(tmp_path, *words: str):
    tiny = ["model=tiny_llama", "context=96", "prompts.n=1", "task.prompt_queries=32"]
    return resolve(Composer(), [*tiny, f"cache_dir={tmp_path}", *words])


def test_adaptive_policies_have_one_cell_whatever_the_budgets(tmp_path):
    s = settings(tmp_path, "policy=ffd", 'compare=[quest,"ffd:delta=7.0"]', "budget=[48,64]")
    cells = [(named.label, budget) for named, budget in s.cells()]
    assert cells == [("ffd", None), ("quest", 48), ("quest", 64), ("ffd:delta=7.0", None)]


def test_a_run_of_adaptive_policies_alone_has_its_table(tmp_path, capsys):
    words = ("policy=ffd", "compare=[thumbnail_topp]", "task.steps=4", "page_size=8")
    s = settings(tmp_path, *words)
    rows = [r for rows in Recall(s, Progress()).run(CellStore(tmp_path)) for r in rows]
    capsys.readouterr()
    print_results(rows, s, Console(width=200))
    said = capsys.readouterr().out
    assert "without a budget" in said and "reads" in said and ", a head" in said
    assert " tokens │" not in said
    assert "nothing could be compared, one prompt has no standard error" in said


def test_live_tasks_take_adaptive_policies(tmp_path):
    words = ("task=fidelity", "policy=ffd", "policy.delta=0.3", "compare=[quest]", "budget=48")
    s = settings(tmp_path, *words, "task.steps=4", "task.short_window=32", "page_size=8")
    assert [arm.budget for arm in arms_of(s)] == [None, None, 48]
    rows = [r for rows in Fidelity(s, Progress()).run(CellStore(tmp_path)) for r in rows]
    (ours,) = [row for row in rows if row["policy"].startswith("ffd")]
    assert ours["adaptive"] and math.isnan(ours["budget_tokens"]) and 0 < ours["density"] < 1
    assert math.isfinite(ours["kl_mean"])


@pytest.mark.parametrize(
    ("words", "label"),
    [
        (["policy=thumbnail_topk", "policy.score.bits=4"], "thumbnail_topk:score.bits=4"),
        (["experiment=ffd_density"], "ffd"),
        (["experiment=ffd_density", "policy=window"], "window"),
        (["policy=ffd", "policy.delta=inf"], "ffd:delta=inf"),
    ],
)
def test_labels_name_nested_fields_and_an_experiments_policy(tmp_path, words, label):
    s = resolve(Composer(), [*words, "model=tiny_llama", "context=400", f"cache_dir={tmp_path}"])
    assert s.policies[0].label == label


PAIRED = ("quest_topdelta", "quest_topp", "thumbnail_topk", "thumbnail_topp", "hybrid")


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("policy", PAIRED)
def test_any_pair_with_a_meaning_is_named_on_the_command_line(tmp_path, capture, policy, score):
    without = {
        "mean_std": ("quest_topp", "thumbnail_topp"),  # gives no mass
        "exact": ("hybrid",),  # forces no share
    }
    if policy in without.get(score, ()):
        with pytest.raises(ValueError, match="needs a log_mass|local_share must be 0"):
            settings(tmp_path, f"policy={policy}", f"policy.score.name={score}")
        return
    both = (f"policy={policy}", f"compare=['{policy}:score.name={score}']", "budget=64")
    s = settings(tmp_path, *both, f"policy.score.name={score}")
    named, compared = s.policies[0], s.policies[-1]
    assert named.policy == compared.policy
    assert named.policy.score.config() == SCORES[score]().config()
    call = capture.replay_call(0)
    budget = None if named.policy.adaptive else 64
    selection = named.policy.select(call, named.policy.init(call), budget)
    assert (selection.counts_BS >= 1).all()


def test_a_score_named_anew_takes_what_is_said_of_it(tmp_path):
    named = ("policy=quest_topdelta", "policy.score.name=mean", "compare=[]")
    s = settings(tmp_path, *named, "policy.score.metadata_dtype=float32")
    assert s.policies[0].policy.score.config() == {"name": "mean", "metadata_dtype": "float32"}
    with pytest.raises(ValueError, match="score thumbnail has no field 'metadata_dtype'"):
        words = ("policy.score.name=thumbnail", "policy.score.metadata_dtype=auto")
        settings(tmp_path, "policy=quest_topdelta", *words)
    config = "policy.config={score: {name: thumbnail, bits: 4}, delta: 4}"
    target = "policy.target=sparse_eval.policies.scored.TopDelta"
    s = settings(tmp_path, "policy=external", target, config, "compare=[]")
    assert s.policies[0].policy.score.bits == 4


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["policy=quest_topp", "policy.score.name=mean_std"], "TopP needs a log_mass, which score"),
        (["policy=ffd", "policy.max_tokens=32"], "max_tokens must be an integer >= 48 tokens"),
        (["policy=quest_topp", "policy.score.bits=2"], "unknown key 'policy.score.bits'"),
    ],
)
def test_a_pair_without_meaning_is_one_line(tmp_path, words, line):
    with pytest.raises(ValueError, match=line) as caught:
        settings(tmp_path, *words)
    assert "\n" not in str(caught.value)
