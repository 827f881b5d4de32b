"""The report: one page from rows and summary, self-contained, with the numbers in it."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from sparse_eval.cli.compose import Composer
from sparse_eval.cli.settings import resolve
from sparse_eval.report import draw, main, write_report
from sparse_eval.reporting.dashboard import run_facts
from sparse_eval.reporting.show_recall import print_results
from sparse_eval.results import Journal, load, write_summary
from sparse_eval.terminal import make_console
from tests.factories import NAN, recall_rows
from tests.needle_rows import answer_row

SMALL: dict[str, Any] = {"num_layers": 5, "num_kv_heads": 1, "budgets": (256, 1024)}
SUMMARY = {
    "command": "python -m sparse_eval policy=quest",
    "config": {"model": {"id": "a/b"}, "hint": "</script><b>"},
    "provenance": {"torch": "2.13.0", "git_commit": "c0ffee"},
    "wall_seconds": 12.5,
}


def run_folder(folder: Path, **options) -> Path:
    Journal(folder).append(recall_rows(**(SMALL | options)))
    write_summary(folder, SUMMARY)
    return folder


class Page(HTMLParser):
    """Collects what a browser would fetch, the page's text, its tables and its data."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.rows: list[list[str]] = []
        self.texts: list[str] = []
        self.scripts: list[str] = []
        self.policy = ""
        self._script = False
        self._head = False
        self.feed(path.read_text())

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        if tag in ("script", "link", "img", "iframe", "source", "use", "object", "embed"):
            self.links += [values[k] for k in ("src", "href", "data", "srcset") if values.get(k)]
        if values.get("http-equiv") == "Content-Security-Policy":
            self.policy = values["content"]
        if tag == "script":
            self._script = True
            self.scripts.append("")
        if tag == "tr":
            self.rows.append([])
        if tag == "td" and self.rows:
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        if tag == "script":
            self._script = False

    def handle_data(self, data):
        if self._script:
            self.scripts[-1] += data
            return
        self.texts.append(data)
        if self.rows and self.rows[-1]:
            self.rows[-1][-1] += data

    @property
    def data(self) -> dict:
        return json.loads(next(s for s in self.scripts if s.startswith('{"settings"')))


@pytest.fixture(autouse=True)
def light_page(monkeypatch):
    """Spares tests pictures and 5 MB of plotly; the module's page, made before, has both."""
    monkeypatch.setattr("plotly.offline.get_plotlyjs", lambda: "/* plotly */")
    monkeypatch.setattr("sparse_eval.report.draw", lambda rows, folder: [])


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = run_folder(tmp_path_factory.mktemp("outputs") / "run", num_samples=2)
    write_report(folder)
    return folder


@pytest.fixture(scope="module")
def page(folder) -> Page:
    return Page(folder / "report.html")


def test_a_report_leaves_its_files(folder):
    plots = {path.name for path in (folder / "plots").iterdir()}
    assert plots == {
        "recall_curve.png",
        "recall_by_budget.png",
        "recall_heatmap.png",
        "read_lse.png",
        "read_frontiers.png",
    }
    assert len(load(folder / "rows.parquet")) == len(load(folder / "rows.jsonl"))


def test_the_page_asks_nothing_of_the_network(page):
    assert page.links and all(link.startswith("data:") for link in page.links)
    assert "default-src 'none'" in page.policy and "http" not in page.policy
    style = "".join(page.texts)
    assert "@import" not in style and "url(" not in style


def test_plotly_is_inside(page):
    assert any(len(script) > 1e6 and "Plotly" in script for script in page.scripts)


def test_the_headline_is_readable_without_scripts(page):
    lines = {(row[0].split()[0], row[1]): row for row in page.rows if len(row) == 11}
    assert len(lines) == 9  # full once, four policies at two budgets
    quest = lines["quest", "256"]
    rows = load_quest_256()
    assert quest[2].startswith(f"{rows['mass_recall'].mean():.3f} ±")
    assert quest[5] == "256" and quest[9] == "2"
    assert "not realisable" in lines["oracle", "256"][0] and lines["oracle", "256"][8] == "n/a"
    assert lines["full", "any"][6] == "100.0%"


def load_quest_256():
    import pandas as pd

    rows = pd.DataFrame(recall_rows(**SMALL, num_samples=2))
    return rows[(rows["policy"] == "quest") & (rows["budget_tokens"] == 256) & ~rows["dense_layer"]]


def test_the_page_says_where_its_numbers_come_from(page):
    text = " ".join(page.texts)
    for part in ("python -m sparse_eval policy=quest", "2.13.0", "c0ffee", "12.5", '"id": "a/b"'):
        assert part in text
    hashes = set(recall_rows(**SMALL)[0][k] for k in ("capture_hash", "prompt_hash"))
    assert all(h in text for h in hashes)


def test_text_from_outside_cannot_become_markup(page, tmp_path):
    assert "</script><b>" in " ".join(page.texts)  # escaped in the source: the parser saw text
    evil = '<img src="http://x.example/"></script>'
    Journal(tmp_path).append(recall_rows((evil, "window"), (256,), num_layers=3, num_kv_heads=1))
    found = Page(write_report(tmp_path))
    assert all(link.startswith("data:") for link in found.links)
    assert found.data["settings"][0]["policies"][0]["label"] == evil


