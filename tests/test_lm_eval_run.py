"""task=lm_eval as whole runs on a tiny model: rows, resume, order of work, honesty."""

from __future__ import annotations

import itertools
import json
import logging
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lm_eval.models.huggingface import HFLM

import sparse_eval.prefill
from sparse_eval.app import register_resolvers, run
from sparse_eval.cli.compose import Composer
from sparse_eval.cli.machine import Machine
from sparse_eval.cli.plan import cost_of
from sparse_eval.cli.progress import Progress
from sparse_eval.cli.settings import resolve
from sparse_eval.lm import cell, suite
from sparse_eval.lm.requests import generation, instances_of
from sparse_eval.lm.results import Answered
from sparse_eval.reporting.compare import compare
from sparse_eval.results import CellStore, load
from sparse_eval.tasks.live_task import Arm, arms_of
from sparse_eval.tasks.lm_eval import LmEval, suspicions
from sparse_eval.tasks.shared import SharedFailed
from sparse_eval.tracking.curves import curve_tables

logging.getLogger("lm_eval").setLevel(logging.ERROR)

HERE = Path(__file__).parent / "lm_tasks"
MACHINE = Machine(flops=1e9, bytes_per_second=1e9, norm_seconds=1e-5)
TINY = [
    "model=tiny_llama",
    f"task.include_path={HERE}",
    "context=256",
    "dense_layers=[0]",
    "budget=[64,96]",
    "compare=[window]",
    "task.batch_size=3",
    "task.limit=4",
    "task.gate.n=3",
]
TASKS = "task.tasks=[tiny_say,tiny_always,tiny_choice]"
COMPOSER = Composer()
METADATA = "task.metadata={max_length: 140}"


def settings_of(cache: Path, *more: str) -> Any:
    register_resolvers()
    given = {word.partition("=")[0] for word in more}
    words = [word for word in (TASKS, METADATA) if word.partition("=")[0] not in given]
    return resolve(COMPOSER, ["task=lm_eval", *TINY, f"cache_dir={cache}", *words, *more])


def task_of(cache: Path, *more: str) -> LmEval:
    return LmEval(settings_of(cache, *more), Progress())


def rows_of(task: LmEval, cache: Path) -> list[dict[str, Any]]:
    return [row for rows in task.run(CellStore(cache)) for row in rows]


