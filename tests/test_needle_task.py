"""task=needle on tiny models: cells, the dense arm, hits, the gate, protocols, recall rows."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from sparse_eval.app import register_resolvers
from sparse_eval.cli.compose import Composer
from sparse_eval.cli.progress import Progress
from sparse_eval.cli.settings import resolve
from sparse_eval.core import AttentionCall
from sparse_eval.inputs.texts import docs
from sparse_eval.needle.answer import Asker
from sparse_eval.needle.config import GateConfig
from sparse_eval.needle.gate import can_pass, judge
from sparse_eval.needle.hits import HitRecorder
from sparse_eval.policies.base import Selection
from sparse_eval.policies.window import Window
from sparse_eval.prefill import prefill
from sparse_eval.results import CellStore
from sparse_eval.tasks.needle import Needle, is_answer
from tests.needles import planted
from tests.tiny import tiny_loaded

TIME = {"seconds", "peak_memory"}
BASE = [
    *("task=needle", "model=tiny_llama", "context=600", "prompts.n=2", "task.depths=[0.3,1]"),
    *("task.kinds=[passcode]", "budget=[64,0.25]", "compare=[window]", "dense_layers=[0]"),
    "task.max_new_tokens=7",
]


def task(tmp_path: Any, *more: str) -> Needle:
    register_resolvers()
    settings = resolve(Composer(), [*BASE, f"cache_dir={tmp_path}", *more])
    return Needle(settings, Progress())


def rows_of(needle: Needle, tmp_path: Any) -> list[dict[str, Any]]:
    return [row for rows in needle.run(CellStore(tmp_path)) for row in rows]


def without_time(rows: list[dict[str, Any]]) -> str:
    return repr([{k: v for k, v in row.items() if k not in TIME} for row in rows])


@dataclasses.dataclass(frozen=True)
class Finished:
    folder: Path
    rows: list[dict[str, Any]]
    num_prefills: int


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Finished:
    """One run of two depths, two samples, five arms."""
    folder, prefills = tmp_path_factory.mktemp("needle"), list[Any]()

    def counted(model: Any, ids: Any, **options: Any) -> Any:
        prefills.append(ids)
        return prefill(model, ids, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sparse_eval.prefill.prefill", counted)
        rows = rows_of(task(folder), folder)
    return Finished(folder, rows, len(prefills))


def test_a_run_measures_every_arm_of_every_prompt_on_one_prefill_each(finished):
    rows = finished.rows
    answers = [row for row in rows if is_answer(row)]
    samples = [(row["sample"], row["policy"], row["budget_tokens"]) for row in answers]
    assert finished.num_prefills == 4 and len(answers) == 4 * 5
    assert len(set(map(str, samples))) == len(samples)
    assert {row["prompts"] for row in rows} == {docs().source}
    assert [row["policy"] for row in answers[:5]] == ["full", "quest", "quest", "window", "window"]
    full = answers[0]
    assert full["density"] == full["model_read_fraction"] == full["page_hit"] == 1
    assert math.isnan(full["budget_tokens"])
    assert full["stock_agreement"] == 1 and abs(full["stock_nll"] - full["answer_nll"]) < 1e-4
    for row in answers:
        assert len({r["capture_hash"] for r in answers if r["sample"] == row["sample"]}) == 1
        assert row["dense_output"] is not None and row["protocol"] == "decode"
        assert row["answer_nll"] > 0 and 1 <= row["first_token_rank"] <= 259
        assert row["model_read_fraction"] > row["density"] or row["policy"] == "full"
    layers = [row for row in rows if "outcome" not in row]
    assert {row["layer"] for row in layers} == {1, 2}
    assert all(len(row["page_hit_heads"]) == 2 for row in layers)
    at_the_end = [r for r in answers if r["policy"] == "window" and r["depth"] == 0.3]
    assert all(r["page_hit"] == 0 for r in at_the_end)


def test_a_second_run_takes_its_cells_from_the_store_and_loads_no_model(finished, monkeypatch):
    monkeypatch.setattr("sparse_eval.tasks.prompted.shared_model", None)
    again = rows_of(task(finished.folder, "task.depths=[1]"), finished.folder)
    first = [row for row in finished.rows if row["depth"] == 1]
    assert repr(again) == repr(first)


def test_the_same_seed_gives_the_same_rows_and_another_seed_others(finished, tmp_path):
    same = rows_of(task(tmp_path, "task.depths=[1]", "compare=[]"), tmp_path)
    first = [row for row in finished.rows if row["depth"] == 1 and row["policy"] != "window"]
    assert without_time(same) == without_time(first)
    other = task(tmp_path, "task.depths=[1]", "compare=[]", "budget=64", "seed=1")
    assert rows_of(other, tmp_path)[0]["prompt_hash"] != same[0]["prompt_hash"]


def test_question_protocol_prefills_the_context_only(tmp_path):
    short = ["task.depths=[0.3]", "prompts.n=1", "task.chat=none"]
    decode = rows_of(task(tmp_path, *short), tmp_path)
    asked = rows_of(task(tmp_path, *short, "protocol=question"), tmp_path)
    assert {row["protocol"] for row in asked} == {"question"}
    assert decode[0]["prompt_hash"] == asked[0]["prompt_hash"]
    assert decode[0]["capture_hash"] != asked[0]["capture_hash"]
    # dense is the same model in both; a window that saw the question sparsely is not
    assert decode[0]["answer_nll"] == pytest.approx(asked[0]["answer_nll"], abs=1e-3)
    sparse = [
        next(r["answer_nll"] for r in rows if r["policy"] == "window") for rows in (decode, asked)
    ]
    assert abs(sparse[0] - sparse[1]) > 1e-3
    assert all(0 < r["answer_steps"] <= 7 for r in asked if is_answer(r))


def test_recall_rows_are_of_the_answers_own_steps(tmp_path):
    needle = task(tmp_path, "task.depths=[0.3]", "prompts.n=1", "task.measure_recall=true")
    rows = rows_of(needle, tmp_path)
    recall = [row for row in rows if row["task"] == "recall"]
    assert {row["sample"] for row in recall} == {row["sample"] for row in rows}
    assert {row["queries"] for row in recall} == {6}  # a space and five digits, byte by byte
    assert {row["policy"] for row in recall} == {"full", "quest", "window"}
    assert all(row["mass_recall"] == pytest.approx(1, abs=1e-5) for row in recall[:6])
    with pytest.raises(ValueError, match="measure_recall"):
        task(tmp_path, "task.measure_recall=true", "protocol=question")


def test_contexts_resolve_fractions_each_for_itself(tmp_path):
    rows = rows_of(
        task(
            tmp_path, "task.contexts=[400,800]", "budget=0.25", "prompts.n=1", "task.depths=[0.5]"
        ),
        tmp_path,
    )
    quest = {r["context"]: r["budget_tokens"] for r in rows if r["policy"] == "quest"}
    assert quest == {400: 100, 800: 200}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("task.kinds=[lorem]", "task.kinds must be among multikey, passcode, word, uuid"),
        ("task.kinds=[]", "task.kinds must be a list"),
        ("task.depths=[1.5]", r"task.depths must lie in \[0, 1\]"),
        ("task.depths=0.5", "task.depths must be a list"),
        ("task.chat=maybe", "task.chat must be one of auto, none, template"),
        ("task.contexts=[1]", "task.contexts must be an integer >= 2"),
        ("task.distractors=0", "task.distractors must be an integer >= 1"),
        ("task.distractors=500", "task.distractors must be below"),
        ("task.gate.dense_min=1.0", r"task.gate.dense_min must lie in \(0, 1\)"),
        ("task.gate.n=-1", "task.gate.n must be an integer >= 0"),
        ("task.max_new_tokens=0", "task.max_new_tokens must be an integer >= 1"),
        ("task.measure_recall=perhaps", "task.measure_recall must be true or false"),
        ("task.contexts=[4090]", "context must be <="),
        ("budget=32", "budget must be >= 48 tokens"),
        ("prompts=transcripts", "prompts must be docs, kjv, file or dataset for task=needle"),
    ],
)
def test_bad_settings_are_one_line(tmp_path, override, message):
    with pytest.raises(ValueError, match=message) as error:
        task(tmp_path, override)
    assert "\n" not in str(error.value)


def test_the_gate_has_samples_of_its_own_and_says_what_it_refuses(tmp_path):
    needle = task(tmp_path, "task.depths=[0.3]", "prompts.n=1", "task.gate.n=4")
    rows = [row for row in rows_of(needle, tmp_path) if is_answer(row)]
    gate = [row for row in rows if row["role"] == "gate"]
    measured = [row for row in rows if row["role"] == "measured"]
    assert len(gate) == 4 and {row["policy"] for row in gate} == {"full"}
    assert {row["prompt_hash"] for row in gate}.isdisjoint(r["prompt_hash"] for r in measured)
    assert all(row["gated"] for row in rows)  # a random model finds nothing


def test_a_gate_passes_by_its_lower_bound():
    config = GateConfig(dense_min=0.8, n=20, confidence=0.95)
    assert can_pass(config) and not can_pass(dataclasses.replace(config, n=10))
    assert judge([True] * 20, config).passed
    assert not judge([True] * 17 + [False] * 3, config).passed
    assert judge([], config).passed is None and judge([], config).gated


def call(length: int, layer: int = 0) -> AttentionCall:
    return AttentionCall(
        q_BHD=torch.zeros(1, 4, 8),
        k_BGND=torch.zeros(1, 2, length, 8),
        v_BGNE=torch.zeros(1, 2, length, 8),
        lengths_B=torch.tensor([length], dtype=torch.int32),
        scale=1.0,
        layer=layer,
    )


def test_hits_and_chance_by_hand():
    """Ten pages of 16; 0, 8, 9 forced; the value lies in pages 3 and 4. Head 0 reads 3 and 4, then
    3 alone; head 1 never."""
    recorder = HitRecorder(Window(), value_span=(62, 66))
    for first in ([0, 3, 4, 8, 9], [0, 3, 5, 8, 9]):
        pages = torch.tensor([[first, [0, 1, 2, 8, 9]]], dtype=torch.int32)
        recorder(call(160), Selection(pages, torch.full((1, 2), 5, dtype=torch.int32), 16))
    hits = recorder.hits(0, 2)[0]
    assert hits.hit_G == [0.75, 0.0]
    assert hits.chance_G == pytest.approx([2 / 7, 2 / 7])
    assert hits.any_hit == 0.75 and hits.any_chance == pytest.approx(1 - (5 / 7) ** 2)
    assert recorder.hits(0, 1)[0].hit_G == [1.0, 0.0]


def test_a_value_on_a_page_that_is_always_read_is_no_merit():
    recorder = HitRecorder(Window(), value_span=(2, 6))
    pages = torch.tensor([[[0, 8, 9], [0, 8, 9]]], dtype=torch.int32)
    recorder(call(160), Selection(pages, torch.full((1, 2), 3, dtype=torch.int32), 16))
    hits = recorder.hits(0, 1)[0]
    assert hits.hit_G == hits.chance_G == [1.0, 1.0]


def test_a_recorder_keeps_no_cache_alive():
    recorder = HitRecorder(Window(), value_span=(0, 4))
    pages = torch.zeros(1, 2, 1, dtype=torch.int32)
    recorder(call(4096), Selection(pages, torch.ones(1, 2, dtype=torch.int32), 16))
    kept, _ = recorder.steps[0][0]
    assert kept.k_BGND.untyped_storage().nbytes() == 0 and kept.capacity == 4096


def asker(**options: Any) -> Asker:
    loaded = tiny_loaded("tiny_llama")
    needle = planted("passcode", 0.3, tokenizer=loaded.tokenizer, **options)
    filled = prefill(loaded.model, needle.ids)
    return Asker(loaded.model, loaded.tokenizer, needle, filled, 8, is_plain=True)


def test_the_true_answers_likelihood_does_not_depend_on_where_it_was_seen(monkeypatch):
    """Greedy logits are reused where the answer is the true one: as if it had been fed."""
    ask = asker()
    generated = ask.generate()
    assert ask.true_logits(generated) is None  # a random model says something else
    ask.planted = dataclasses.replace(ask.planted, answer_ids=generated.ids[:6])
    reused = ask.true_logits(generated)
    assert reused is not None and len(reused) == 6
    fed = ask.judge_true(ask.feed_true())
    assert ask.judge_true(reused).nll == pytest.approx(fed.nll, abs=1e-4)
    assert fed.first_token_rank == 1 and list(fed.choices) == list(generated.ids[:6])


def test_nll_is_of_the_values_tokens_alone():
    ask = asker()
    logits = ask.feed_true()
    by_hand = [
        -float(x.double().log_softmax(-1)[token])
        for x, token in zip(logits, ask.planted.answer_ids, strict=True)
    ]
    assert ask.planted.value_start == 1  # the space before it is not the value's
    assert ask.judge_true(logits).nll == pytest.approx(sum(by_hand[1:]), rel=1e-5)


def test_answer_steps_end_with_the_value():
    ask = asker()
    ids = ask.tokenizer(" It is 48217. And", add_special_tokens=False)["input_ids"]
    generated = dataclasses.replace(
        ask.generate(), ids=tuple(ids), text=" It is 48217. And", logits=[torch.zeros(1)] * len(ids)
    )
    ask.planted = dataclasses.replace(ask.planted, value="48217")
    found = ask.score(generated)
    assert found.is_correct and ask.answer_steps(generated, found) == len(" It is 48217")


def test_prefills_kept_on_disk_serve_later_runs(tmp_path, monkeypatch):
    short = ["task.depths=[0.3]", "prompts.n=1", "cache_prefill=true", "compare=[]", "budget=64"]
    first = rows_of(task(tmp_path, *short), tmp_path)
    assert len(list((tmp_path / "prefills").glob("*.safetensors"))) == 1
    monkeypatch.setattr("sparse_eval.prefill.prefill", None)
    again = rows_of(task(tmp_path, *short, "budget=80"), tmp_path)
    assert again[0]["capture_hash"] == first[0]["capture_hash"]
    assert again[0]["answer_nll"] == first[0]["answer_nll"]
