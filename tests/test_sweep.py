"""Sweeps on a tiny model: packed jobs, failures, resuming, what the end of a sweep leaves."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from sparse_eval import __main__, load
from sparse_eval.app import notes_on_budgets, short_name
from sparse_eval.cli.compose import Composer
from sparse_eval.cli.failure import Stopped
from sparse_eval.cli.pack import pack
from sparse_eval.cli.settings import resolve
from sparse_eval.storage import keep

TINY = [
    "model=tiny_llama",
    "context=200",
    "prompts.n=1",
    "task.steps=4",
    "task.prompt_queries=16",
]
CHEAP = [*TINY, "compare=[]"]
BROKEN = """
from dataclasses import dataclass
from sparse_eval.policies.window import Window

@dataclass(frozen=True)
class Breaks(Window):
    def select(self, call, state, budget):
        raise RuntimeError("this policy breaks")
"""


@pytest.fixture
def go(tmp_path, monkeypatch):
    """Runs the command line in this process. Returns its exit code."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    keep.forget_captures()
    monkeypatch.setattr("plotly.offline.get_plotlyjs", lambda: "/* plotly */")
    monkeypatch.setattr("sparse_eval.report.draw", lambda rows, folder: [])

    def run(*words: str) -> int:
        monkeypatch.setattr(sys, "argv", ["sparse_eval", *words])
        try:
            __main__.main()
        except SystemExit as end:
            return int(end.code or 0)
        return 0

    return run


@pytest.fixture
def unchecked(monkeypatch):
    """Inputs that become bad after they were looked at, or on another machine."""
    monkeypatch.setattr("sparse_eval.cli.preflight.check_inputs", lambda settings: None)


def folders(root: Path, name: str = "recall") -> list[Path]:
    """Run and sweep folders, the oldest first."""
    return sorted((root / "outputs" / name).iterdir(), key=lambda path: path.stat().st_mtime)


def measured(folder: Path) -> pd.DataFrame:
    """The rows without what differs between two measurements of the same."""
    rows = load(folder).drop(columns=["seconds", "peak_memory"])
    keys = ["policy", "budget_tokens", "sample", "layer", "kv_head"]
    return rows.sort_values(keys, ignore_index=True)


def packed(*words: str) -> list[str]:
    return pack(Composer(), [*TINY[:2], *words])[2:]


def test_jobs_of_latency_are_not_packed():
    words = ["task=latency", "budget=64,128"]
    assert packed(*words) == words
    assert packed("task=recall,latency", "budget=64,128") == ["task=recall,latency", words[1]]
    with pytest.raises(ValueError, match=r"takes one budget, got \[64,128\]; for several: -m bud"):
        resolve(Composer(), ["task=latency", "budget=[64,128]"])


def test_policies_and_budgets_become_one_job():
    assert packed("policy=quest,window,random", "budget=64,96", "compare=[oracle]") == [
        "policy=quest",
        "budget=[64,96]",
        "compare=[window,random,oracle]",
    ]
    assert packed("budget=64,[96,128]") == ["budget=[64,96,128]"]
    assert packed("policy=quest,window", "seed=0,1")[1:] == [
        "seed=0,1",
        "compare=[window,oracle,random]",
    ]


def test_what_cannot_share_a_job_stays_a_sweep():
    words = ["policy=quest,mean_std", "policy.page_size=16"]
    assert packed(*words) == words  # a field of the main policy is not one of the compared
    words = ["policy=quest,window", "budget=64,96", "sweep.pack=[]"]
    assert packed(*words) == words
    words = ["policy=quest,window", "compare=[],[random]"]
    assert packed(*words) == words


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("sweep.pack=[context]", "sweep.pack must be a list of policy and budget"),
        ("sweep.pack=policy", "sweep.pack must be a list of policy and budget"),
        ("sweep.pack=[[policy]]", "sweep.pack must be a list of policy and budget"),
        ("sweep.pack=[budget],[policy]", "how jobs are packed cannot be swept"),
        ("sweep=null", "sweep must hold its keys"),
    ],
)
def test_what_cannot_be_packed_is_one_line(capsys, go, word, told):
    assert go("-m", *TINY, "budget=64,96", word) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert told in line