@pytest.fixture(scope="module")
def done(tmp_path_factory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("lm_eval")
    run(settings_of(root / "cache"), root / "run", ["task=lm_eval"])
    return root / "run", root / "cache"


def test_a_run_leaves_rows_samples_summary_pictures_and_a_page(done):
    folder, _ = done
    rows = load(folder)
    tasks = rows[rows["role"] == "task"]
    assert set(tasks["lm_task"]) == {"tiny_say", "tiny_always", "tiny_choice"}
    metrics = tasks[tasks["policy"] == "full"].groupby("lm_task")["metric"].agg(list)
    assert metrics["tiny_say"] == ["low", "length"] and metrics["tiny_choice"][0] == "acc"
    lines = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    assert len(lines) == 3 * 4 * 5
    wanted = {"sample", "lm_task", "prompt_hash", "output", "expected", "value", "dense_output"}
    assert all(wanted <= set(line) for line in lines)
    (headline,) = json.loads((folder / "summary.json").read_text())["headline"]
    assert [line["all_tasks"] for line in headline["table"]] == [3] * 5
    assert {path.stem for path in (folder / "plots").glob("*.png")} >= {"lm_eval_tasks"}
    page = (folder / "report.html").read_text()
    assert "Dense gate" in page and "tiny_choice" in page and "http" not in page.split("<main>")[1]


def test_rows_carry_the_paired_difference_from_dense(done):
    rows = load(done[0])
    task = rows[(rows["role"] == "task") & (rows["metric"] == "low")]
    samples = rows[(rows["role"] == "sample") & (rows["lm_task"] == "tiny_say")]
    for _, line in task.iterrows():
        same_budget = samples["budget_tokens"].fillna(0) == (
            0 if math.isnan(line["budget_tokens"]) else line["budget_tokens"]
        )
        own = samples[(samples["policy"] == line["policy"]) & same_budget]
        assert line["value"] == pytest.approx(own["value"].mean())
        assert line["n"] == len(own) == 4
        if line["policy"] != "full":
            assert line["difference"] == pytest.approx(own["difference"].mean())
            assert line["p_holm"] >= line["p_value"] or math.isnan(line["p_holm"])
        assert line["identical_to_dense"] == own["identical_to_dense"].mean()
    dense = task[task["policy"] == "full"].iloc[0]
    assert dense["density"] == 1 and dense["model_read_fraction"] == 1
    assert (task[task["policy"] != "full"]["density"] < 0.7).all()


def test_the_answers_are_those_of_stock_hflm(done):
    """Dense through the shared kernel, batches and all: the texts of lm-eval's own model."""
    task = task_of(done[1])
    part = task.parts[0]
    lm = HFLM(pretrained=task.loaded.model, tokenizer=task.tokenizer, batch_size=1)
    part.task.set_fewshot_seed(0)
    part.task.build_all_requests(samples=[0, 1, 2, 3])
    stock = lm.generate_until(part.task.instances)
    rows = load(done[0])
    own = rows[(rows["role"] == "sample") & (rows["lm_task"] == "tiny_say")]
    assert list(own[own["policy"] == "full"]["output"]) == stock


def test_what_was_measured_is_not_measured_again(done, monkeypatch):
    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("a prompt was prefilled again")

    monkeypatch.setattr(sparse_eval.prefill, "prefill", refuse)
    task = task_of(done[1])
    again = rows_of(task, done[1])
    assert "loaded" not in task.__dict__, "the model was loaded for nothing"
    assert len(again) == len(load(done[0]))


def test_a_run_that_crashed_goes_on_where_it_stopped(tmp_path, monkeypatch):
    measured: list[tuple[str, str]] = []
    original = cell.Batch.cell

    def counting(batch: Any, arm: Any) -> Any:
        if len(measured) == 4:
            raise KeyboardInterrupt
        measured.append((batch.lm_task, arm.label))
        return original(batch, arm)

    monkeypatch.setattr(cell.Batch, "cell", counting)
    with pytest.raises(KeyboardInterrupt):
        rows_of(task_of(tmp_path, "task.tasks=[tiny_say]"), tmp_path)
    before = len(measured)

    def resuming(batch: Any, arm: Any) -> Any:
        measured.append((batch.lm_task, arm.label))
        return original(batch, arm)

    monkeypatch.setattr(cell.Batch, "cell", resuming)
    rows_of(task_of(tmp_path, "task.tasks=[tiny_say]"), tmp_path)
    # gate: one batch of dense; 4 documents: two batches under 5 arms
    assert before == 4 and len(measured) == 1 + 2 * 5


def test_each_prompt_is_prefilled_once_and_dropped(tmp_path, monkeypatch):
    """Sample-major: all arms answer a batch before the next batch's prompts are prefilled."""
    events: list[str] = []
    prefill, answer = sparse_eval.prefill.prefill, cell.Batch.cell

    def prefilling(*arguments: Any, **options: Any) -> Any:
        events.append("prefill")
        return prefill(*arguments, **options)

    def answering(batch: Any, arm: Any) -> Any:
        rows = answer(batch, arm)
        events.append("arm")
        return rows

    monkeypatch.setattr(sparse_eval.prefill, "prefill", prefilling)
    monkeypatch.setattr(cell.Batch, "cell", answering)
    options = ("task.tasks=[tiny_say]", "task.gate.n=0", "budget=64", "task.batch_size=2")
    rows_of(task_of(tmp_path, *options), tmp_path)
    assert events == ["prefill", "prefill", "arm", "arm", "arm"] * 2


def test_batches_do_not_change_answers(done, tmp_path):
    options = ("task.tasks=[tiny_say]", "task.batch_size=1", "task.gate.n=0", "budget=64")
    alone = rows_of(task_of(tmp_path, *options), tmp_path)
    together = load(done[0])
    together = together[(together["role"] == "sample") & (together["lm_task"] == "tiny_say")]
    together = together[together["budget_tokens"] != 96]
    outputs = [row["output"] for row in alone if row["role"] == "sample"]
    assert outputs == list(together["output"])


def test_the_gate_keeps_a_task_from_being_ranked_and_shows_it(done):
    rows = load(done[0])
    tasks = rows[(rows["role"] == "task") & (rows["policy"] == "window")]
    by_name = tasks[tasks["is_primary"].astype(bool)].groupby("lm_task").first()
    assert not by_name.loc["tiny_always", "gated"]
    gated = by_name.loc["tiny_choice"]
    assert gated["gated"] and gated["verdict"] == "not ranked: dense gate"
    assert math.isnan(gated["p_value"]) and not math.isnan(gated["value"])
    assert gated["chance"] == pytest.approx(1 / 3)
    assert gated["gate_on"] == "own" and gated["gate_n"] == 3


def test_the_gate_uses_the_measured_documents_where_there_are_no_others(tmp_path):
    task = task_of(tmp_path, "task.tasks=[tiny_always]", "task.metadata={num_samples: 5}")
    assert task.parts[0].on == "measured" and not task.parts[0].gate


def test_every_eos_of_the_generation_config_ends_an_answer(done, tmp_path, monkeypatch):
    rows = load(done[0])
    rows = rows[(rows["role"] == "sample") & (rows["lm_task"] == "tiny_say")]
    before = [list(ids) for ids in rows[rows["policy"] == "full"]["output_ids"]]
    task = task_of(tmp_path, "task.tasks=[tiny_say]", "compare=[]", "budget=64")
    ends = [2, before[0][2]]
    monkeypatch.setattr(task.loaded.model.generation_config, "eos_token_id", ends)
    after = [r for r in rows_of(task, tmp_path) if r["role"] == "sample" and r["policy"] == "full"]
    assert after[0]["output_ids"] == before[0][:2] and after[0]["is_over"]
    assert not any(ends[1] in row["output_ids"] for row in after)


def test_a_groups_aggregate_is_lm_evals_own(tmp_path):
    options = ("task.tasks=[tiny_group]", "compare=[]", "budget=64")
    rows = rows_of(task_of(tmp_path, *options), tmp_path)
    groups = [row for row in rows if row["role"] == "group"]
    tasks = [r for r in rows if r["role"] == "task" and r["policy"] == "quest"]
    mean = sum(row["value"] for row in tasks if row["metric"] == "acc") / 2
    (found,) = [row for row in groups if row["policy"] == "quest"]
    assert (found["lm_task"], found["metric"]) == ("tiny_group", "acc")
    assert found["value"] == pytest.approx(mean) and found["n"] == 8
    assert len(groups) == 2


def test_answers_that_are_all_denses_own_at_a_small_budget_are_suspicious(tmp_path):
    task = task_of(tmp_path, "task.tasks=[tiny_say]", "compare=[]", "budget=64", "task.limit=5")
    rows = task._answers(
        task.parts[0],
        task.parts[0].samples,
        arms_of(task.settings)[:1],
        CellStore(tmp_path),
        lambda n: None,
    )
    arms = [Arm("full", None, None), Arm("idle", None, 64)]
    gate: list[list[Any]] = [[]]
    part = replace(task.parts[0], on="none")
    answered = Answered.of(part, arms, [rows[0], rows[0]], gate, task.config, task.side)
    (line,) = suspicions([answered], 256)
    assert "idle at 64 tokens" in line and "suspicious" in line
    assert not list(suspicions([answered], 128))


def test_sampling_and_other_ways_to_decode_are_told_or_refused(tmp_path, capsys):
    task = task_of(tmp_path, "task.tasks=[tiny_say]")
    task.parts[0].task.set_config("generation_kwargs", {"do_sample": True}, update=True)
    task._warn_of(task.parts[0])
    assert "decoded greedily" in capsys.readouterr().out
    with pytest.raises(ValueError, match="num_beams"):
        generation({"num_beams": 4, "max_gen_toks": 5}, task.config, task.side)


def test_the_chat_format_frames_the_prompt_and_is_named(tmp_path):
    options = ("task.tasks=[tiny_say]", "task.chat=template", "model.chat_template=true")
    task = task_of(tmp_path, *options, "task.system=Be brief.", "budget=64", "compare=[]")
    rows = [row for row in rows_of(task, tmp_path) if row["role"] == "sample"]
    ids = list(task.parts[0].samples[0].asks[0].ids)
    assert ids[:1] == [1] and 1 not in ids[1:]
    text = task.tokenizer.decode(ids[1:])
    assert text.startswith("system: Be brief.\nuser: ") and text.endswith("Answer:\nassistant: ")
    assert {len(row["chat"]) for row in rows} == {len("template:") + 8}
    lm = HFLM(pretrained=task.loaded.model, tokenizer=task.tokenizer, batch_size=1)
    found = instances_of(task.parts[0].task, range(4), task.config, task.side)
    assert [row["output"] for row in rows if row["policy"] == "full"] == lm.generate_until(
        [instance for (instance,) in found.values()]
    )


def test_examples_stand_before_the_question_as_lm_eval_puts_them(tmp_path, capsys):
    tasks = "task.tasks=[tiny_shots,se_needle_word]"
    task = task_of(tmp_path, tasks, "task.num_fewshot=2", "task.metadata={max_length: 180}")
    shots, needle = task.parts
    assert len(task.tokenizer.decode(shots.samples[0].asks[0].ids).split("Answer:")) == 2 + 2
    none = task_of(tmp_path, tasks, "task.metadata={max_length: 180}").parts
    assert len(task.tokenizer.decode(none[0].samples[0].asks[0].ids).split("Answer:")) == 2
    assert needle.samples == none[1].samples
    task._warn_of(needle)
    assert "se_needle_word is asked without examples" in capsys.readouterr().out


def test_prompts_that_do_not_fit_are_cut_counted_and_told(tmp_path, capsys):
    rows = rows_of(task_of(tmp_path, "task.tasks=[tiny_say]", "task.max_length=165"), tmp_path)
    (dense,) = [
        r for r in rows if r["role"] == "task" and r["metric"] == "low" and r["policy"] == "full"
    ]
    samples = [r for r in rows if r["role"] == "sample" and r["policy"] == "full"]
    cut = [r for r in samples if r["truncated"]]
    assert 0 < len(cut) < 4 or len(cut) == 4
    assert dense["truncated"] == len(cut) > 0
    assert max(r["prompt_tokens"] for r in samples) == 165 - 12
    assert "cut from the left" in capsys.readouterr().out
    strict = task_of(tmp_path, "task.tasks=[tiny_say]", "task.max_length=165", "task.strict=true")
    with pytest.raises(SharedFailed, match="task.strict"):
        rows_of(strict, tmp_path)


def test_the_question_is_sparse_too(done, tmp_path):
    task = task_of(tmp_path, "task.tasks=[tiny_say]", "protocol=question")
    rows = [r for r in rows_of(task, tmp_path) if r["role"] == "sample"]
    asks = [sample.asks[0] for sample in task.parts[0].samples]
    ends = [task.tokenizer.decode(ask.ids[ask.num_cached :]) for ask in asks]
    assert all(end.endswith("Answer:") and end.startswith("\nWhat is") for end in ends)
    dense = {r["sample"]: r["output"] for r in rows if r["policy"] == "full"}
    before = load(done[0])
    before = before[(before["lm_task"] == "tiny_say") & (before["role"] == "sample")]
    same = before[before["policy"] == "full"].set_index("sample")["output"]
    assert dense == dict(same)
    window = {r["sample"]: r["output"] for r in rows if r["policy"] == "window"}
    old = before[(before["policy"] == "window") & (before["budget_tokens"] == 96)]
    assert window != dict(old.set_index("sample")["output"])


def test_contexts_shorter_than_a_policys_window(tmp_path):
    """Five bytes before the first question, the first of whose tokens already selects."""
    options = ("task.tasks=[tiny_say,tiny_choice]", "protocol=question", "policy=snapkv")
    short = ("task.metadata={max_length: 5}", "page_size=4", "budget=24", "task.gate.n=0")
    task = task_of(tmp_path, *options, *short)
    assert min(sample.asks[0].num_cached for sample in task.parts[0].samples) < 10
    rows = [row for row in rows_of(task, tmp_path) if row["policy"] == "snapkv"]
    assert len([row for row in rows if row["role"] == "sample"]) == 2 * 4
    assert all(0.2 < row["density"] < 0.95 for row in rows if row["role"] == "task")


@pytest.mark.parametrize("compare", ["[]", "[full]"])
def test_dense_alone_is_a_run_too(tmp_path, compare, capsys):
    options = ("task.tasks=[tiny_say,tiny_choice]", "policy=full", f"compare={compare}")
    run(settings_of(tmp_path / "cache", *options), tmp_path / "run", ["task=lm_eval"])
    (headline,) = json.loads((tmp_path / "run" / "summary.json").read_text())["headline"]
    assert [line["policy"] for line in headline["table"]] == ["full"]
    assert [line["verdict"] for line in headline["tasks"]] == ["dense", "dense"]
    assert "tiny_choice" in (tmp_path / "run" / "report.html").read_text()
    assert "full all" in capsys.readouterr().out


def test_two_runs_are_compared_by_which_way_a_score_is_better(done):
    rows = load(done[0])
    here = rows[(rows["policy"] == "window") & (rows["lm_task"] == "tiny_say")]
    better = here.assign(value=here["value"] + 1)
    (*_, line) = compare(here, better, {}, {}).results["better"]
    assert line == "B"
    flags = here["higher_is_better"].where(here["role"] != "task", False)
    turned = here.assign(higher_is_better=flags)
    (*_, line) = compare(turned, better, {}, {}).results["better"]
    assert line == "A"


@pytest.mark.parametrize(
    ("process", "told"),
    [
        (lambda doc, results: {"low": 1 / 0}, "ZeroDivisionError in <lambda>: division by zero"),
        (lambda doc, results: {"low": "good"}, "TypeError in mean"),
        (lambda doc, results: {}, "has no metric that is a number"),
    ],
)
def test_what_a_tasks_own_scoring_raises_names_the_task(tmp_path, process, told):
    task = task_of(tmp_path, "task.tasks=[tiny_say]", "compare=[]", "budget=64", "task.gate.n=0")
    task.parts[0].task.config.process_results = process
    with pytest.raises(SharedFailed, match=f"^lm-eval task tiny_say .*{told}") as caught:
        rows_of(task, tmp_path)
    assert "\n" not in str(caught.value)


def test_more_examples_than_there_are_documents_name_the_task(tmp_path):
    with pytest.raises(SharedFailed, match="tiny_shots cannot make its prompts: ValueError in"):
        task_of(tmp_path, "task.tasks=[tiny_shots]", "task.num_fewshot=500").parts  # noqa: B018


def test_a_chance_that_is_no_number_names_the_task(tmp_path):
    given = "task.metadata={max_length: 140, chance: high}"
    with pytest.raises(SharedFailed, match="tiny_say: metadata chance must be .* got 'high'"):
        task_of(tmp_path, "task.tasks=[tiny_say]", given).parts  # noqa: B018


def test_prompts_that_are_others_each_time_are_told(tmp_path):
    task = task_of(tmp_path, "task.tasks=[tiny_say]", "compare=[]", "budget=64", "task.gate.n=0")
    numbers = itertools.count()
    task.parts  # noqa: B018  (made once)
    task.parts[0].task.config.doc_to_text = lambda doc: f"{doc['context']} {next(numbers)}"
    with pytest.raises(SharedFailed, match="^lm-eval task tiny_say makes another prompt each time"):
        rows_of(task, tmp_path)


def test_a_task_without_documents_says_so(tmp_path):
    given = "task.metadata={max_length: 140, num_samples: 0}"
    with pytest.raises(SharedFailed, match="task tiny_say has no documents"):
        task_of(tmp_path, "task.tasks=[tiny_say]", given).parts  # noqa: B018


def test_tasks_without_a_question_of_their_own_need_its_length(tmp_path):
    task = task_of(tmp_path, "task.tasks=[tiny_plain]", "protocol=question")
    with pytest.raises(SharedFailed, match="protocol.question_tokens=K"):
        rows_of(task, tmp_path)
    given = "protocol.question_tokens=5"
    task = task_of(tmp_path, "task.tasks=[tiny_plain]", "protocol=question", given)
    assert {sample.asks[0].tail for sample in task.parts[0].samples} == {5}


def test_a_cut_prompt_keeps_its_question_and_some_context(tmp_path):
    for words in (["task.max_length=36"], ["task.max_length=90", "protocol.question_tokens=100"]):
        task = task_of(tmp_path, "task.tasks=[tiny_say]", "protocol=question", *words)
        with pytest.raises(SharedFailed, match="no context left before its"):
            task.parts  # noqa: B018


def test_a_limit_for_a_task_that_is_not_run_is_an_error(tmp_path):
    told = "tiny_choise is not one of the tasks: tiny_always, tiny_choice; did you mean tiny_choice"
    for key in ("task.limit", "task.gate.floors"):
        with pytest.raises(ValueError, match=f"{key}: {told}"):
            settings_of(tmp_path, "task.tasks=[tiny_group]", f"{key}={{tiny_choise: 2}}")


def test_a_hub_task_without_a_network_fails_at_once(tmp_path, monkeypatch):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(suite, "is_reachable", lambda: False)
    started = time.perf_counter()
    with pytest.raises(SharedFailed, match="cannot be reached; suite=offline needs none") as caught:
        rows_of(task_of(tmp_path, "task.tasks=[tiny_hub]"), tmp_path)
    assert time.perf_counter() - started < 5 and "\n" not in str(caught.value)


def test_rolling_likelihoods_are_refused(tmp_path):
    with pytest.raises(SharedFailed, match="loglikelihood_rolling"):
        rows_of(task_of(tmp_path, "task.tasks=[tiny_rolling]"), tmp_path)


def test_the_plan_counts_what_is_left_to_do(done, tmp_path):
    fresh, again = (cost_of(settings_of(place), MACHINE) for place in (tmp_path, done[1]))
    cells = 3 * (4 * 5 + 3)
    assert (fresh.cells, fresh.cells_cached, fresh.prefills) == (cells, 0, 3 * 7)
    assert (again.cells, again.cells_cached, again.prefills) == (cells, cells, 0)
    assert fresh.seconds and fresh.fewest_seconds and again.seconds == 0
    assert fresh.fewest_seconds < fresh.seconds


def test_wandb_gets_every_task_and_the_mean(done):
    columns = {name for table, _ in curve_tables(load(done[0])) for name in table}
    assert {"lm_eval/mean/score", "lm_eval/tiny_say/low", "lm_eval/tiny_choice/acc"} <= columns


def test_runs_that_share_cells_keep_their_own_labels(done, tmp_path):
    task = task_of(done[1], "context=300", "seed=1", "task.tasks=[tiny_say]")
    rows = [row for rows in task.run(CellStore(done[1])) for row in rows]
    assert "loaded" not in task.__dict__, "the same prompts were answered again"
    assert {(row["context"], row["seed"]) for row in rows} == {(300, 1)}
    old = set(load(done[0])["cell_key"])
    assert not old & {row["cell_key"] for row in rows}
