"""Live tasks as whole runs: what the folder holds, what the plan counts, what W&B would get."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from sparse_eval.app import register_resolvers, run
from sparse_eval.cli.compose import Composer
from sparse_eval.cli.kits import KITS
from sparse_eval.cli.machine import Machine
from sparse_eval.cli.plan import cost_of
from sparse_eval.cli.settings import resolve
from sparse_eval.report import write_report
from sparse_eval.results import CellStore, load
from sparse_eval.storage.table import frame_of
from sparse_eval.tracking.curves import curve_tables
from tests.needle_rows import needle_run

MACHINE = Machine(flops=1e9, bytes_per_second=1e9, norm_seconds=1e-5)
TINY = ["model=tiny_llama", "dense_layers=[0]", "budget=[64,96]", "compare=[window]"]
RUNS = {
    "needle": ["context=500", "task.max_new_tokens=7", "task.depths=[0.5]", "prompts.n=2"],
    "fidelity": ["context=300", "prompts.n=2", "task.steps=6", "task.short_window=60"],
}


def settings_of(task: str, cache: Path, *more: str) -> Any:
    register_resolvers()
    return resolve(Composer(), [f"task={task}", *TINY, *RUNS[task], f"cache_dir={cache}", *more])


@pytest.fixture(scope="module", params=RUNS)
def done(request, tmp_path_factory) -> tuple[str, Path, Path]:
    root = tmp_path_factory.mktemp(request.param)
    run(settings_of(request.param, root / "cache"), root / "run", [f"task={request.param}"])
    return request.param, root / "run", root / "cache"


def test_a_run_leaves_rows_samples_summary_pictures_and_a_page(done):
    task, folder, _ = done
    rows = load(folder)
    assert set(rows["task"]) == {task}
    samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    assert len(samples) == 2 * 5
    keys = {"sample", "prompt_hash", "policy", "output_ids"}
    keys.add("dense_output" if task == "needle" else "dense_output_ids")
    assert all(keys <= set(sample) for sample in samples)
    summary = json.loads((folder / "summary.json").read_text())
    (headline,) = summary["headline"]
    assert {line["policy"] for line in headline["table"]} == {"full", "quest", "window"}
    assert summary["config"]["task"]["name"] == task and summary["provenance"]["torch"]
    assert list((folder / "plots").glob(f"{task}*.png"))
    page = (folder / "report.html").read_text()
    assert "data:image/png" in page and "protocol decode" in page or task == "fidelity"
    assert "noise floor: stock SDPA" in page


def test_a_page_can_be_made_again_from_the_rows(done):
    _, folder, _ = done
    before = (folder / "report.html").stat().st_size
    assert abs(write_report(folder).stat().st_size - before) < 2000


def test_the_plan_counts_what_is_left_to_do(done, tmp_path):
    task, _, cache = done
    fresh, again = (cost_of(settings_of(task, place), MACHINE) for place in (tmp_path, cache))
    assert (fresh.cells, fresh.cells_cached, fresh.prefills) == (10, 0, 2)
    assert (again.cells, again.cells_cached, again.prefills) == (10, 10, 0)
    assert fresh.seconds and fresh.fewest_seconds and again.seconds == 0
    assert fresh.fewest_seconds <= fresh.seconds
    assert (fresh.fewest_seconds == fresh.seconds) == (task == "fidelity")
    more = cost_of(settings_of(task, cache, "budget=[64,96,128]"), MACHINE)
    assert (more.cells, more.cells_cached, more.prefills) == (14, 10, 2)


def test_the_plan_counts_gate_samples(tmp_path):
    settings = settings_of("needle", tmp_path, "task.gate.n=6")
    cost = cost_of(settings, MACHINE)
    assert (cost.cells, cost.prefills) == (10 + 6, 2 + 6)
    work = KITS["needle"].task(settings, None).work(CellStore(tmp_path))  # type: ignore
    assert (work.fewest_steps, work.steps) == (16 * 6, 16 * 7)  # a value has some 6 tokens


def test_wandb_gets_every_tasks_curves(done):
    task, folder, _ = done
    ((table, setting),) = curve_tables(load(folder))
    assert setting in ("", " [multikey 500]")
    assert {f"{task}/model_read_fraction", f"{task}/tokens_read"} & set(table.columns)
    assert table[f"{task}/model_read_fraction"].notna().all()


def test_wandb_tells_contexts_and_kinds_apart():
    rows = frame_of(needle_run(n=1, contexts=[1024, 2048], depths=[0.5]))
    tables = {setting: table for table, setting in curve_tables(rows)}
    assert list(tables) == [" [passcode 1024]", " [passcode 2048]"]
    assert not any(math.isnan(t["needle/correct"].iloc[0]) for t in tables.values())