def test_a_packed_sweep_measures_what_the_unpacked_one_does(go, tmp_path):
    words = ["-m", *TINY, "policy=quest,window", "budget=64,96", "compare=[random]"]
    assert go(*words, "cache_dir=one") == 0
    assert go(*words, "cache_dir=two", "sweep.pack=[budget]") == 0
    one, two = (measured(folder) for folder in folders(tmp_path))
    pd.testing.assert_frame_equal(one, two)
    jobs = [len(list(folder.glob("*/summary.json"))) for folder in folders(tmp_path)]
    assert jobs == [1, 2]


def test_a_sweep_loads_the_model_and_captures_each_prompt_once(go, tmp_path, monkeypatch):
    keep.release()
    calls: list[str] = []
    for place, name in (
        ("storage.keep", "load_model"),
        ("record", "record"),
        ("prefill", "prefill"),
    ):
        original = getattr(__import__(f"sparse_eval.{place}", fromlist=[name]), name)

        def counted(*a: Any, _do: Any = original, _name: str = name, **k: Any) -> Any:
            calls.append(_name)
            return _do(*a, **k)

        monkeypatch.setattr(f"sparse_eval.{place}.{name}", counted)
    words = ["-m", *CHEAP, "budget=64", "sink_pages=1,2"]
    assert go(*words) == 0
    assert sorted(calls) == ["load_model", "prefill", "record"]
    calls.clear()
    keep.release()
    assert go(*words) == 0
    assert calls == []  # every cell is known: no model at all
    first, again = folders(tmp_path)
    pd.testing.assert_frame_equal(load(first), load(again))


def test_a_sweep_leaves_one_table_one_page_and_its_failures(go, tmp_path):
    assert go("-m", *CHEAP, "budget=64,96", "seed=0,1") == 0
    [folder] = folders(tmp_path)
    names = {path.name for path in folder.iterdir() if path.is_file()}
    assert names == {"rows.parquet", "report.html", "failures.json", "multirun.yaml"}
    assert json.loads((folder / "failures.json").read_text()) == []
    for job in folder.glob("[01]_*"):
        files = {path.name for path in job.iterdir()}
        assert files == {"rows.jsonl", "rows.parquet", "summary.json", "run.log", ".hydra"}
    assert set(load(folder / "rows.parquet")["budget_tokens"]) == {64, 96}


def test_a_text_that_is_too_short_is_told_once_whatever_the_policies(
    go, tmp_path, capsys, unchecked
):
    text = tmp_path / "text.txt"
    text.write_text("many words " * 40)
    words = ["context=4000", "prompts=file", f"prompts.path={text}", "prompts.n=1"]
    run = ["model=tiny_llama", *words, "policy=quest", "compare=[window,random]", "budget=[64,96]"]
    assert go(*run) == 1
    said = capsys.readouterr()
    assert (said.out + said.err).count("the text is too short") == 1
    assert go("-m", *run[:-1], "budget=64,96") == go("-m", *run[:-1], "budget=64,96") == 1
    sweep = folders(tmp_path)[-1]
    [failure] = json.loads((sweep / "failures.json").read_text())
    assert "retry_failed=true tries again" in failure["error"]  # known: nothing was tried


@pytest.fixture
def breaks(tmp_path, monkeypatch):
    (tmp_path / "breaking.py").write_text(BROKEN)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("breaking", None)


def test_a_failing_job_lets_the_others_finish(go, tmp_path, capsys, unchecked):
    text = tmp_path / "text.txt"
    text.write_text("many words " * 40)
    words = ["-m", "model=tiny_llama", *CHEAP[2:], "budget=64", "prompts=file"]
    assert go(*words, f"prompts.path={text}", "context=200,4000,150") == 1
    [folder] = folders(tmp_path)
    [failure] = json.loads((folder / "failures.json").read_text())
    assert failure["job"] == 1 and "context=4000" in failure["overrides"]
    assert failure["traceback"].startswith("Traceback")
    assert set(load(folder)["context"]) == {150, 200}
    assert (folder / "report.html").exists()
    told = capsys.readouterr().err
    assert "failed    job 1" in told and "Traceback" not in told


