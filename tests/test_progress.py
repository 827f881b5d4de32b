"""What a run tells: bars on a terminal, lines in a pipe, every word as it is."""

from __future__ import annotations

import io
import re
from functools import partial
from pathlib import Path

import pytest
from rich.console import Console

import sparse_eval.cli.progress as progress_module
from sparse_eval import terminal
from sparse_eval.cli.progress import Level, Progress
from sparse_eval.reporting.grid import grid_of
from sparse_eval.reporting.tables_live import TextTable


@pytest.mark.parametrize(("level", "bars"), [(None, 1), (Level(1, 3, "seed=1"), 2)])
def test_a_terminal_shows_a_bar_for_each_level(monkeypatch, level, bars):
    progress = Progress(console=Console(force_terminal=True, file=io.StringIO()), level=level)
    with progress.bar("cells", 4) as tick:
        tick(1)
        assert progress._live and len(progress._live.tasks) == bars


def test_a_pipe_gets_lines_and_no_bars(capsys):
    progress = Progress(level=Level(0, 2, "seed=0"))
    with progress.bar("measuring", 4, unit="cells") as tick:
        tick(4)
    told = capsys.readouterr().out
    assert "job 1 of 2  seed=0" in told and "measuring: 4 cells in" in told and "\x1b" not in told


def test_a_pipe_is_told_now_and_then_how_far_the_work_is(capsys, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(progress_module.time, "perf_counter", lambda: now[0])
    progress = Progress()
    with progress.bar("answering", 44, unit="answers") as tick:
        for seconds in (10, 15, 5, 40):
            now[0] += seconds
            tick(4)
    assert capsys.readouterr().out.splitlines() == [
        "answering: 8 of 44 answers, 25 s",
        "answering: 16 of 44 answers, 1 min 10 s",
        "answering: 44 answers in 70.0 s",
    ]


def test_the_times_that_are_told_add_up_to_the_whole(capsys, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(progress_module.time, "perf_counter", lambda: now[0])
    progress = Progress()
    with progress.bar("measuring", 4, unit="cells"):
        now[0] += 1
        with progress.stage("loading"):
            now[0] += 3
        with progress.bar("prefill", 8), progress.stage("too short to tell"):
            now[0] += 0.5
        with progress.bar("one of many", 8, is_one_of_many=True):
            now[0] += 2
    assert capsys.readouterr().out.splitlines() == [
        "loading: 3.0 s",
        "prefill: 8 tokens in 0.5 s",
        "measuring: 4 cells in 3.0 s",
    ]


PATH = "outputs/0_budget=[512,1024],compare=[window,full],a[bold]b,:smile:"


@pytest.mark.parametrize("is_terminal", [False, True])
def test_words_and_paths_are_shown_as_they_are(is_terminal, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    file = io.StringIO()
    made = partial(Console, file=file, force_terminal=is_terminal)
    monkeypatch.setattr(terminal, "Console", made)
    console = terminal.make_console(300, soft_wrap=True)
    progress = Progress(console=console, level=Level(0, 2, PATH), verbose=1)
    progress.say(PATH)
    progress.warn(PATH)
    progress.note(PATH)
    with progress.stage(PATH), progress.bar(PATH, 1) as tick:
        tick(1)
    console.print(grid_of(TextTable([PATH], [[PATH]], PATH, ()), PATH))
    told = file.getvalue()
    assert told.count(PATH) >= 10 and progress.draws == is_terminal


def test_every_console_is_a_plain_one():
    """Rich's own reads `[a]` as markup and `:smile:` as a picture."""
    files = Path(terminal.__file__).parent.rglob("*.py")
    made = [path.name for path in files if re.search(r"\bConsole\(", path.read_text())]
    assert set(made) == {"terminal.py"}


def test_workers_of_a_launcher_draw_no_bars():
    console = Console(force_terminal=True, file=io.StringIO())
    assert not Progress(console=console, level=Level(1, 0, "seed=1")).draws
