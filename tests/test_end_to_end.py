"""The command line, from key=value words to a run folder: tiny models and the embedded one."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest

from sparse_eval import load
from sparse_eval.reporting.summarise import summarise_recall
from sparse_eval.results import COMMON_COLUMNS, RECALL_COLUMNS

TINY = ["model=tiny_llama", "context=200", "prompts.n=2", "task.steps=8", "task.prompt_queries=32"]


def run(folder: Path, *words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "sparse_eval", *words],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**_environment(), "PYTHONPATH": str(Path(__file__).parent.parent)},
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done


def _environment() -> dict[str, str]:
    import os

    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    return env | {"HF_HUB_OFFLINE": "1"}


def run_folder(root: Path) -> Path:
    (folder,) = {path.parent for path in root.glob("outputs/*/*/rows.jsonl")}
    return folder


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[Path, str]:
    root = tmp_path_factory.mktemp("run")
    done = run(root, *TINY, "budget=[64,96]", "compare=[oracle,window,random,full,snapkv]")
    return root, done.stdout


def test_a_run_says_what_runs_and_leaves_a_folder_that_explains_itself(finished):
    root, printed = finished
    folder = run_folder(root)
    for word in ("tiny Llama", "float32", "torch backend", "64, 96 tokens", "report.html"):
        assert word in printed
    names = {path.name for path in folder.iterdir()}
    expected = {"rows.jsonl", "rows.parquet", "summary.json", "plots", "report.html", "run.log"}
    assert expected | {".hydra"} <= names
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["provenance"]["torch"] and summary["config"]["context"] == 200
    assert len(summary["replay_error"]) == 2
    assert all(error < 1e-5 for error in summary["replay_error"].values())
    worst = max(summary["replay_error"].values())
    assert f"{worst:.1e} apart (relative L2, worst layer and prompt)" in printed
    began, ended = (
        datetime.fromisoformat(text)
        for text in (summary["provenance"]["started"], summary["finished"])
    )
    assert abs((ended - began).total_seconds() - summary["wall_seconds"]) <= 2
    assert "Traceback" not in (folder / "run.log").read_text()


def test_every_row_has_every_column(finished):
    rows = load(str(finished[0] / "outputs/**"))
    assert set(COMMON_COLUMNS) | set(RECALL_COLUMNS) <= set(rows)
    # 2 prompts x 6 policies x 2 budgets x 3 layers x 2 KV heads
    assert len(rows) == 2 * 6 * 2 * 3 * 2
    assert rows["sample"].nunique() == rows["prompt_hash"].nunique() == 2
    assert rows["cell_key"].nunique() == 2 * 6 * 2


def test_the_second_run_measures_nothing_and_loads_no_model(finished):
    root, _ = finished
    before = set((root / "outputs/cache/cells").iterdir())
    done = run(root, *TINY, "budget=[64,96]", "name=again")
    assert set((root / "outputs/cache/cells").iterdir()) == before
    assert "prefill, prompt" not in done.stdout and "loading" not in done.stdout
    assert "apart (relative L2, worst layer and prompt)" in done.stdout


def test_a_failing_run_exits_with_1_and_keeps_its_traceback(tmp_path):
    (tmp_path / "greedy.py").write_text(
        "from sparse_eval.policies.window import Window\n\n"
        "class Twice(Window):\n"
        "    def select(self, call, state, budget):\n"
        "        return super().select(call, state, 2 * budget)\n"
    )
    words = [*TINY, "budget=64", "compare=[]", "policy=external", "policy.target=greedy.Twice"]
    done = run(tmp_path, *words, code=1)
    assert "error: ValueError: Twice read 127 tokens in one KV head and step" in done.stderr
    assert "Traceback" not in done.stderr
    log = next(tmp_path.glob("outputs/*/*/run.log")).read_text()
    assert "Traceback" in log


def test_a_killed_run_keeps_every_finished_cell(finished, tmp_path):
    from sparse_eval.storage.journal import Journal

    folder = next(finished[0].glob("outputs/recall/*"))
    torn = tmp_path / "rows.jsonl"
    whole = (folder / "rows.jsonl").read_bytes()
    torn.write_bytes(whole[: len(whole) * 2 // 3])
    rows = Journal.read(torn)
    assert 0 < len(rows) < 144 and all(row["mass_recall"] > 0 for row in rows)


def test_a_sweep_runs_every_job_and_each_has_its_own_folder(tmp_path):
    words = ["-m", *TINY[:2], "prompts.n=1", "task.steps=4", "policy=quest,window", "compare=[]"]
    run(tmp_path, *words, "budget=64,96", "sweep.pack=[]")
    folders = {path.parent for path in tmp_path.glob("outputs/recall/*/*/rows.jsonl")}
    assert len(folders) == 4
    rows = load(str(tmp_path / "outputs/**"))
    cells = rows.groupby(["policy", "budget_tokens"]).size()
    assert len(cells) == 4


def test_plan_loads_nothing_and_names_what_cannot_run(finished):
    root, _ = finished
    done = run(root, "-m", *TINY, "budget=64,16", "plan=true")
    assert "infeasible" in done.stdout and "budget must be >= 48" in done.stdout
    assert not list(root.glob("outputs/*/*/rows.jsonl.partial"))


@pytest.mark.parametrize("task", ["recall", "needle", "fidelity"])
def test_every_task_with_a_model_can_be_planned(tmp_path, task):
    done = run(tmp_path, "model=tiny_llama", f"task={task}", "context=600", "plan=true")
    assert "infeasible" not in done.stdout and "MiB" in done.stdout


@pytest.mark.embedded
def test_the_embedded_model_orders_the_policies_as_expected(tmp_path):
    words = ["model=smollm2", "context=2048", "prompts.n=1", "task.steps=16", "budget=256"]
    run(tmp_path, *words, "compare=[full,oracle,window,random]")
    table = summarise_recall(load(str(tmp_path / "outputs/**"))).set_index("policy")
    recall = table["recall"]
    assert recall["full"] == pytest.approx(1, abs=1e-5)
    assert recall["oracle"] > recall["quest"] > recall["window"] > recall["random"]
    summary = json.loads((run_folder(tmp_path) / "summary.json").read_text())
    assert summary["replay_error"]["0"] < 1e-5


@pytest.mark.embedded
def test_full_through_our_attention_generates_the_embedded_models_tokens(tmp_path):
    import torch
    import yaml

    from sparse_eval import patched
    from sparse_eval.inputs.store import user_cache
    from sparse_eval.models import load_model
    from sparse_eval.policies.full import Full
    from tests.tiny import CONF

    cfg = yaml.safe_load((CONF / "model" / "smollm2.yaml").read_text())
    loaded = load_model(cfg, device="cpu", dtype=torch.float32, model_cache=user_cache())
    text = "def fibonacci(n):\n    # returns the n-th Fibonacci number\n"
    ids = loaded.tokenizer(text, return_tensors="pt").input_ids
    options = {"max_new_tokens": 24, "do_sample": False}
    stock = loaded.model.generate(ids, **options)
    with patched(loaded.model, Full()):
        ours = loaded.model.generate(ids, **options)
    assert torch.equal(stock, ours)