def test_a_policy_that_breaks_costs_only_its_own_cells(go, tmp_path, breaks, capsys):
    words = ["policy=external", "policy.target=breaking.Breaks", "compare=[window,random]"]
    sweep = ["-m", *TINY, *words, "budget=64,96"]
    assert go(*sweep) == 1
    [folder] = folders(tmp_path)
    rows = load(folder)
    assert set(rows["policy"]) == {"window", "random"} and not rows.duplicated("cell_key").all()
    assert len(rows) == 2 * 2 * 3 * 2
    [failure] = json.loads((folder / "failures.json").read_text())
    assert [part["part"] for part in failure["parts"]] == [
        "Breaks at 64 tokens",
        "Breaks at 96 tokens",
    ]
    capsys.readouterr()
    assert go(*sweep) == 1  # known to fail: not tried again, still told
    assert "retry_failed=true tries again" in capsys.readouterr().err
    (tmp_path / "breaking.py").write_text(
        BROKEN.replace("raise", "return super().select(call, state, budget)  #")
    )
    sys.modules.pop("breaking", None)
    assert go(*sweep) == 0  # other code: another job
    assert "Breaks" in set(load(folders(tmp_path)[-1])["policy"])


def test_two_policies_that_break_leave_the_others_measured(go, tmp_path, breaks):
    words = ["policy=external", "policy.target=breaking.Breaks", "budget=[64,96]"]
    assert go(*TINY, *words, "compare=[]") == 1
    assert go(*TINY, *words, "compare=[window]") == 1
    assert set(load(folders(tmp_path)[-1])["policy"]) == {"window"}


def test_what_failed_is_tried_again_when_asked(go, tmp_path, monkeypatch, capsys):
    from sparse_eval.evaluator import Evaluator

    cell = Evaluator.cell
    tries = []

    def failing(self, policy, budget):
        tries.append(budget)
        raise RuntimeError("flaky")

    monkeypatch.setattr(Evaluator, "cell", failing)
    sweep = ["-m", *CHEAP, "budget=64"]
    assert go(*sweep) == go(*sweep) == 1
    assert tries == [64]
    monkeypatch.setattr(Evaluator, "cell", cell)
    assert go(*sweep, "retry_failed=true") == 0


def test_a_damaged_capture_is_made_again(go, tmp_path, capsys):
    assert go(*CHEAP, "budget=64") == 0
    [path] = (tmp_path / "outputs/cache/captures").glob("*.safetensors")
    path.write_bytes(path.read_bytes()[:-100])
    keep.release()
    assert go(*CHEAP, "budget=96") == 0
    assert "capturing again" in capsys.readouterr().out.replace("\n", " ")


def test_a_damaged_cell_is_measured_again(go, tmp_path):
    assert go(*CHEAP, "budget=64") == 0
    [cell] = (tmp_path / "outputs/cache/cells").iterdir()
    cell.write_bytes(cell.read_bytes()[:50])
    with pytest.warns(UserWarning, match="damaged cell .* discarded"):
        assert go(*CHEAP, "budget=64") == 0
    first, again = (measured(folder) for folder in folders(tmp_path))
    pd.testing.assert_frame_equal(first, again)


@pytest.mark.parametrize("cache", ["file/cache", "l" * 300])
def test_a_cache_that_cannot_be_written_costs_nothing_measured(go, tmp_path, capsys, cache):
    (tmp_path / "file").write_text("not a folder")
    assert go(*CHEAP, "budget=[64,96]", f"cache_dir={cache}", "prompts.n=2") == 0
    told = capsys.readouterr().out
    assert told.count("cells are not kept") == 1 and told.count("capture not kept") == 1
    assert len(load(folders(tmp_path)[0])) == 2 * 2 * 3 * 2


def test_a_budget_that_covers_the_context_is_noted(go, capsys):
    assert go(*CHEAP, "budget=[64,4000]") == 0
    told = " ".join(capsys.readouterr().out.split())
    assert told.count("note: budget=4000 covers the context of 200 tokens and its 4 decode") == 1
    assert "budget=64 c" not in told