def test_losing_cells_are_on_the_page(page):
    [setting] = page.data["settings"]
    assert list(setting["margins"]) == ["quest", "window", "random"]
    lost = [cell for cell in setting["margins"]["quest"] if cell["margin"] < 0]
    assert {(c["budget_tokens"], c["layer"], c["rival"]) for c in lost} >= {(256, 4, "window")}
    assert all(cell["n"] == 2 for cell in lost)


def test_a_sweep_has_one_page_for_all_its_jobs(tmp_path):
    for number, policy in enumerate(("quest", "window")):
        run_folder(tmp_path / str(number), policies=(policy,))
    page = Page(write_report(tmp_path))
    assert [p["label"] for p in page.data["settings"][0]["policies"]] == ["quest", "window"]
    assert set(load(tmp_path / "rows.parquet")["policy"]) == {"quest", "window"}
    again = Page(write_report(tmp_path))
    assert again.data == page.data


def test_settings_that_differ_have_pictures_of_their_own(tmp_path):
    for context in (2048, 4096):
        run_folder(tmp_path / str(context), policies=("quest", "window"), context=context)
    page = Page(write_report(tmp_path))
    assert [s["name"] for s in page.data["settings"]] == ["context 2048", "context 4096"]
    names = {path.name for path in draw(load(tmp_path / "rows.parquet"), tmp_path / "plots")}
    assert {"recall_curve_context_2048.png", "recall_heatmap_context_4096.png"} <= names


def test_an_unfinished_run_without_a_summary_still_has_a_page(tmp_path):
    Journal(tmp_path).append(recall_rows(("quest",), (256,), num_layers=3, num_kv_heads=1))
    assert write_report(tmp_path).exists()


def test_the_command_prints_the_page_or_one_line(tmp_path, capsys):
    run = run_folder(tmp_path / "run", policies=("quest",))
    assert main([str(run)]) == 0
    assert capsys.readouterr().out.strip() == str(run / "report.html")
    assert main([str(tmp_path / "nothing")]) == 2
    assert capsys.readouterr().err.startswith("error: PATH must be a folder")
    (tmp_path / "empty").mkdir()
    assert main([str(tmp_path / "empty")]) == 2
    assert f"no rows in {tmp_path / 'empty'}:" in capsys.readouterr().err


def test_several_paths_are_pooled_beside_them(tmp_path, capsys):
    paths = [run_folder(tmp_path / p, policies=(p,)) for p in ("quest", "window")]
    assert main([str(path) for path in paths]) == 0
    page = Page(tmp_path / "report_quest_against_window" / "report.html")
    assert {p["label"] for p in page.data["settings"][0]["policies"]} == {"quest", "window"}
    assert main([*map(str, paths), "--out", str(tmp_path / "here")]) == 0
    assert (tmp_path / "here" / "report.html").exists()


def test_a_sweep_over_recall_and_needle_has_both_in_the_headline(tmp_path):
    run_folder(tmp_path / "0_recall", policies=("quest", "window"), budgets=(256,))
    like = recall_rows(("quest",), (256,), num_layers=1, num_kv_heads=1)[0]
    shared = {name: like[name] for name in ("model", "weights", "revision", "context")}
    outcomes = ("correct", "correct", "correct", "empty")
    answers = [
        answer_row("full", NAN, 0.5, i, "correct", density=1.0, gated=False, **shared)
        for i in range(4)
    ]
    answers += [
        answer_row("quest", 256, 0.5, i, outcome, density=0.1, gated=False, **shared)
        for i, outcome in enumerate(outcomes)
    ]
    Journal(tmp_path / "1_needle").append(answers)
    page = Page(write_report(tmp_path))
    cells = {row[0].split()[0]: row[3] for row in reversed(page.rows) if len(row) == 12}
    assert cells["quest"] == "75% [30%, 95%], n 4"  # the headline's: the first table on the page
    assert cells["window"] == "n/a"
    assert any("Needle" in text and "256" not in text for text in page.texts)


def test_a_runs_time_and_memory_are_told_in_human_units():
    told = run_facts({"wall_seconds": 131.965, "peak_memory_bytes": 1_613_733_888, "gpu": None})
    assert "<dt>wall time</dt><dd>2 min 12 s</dd>" in told
    assert "<dt>peak memory</dt><dd>1.5 GiB</dd>" in told and "gpu" not in told


def test_a_table_names_the_text_that_it_is_of(capsys):
    settings = resolve(Composer(), ["model=tiny_llama", "budget=64", "dense_layers=[0]"])
    rows = recall_rows(("quest",), (64,), num_layers=3, num_kv_heads=1, context=256)
    print_results([r | {"prompts": "file: my[0].txt"} for r in rows], settings, make_console(200))
    assert "tokens of file: my[0].txt, page" in " ".join(capsys.readouterr().out.split())


def test_a_run_whose_layers_are_all_dense_says_why_recall_is_one():
    settings = resolve(Composer(), ["model=tiny_llama", "budget=64", "dense_layers=[0,1,2]"])
    rows = recall_rows(("quest",), (64,), num_layers=3, num_kv_heads=1, context=256)
    told: list[str] = []
    for all_dense in (True, False):
        console = Console(record=True, width=200)
        print_results([r | {"dense_layer": all_dense} for r in rows], settings, console)
        told.append(console.export_text())
    assert "every layer is dense (dense_layers=[0, 1, 2])" in told[0]
    assert "every layer" not in told[1]