@pytest.mark.parametrize(
    ("words", "notes"),
    [
        (("budget=200",), 0),
        (("budget=203",), 0),
        (("budget=204",), 1),
        (("budget=0.999",), 0),
        (("task=needle", "budget=200", "task.max_new_tokens=8"), 0),
        (("task=needle", "budget=208", "task.max_new_tokens=8"), 1),
        (("task=needle", "budget=263"), 0),
    ],
)
def test_only_a_budget_that_no_decode_step_outgrows_is_noted(words, notes):
    tiny = [
        "model=tiny_llama",
        "context=200",
        *(() if "task=needle" in words else ["task.steps=4"]),
    ]
    assert len(notes_on_budgets(resolve(Composer(), [*tiny, *words]))) == notes


def test_a_full_disk_is_one_line_and_keeps_what_was_measured(go, tmp_path, capsys, monkeypatch):
    from sparse_eval.storage import journal

    written = []

    def no_space(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    def full(descriptor: int) -> None:
        written.append(descriptor)
        if len(written) > 1:
            no_space()

    monkeypatch.setattr(journal.os, "fsync", full)
    monkeypatch.setattr("sparse_eval.storage.cells.write_atomic", lambda *_: None)
    monkeypatch.setattr("sparse_eval.capture.save_file", no_space)
    assert go(*CHEAP, "budget=[64,96,128]") == 1
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
    assert lines == ["error: OSError: [Errno 28] No space left on device"]
    assert len(load(folders(tmp_path)[0])) == 3 * 2


def test_outputs_without_room_are_one_line_before_anything_runs(go, tmp_path, capsys, monkeypatch):
    class Full(io.BytesIO):
        def write(self, data: Any) -> int:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr("sparse_eval.app.tempfile.TemporaryFile", lambda dir: Full())
    assert go(*CHEAP, "budget=64") == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: outputs/recall cannot be written") and "No space" in line
    assert not list((tmp_path / "outputs/recall").iterdir())


def test_an_outputs_folder_that_cannot_be_written_is_one_line(go, tmp_path, capsys):
    (tmp_path / "outputs").write_text("not a folder")
    assert go(*CHEAP, "budget=64") == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: outputs/recall cannot be written")


def test_a_missing_parquet_is_made_from_the_journal(go, tmp_path):
    assert go("-m", *CHEAP, "budget=64,96") == 0
    [folder] = folders(tmp_path)
    before = load(folder)
    for path in folder.rglob("rows.parquet"):
        path.unlink()
    from sparse_eval.report import main

    assert main([str(folder)]) == 0
    pd.testing.assert_frame_equal(load(folder / "rows.parquet"), before)


def test_a_stop_while_the_report_is_made_is_a_stop(go, tmp_path, capsys, monkeypatch):
    def stopped(*_: Any) -> None:
        raise Stopped(signal.SIGTERM)

    monkeypatch.setattr("sparse_eval.report.draw", stopped)
    assert go("-m", *CHEAP, "budget=64,96") == 143
    assert "stopped by SIGTERM; every finished cell is kept" in capsys.readouterr().err
    assert len(load(folders(tmp_path)[0])) == 2 * 3 * 2


def test_a_sweep_whose_report_fails_is_one_line_and_keeps_its_rows(
    go, tmp_path, capsys, monkeypatch
):
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("sparse_eval.report.draw", full)
    assert go("-m", *CHEAP, "budget=64,96") == 1
    said = capsys.readouterr()
    [line] = [line for line in said.err.splitlines() if line.startswith("error")]
    assert "its rows are kept" in line and "Traceback" not in said.out + said.err
    assert len(load(folders(tmp_path)[0])) == 2 * 3 * 2


def test_a_job_that_runs_again_in_its_folder_forgets_how_it_ended(go, tmp_path, monkeypatch):
    from sparse_eval.evaluator import Evaluator

    cell = Evaluator.cell
    monkeypatch.setattr(Evaluator, "cell", lambda *_: 1 / 0)
    sweep = ["-m", *CHEAP, "budget=64", "hydra.sweep.dir=here"]
    assert go(*sweep) == 1
    monkeypatch.setattr(Evaluator, "cell", cell)
    assert go(*sweep, "retry_failed=true") == 0
    assert json.loads((tmp_path / "here/failures.json").read_text()) == []


@pytest.mark.parametrize("damage", ["", "[]", "{}", "null", '{"error": 1, "when": 2}'])
def test_a_damaged_note_of_a_failure_is_no_note(go, tmp_path, monkeypatch, damage):
    from sparse_eval.evaluator import Evaluator

    cell = Evaluator.cell
    monkeypatch.setattr(Evaluator, "cell", lambda *_: 1 / 0)
    assert go("-m", *CHEAP, "budget=64") == 1
    [note] = (tmp_path / "outputs/cache/failures").iterdir()
    note.write_text(damage)
    monkeypatch.setattr(Evaluator, "cell", cell)
    assert go("-m", *CHEAP, "budget=64") == 0


def test_names_beyond_ascii_and_long_ones_are_folders(go, tmp_path):
    folder = tmp_path / "own" / "policy"
    folder.mkdir(parents=True)
    shutil.copy(Path(__file__).parent.parent / "conf/policy/window.yaml", folder / "größe.yaml")
    words = ["--config-dir", str(tmp_path / "own"), "policy='größe',quest", "name='漢字'"]
    assert go("-m", *CHEAP[:-1], *words, "budget=64", "compare=[]") == 0
    assert set(load(folders(tmp_path, "漢字")[0])["policy"]) == {"größe", "quest"}
    assert len(short_name("𠀀" * 300).encode()) <= 200
    long = f"budget=[64,96],cache_dir={'x' * 70},compare=[window,random],policy=quest"
    assert short_name(long) == "budget=[64,96],compare=[window,random],policy=quest"


def test_an_unknown_launcher_says_how_to_get_it(go, capsys):
    assert go("-m", *CHEAP, "budget=64,96", "hydra/launcher=slurm") == 2
    assert 'pip install -e ".[joblib]"' in capsys.readouterr().err


def process(root: Path, *words: str) -> subprocess.Popen[str]:
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent), "HF_HUB_OFFLINE": "1"}
    env.pop("TRITON_INTERPRET", None)
    return subprocess.Popen(
        [sys.executable, "-m", "sparse_eval", "-m", *words],
        cwd=root,
        env=env,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


SLOW = [*TINY[:2], "prompts.n=2", *TINY[3:], "policy=quest,window,random,oracle"]
SLOW += ["budget=64,80,96,112", "compare=[]"]


def wait_for_cells(root: Path, running: subprocess.Popen[str], least: int) -> None:
    cells = root / "outputs/cache/cells"
    while running.poll() is None and (not cells.exists() or len(list(cells.iterdir())) < least):
        time.sleep(0.005)


def test_a_terminated_sweep_says_how_to_go_on_and_goes_on(go, tmp_path):
    assert go("-m", *SLOW, "name=whole", "cache_dir=other") == 0
    running = process(tmp_path, *SLOW)
    wait_for_cells(tmp_path, running, 3)
    running.send_signal(signal.SIGTERM)
    _, errors = running.communicate(timeout=60)
    assert running.returncode == 143, errors
    assert "stopped by SIGTERM; every finished cell is kept: run the same command" in errors
    assert len(load(tmp_path / "outputs/recall")) >= 3
    assert go("-m", *SLOW) == 0
    pd.testing.assert_frame_equal(
        measured(folders(tmp_path)[-1]), measured(folders(tmp_path, "whole")[0])
    )


@pytest.mark.slow
def test_a_sweep_killed_at_random_moments_ends_with_the_same_rows(go, tmp_path):
    import random

    assert go("-m", *SLOW, "name=whole", "cache_dir=other") == 0
    moments = random.Random(0)
    for _ in range(10):
        running = process(tmp_path, *SLOW)
        had = len(list((tmp_path / "outputs/cache/cells").glob("*")))
        wait_for_cells(tmp_path, running, had + moments.randint(0, 8))
        time.sleep(moments.random() * 0.1)
        running.kill()
        running.communicate()
    assert go("-m", *SLOW) == 0
    pd.testing.assert_frame_equal(
        measured(folders(tmp_path)[-1]), measured(folders(tmp_path, "whole")[0])
    )


@pytest.mark.slow
def test_two_sweeps_at_once_on_one_cache_are_both_right(tmp_path):
    running = [process(tmp_path, *SLOW, f"name={name}") for name in ("one", "two")]
    assert [p.communicate()[0] and p.returncode for p in running] == [0, 0]
    one, two = (measured(tmp_path / "outputs" / name) for name in ("one", "two"))
    pd.testing.assert_frame_equal(one, two)
