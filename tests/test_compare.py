"""Two runs compared sample by sample, and tables and figures for papers."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from sparse_eval.report import main
from sparse_eval.reporting.compare import (
    compare,
    identical_line,
    records,
    tables_of,
    verdict,
)
from sparse_eval.reporting.compare_latency import timing_lines
from sparse_eval.reporting.export import latex
from sparse_eval.reporting.paired import holm, least_p, paired, sign_flip_p, t_quantile
from sparse_eval.reporting.summarise import summarise_recall
from sparse_eval.results import Journal, write_summary
from tests.factories import latency_rows, recall_rows
from tests.needle_rows import needle_run

CONFIG = {"page_size": 16, "model": {"name": "synthetic"}, "seed": 0}


def rows(shift: float = 0.0, n: int = 6, **common) -> pd.DataFrame:
    made = recall_rows(
        ("quest", "window"), (256, 512), num_samples=n, num_layers=4, num_kv_heads=1, **common
    )
    return pd.DataFrame([row | {"mass_recall": row["mass_recall"] - shift} for row in made])


def test_students_quantiles_are_the_tables():
    for freedom, value in (
        (1, 12.706),
        (2, 4.303),
        (3, 3.182),
        (4, 2.776),
        (9, 2.262),
        (30, 2.042),
    ):
        assert t_quantile(0.975, freedom) == pytest.approx(value, abs=5e-4)


def test_the_sign_flip_test_counts_every_sign():
    assert sign_flip_p([1, 1, 1, 1, 1]) == 2 / 32 == least_p(5)
    assert sign_flip_p([1, -1]) == 1
    values = [0.3, -0.1, 0.2, 0.5]
    sums = [
        abs(sum(s * v for s, v in zip(signs, values, strict=True)))
        for signs in itertools.product((1, -1), repeat=4)
    ]
    assert sign_flip_p(values) == sum(x >= abs(sum(values)) - 1e-9 for x in sums) / 16
    assert sign_flip_p([1.0] * 30) < 1e-3


def test_one_sample_has_no_test_and_none_is_an_error():
    found = paired([0.5], [0.7])
    assert found.mean == pytest.approx(0.2) and math.isnan(found.p) and math.isnan(found.low)
    with pytest.raises(ValueError, match="at least one"):
        paired([], [])


def test_holm_multiplies_by_what_is_left():
    assert holm([0.01, 0.04, float("nan"), 0.03])[:2] == pytest.approx([0.03, 0.06])


def test_runs_are_paired_by_prompt():
    found = compare(rows(), rows(0.01), CONFIG, CONFIG | {"page_size": 32})
    assert found.config == [("page_size", "16", "32")]
    recall = found.results[found.results["metric"] == "mass_recall"]
    assert list(recall["difference"]) == pytest.approx([-0.01] * 4)
    assert set(recall["better"]) == {"A"} and set(recall["n"]) == {6}
    assert recall["p"].max() == least_p(6) < 0.05
    errors = found.results[found.results["metric"] == "output_error"]
    assert all(verdict(line) == "the same" for line in records(errors))


def test_what_few_samples_cannot_show_is_said():
    found = compare(rows(n=3), rows(0.01, n=3), CONFIG, CONFIG)
    [line, *_] = records(found.results)
    assert verdict(line) == "n too small (p ≥ 0.25)"


def test_cells_of_one_run_alone_are_listed():
    only_quest = rows().query("policy == 'quest'")
    found = compare(rows(), only_quest, CONFIG, CONFIG)
    assert found.only_a == ["window at 256 tokens", "window at 512 tokens"] and not found.only_b


def relabelled(made: pd.DataFrame, label: str, shift: float, **fields: Any) -> pd.DataFrame:
    """Rows whose quest has other fields, and the label that says so."""
    made = made.copy()
    is_quest = made["policy"] == "quest"
    config = [
        dict(c) | (fields if q else {})
        for c, q in zip(made["policy_config"], is_quest, strict=True)
    ]
    made["mass_recall"] -= shift * is_quest
    return made.assign(
        policy=made["policy"].where(~is_quest, label),
        policy_config=config,
        cell_key=label + made["cell_key"],
    )


def test_one_policy_under_two_settings_is_paired():
    base = {"page_size": 16, "group": "max"}
    configs = [
        CONFIG | {"policies": {"quest": base, "window": {}}},
        CONFIG | {"policies": {"quest:group=sum": base | {"group": "sum"}, "window": {}}},
    ]
    a = relabelled(rows(), "quest", 0, group="max")
    b = relabelled(rows(), "quest:group=sum", 0.01, group="sum")
    found = compare(a, b, *configs)
    assert found.config == [("policies.quest.group", "max", "sum")]
    assert not found.only_a and not found.only_b
    (line, *_) = records(found.results[found.results["metric"] == "mass_recall"])
    assert line["policy"] == "quest: group max → sum" and line["n"] == 6
    assert line["difference"] == pytest.approx(-0.01)
    shown = tables_of(found, whole=False)["Results"].lines
    assert {cells[1] for cells in shown} == {"quest: group max → sum"}
    assert identical_line(found).endswith(": window at 256 tokens, 512 tokens")


def test_one_setting_meets_several_and_several_meet_none():
    one = relabelled(rows(), "quest", 0, group="max")
    several = pd.concat(
        [
            relabelled(rows(), f"quest:group={g}", shift, group=g)
            for g, shift in (("sum", 0.01), ("mean", 0.02))
        ]
    )
    found = compare(one, several, CONFIG, CONFIG)
    named = {line["policy"] for line in records(found.results)}
    assert {"quest: group max → sum", "quest: group max → mean"} < named
    others = pd.concat([one, relabelled(rows(), "quest:group=min", 0, group="min")])
    assert len(compare(others, several, CONFIG, CONFIG).only_a) == 4


@pytest.mark.parametrize("name", ["dtype", "protocol", "capture_hash", "schema"])
def test_runs_that_measured_other_things_are_refused(tmp_path, capsys, name):
    other = 2 if name == "schema" else "other"
    paths = [tmp_path / "a", tmp_path / "b"]
    for path, common in zip(paths, ({}, {name: other}), strict=True):
        Journal(path).append(rows(**common).to_dict("records"))  # type: ignore[arg-type]
    assert main([str(path) for path in paths]) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: ") and told.count("\n") == 1
    assert "cannot be pooled" in told or "this version reads" in told
    assert not list(tmp_path.glob("report*"))


@pytest.mark.parametrize("other", [latency_rows(), needle_run(n=1)])
def test_runs_that_share_no_task_are_refused(tmp_path, capsys, other):
    """Also where the needle's answers have recall of their own."""
    task = other[0]["task"]
    own = rows(needle_kind="passcode").to_dict("records") if task == "needle" else []
    Journal(tmp_path / "a").append(rows().to_dict("records"))  # type: ignore[arg-type]
    Journal(tmp_path / "b").append(other + own)
    assert main([str(tmp_path / "a"), str(tmp_path / "b")]) == 2
    told = capsys.readouterr().err
    assert told == f"error: these runs cannot be paired: A measured recall, B {task}\n"
    assert not list(tmp_path.glob("report*"))


@pytest.fixture
def two(tmp_path, monkeypatch) -> list[str]:
    monkeypatch.setattr("plotly.offline.get_plotlyjs", lambda: "/* plotly */")
    paths = []
    for name, shift in (("a", 0.0), ("b", 0.01)):
        Journal(tmp_path / name).append(rows(shift, n=10).to_dict("records"))  # type: ignore[arg-type]
        summary = {"command": f"python -m sparse_eval name={name}", "config": {"name": name}}
        write_summary(tmp_path / name, summary)
        paths.append(str(tmp_path / name))
    return paths


def test_the_command_prints_and_keeps_the_comparison(two, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("sparse_eval.report.draw", lambda rows, folder: [])
    assert main(two) == 0
    told = capsys.readouterr().out
    assert "A better" in told and "Holm" in told
    page = (tmp_path / "report_a_against_b" / "report.html").read_text()
    assert "A against B" in page and "sign-flip" in page and "<h3>Results</h3>" in page
    (tmp_path / "b").rename(tmp_path / "c")
    assert main([two[0], str(tmp_path / "c")]) == 0
    assert len(list(tmp_path.glob("report*/report.html"))) == 2


def test_figures_and_tables_for_papers(two):
    assert main([two[0], "--format", "html,pdf,svg,latex,csv"]) == 0
    folder = Path(two[0])
    for name in ("recall_curve", "recall_by_budget", "recall_heatmap"):
        assert (folder / "plots" / f"{name}.pdf").read_bytes().startswith(b"%PDF")
        svg = (folder / "plots" / f"{name}.svg").read_text()
        assert "<text" in svg and "recall" in svg
    table = (folder / "tables" / "recall.tex").read_text()
    assert "% made by: python -m sparse_eval name=a" in table
    assert r"\toprule" in table and r"$\pm$" in table and "& 10 \\\\" in table
    numbers = pd.read_csv(folder / "tables" / "recall.csv")
    assert list(numbers["n"]) == [10] * 4


def test_names_are_safe_in_latex():
    made = rows().assign(policy="mean_std:a=5%")
    assert r"mean\_std:a=5\%" in latex("recall", "", summarise_recall(made), [])


def test_an_unknown_format_is_one_line(two, capsys):
    assert main([two[0], "--format", "docx"]) == 2
    assert "--format must be of html, pdf, svg, latex, csv" in capsys.readouterr().err


def timings(**changed: Any) -> pd.DataFrame:
    """A run's latency rows, sharply timed; changed: columns, or a factor of every time."""
    factor = changed.pop("factor", 1.0)
    rows = pd.DataFrame(latency_rows()).assign(**changed)
    times = {"p10_us": 0.99, "median_us": 1.0, "p90_us": 1.01}
    median = rows["median_us"] * factor
    return rows.assign(**{name: median * share for name, share in times.items()})


def test_timings_are_paired_by_the_work_they_timed():
    found = compare(timings(), timings(factor=0.5), CONFIG, CONFIG)
    assert len(found.timings) == len(latency_rows()) and not len(found.results)
    assert set(found.timings["ratio"]) == {0.5} and set(found.timings["verdict"]) == {"B faster"}
    near = compare(timings(), timings(factor=1.005), CONFIG, CONFIG)
    assert set(near.timings["verdict"]) == {"ranges overlap"}
    assert not near.only_a and not near.only_b


def test_a_setting_that_differs_is_the_comparison_and_one_that_varies_tells_lines_apart():
    found = compare(timings(), timings(page_size=16, factor=2), CONFIG, CONFIG)
    assert set(found.timings["verdict"]) == {"A faster"} and "page_size" not in found.timings
    both = pd.concat([timings(), timings(page_size=16)])
    found = compare(both, both, CONFIG, CONFIG)
    assert len(found.timings) == len(both) and set(found.timings["ratio"]) == {1.0}


def test_the_fastest_sdpa_of_one_run_meets_that_of_the_other():
    runs = [timings(what="sdpa", baseline=name).query("graph") for name in ("sdpa flash", "sdpa x")]
    a, b = (run.drop_duplicates(["batch", "context"]) for run in runs)
    found = compare(a, b, CONFIG, CONFIG)
    [line, *_] = timing_lines(found.timings).lines
    assert len(found.timings) == 4 and line[5].endswith("(A: sdpa flash, B: sdpa x)")


def test_runs_without_common_work_say_so():
    found = compare(timings(batch=1), timings(batch=2), CONFIG, CONFIG)
    assert not len(found.timings) and found.only_a and found.only_b


def test_latency_runs_are_compared_from_the_command_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("sparse_eval.report.draw", lambda rows, folder: [])
    for name, factor in (("a", 1.0), ("b", 0.5)):
        Journal(tmp_path / name).append(timings(factor=factor).to_dict("records"))  # type: ignore[arg-type]
    paths = [str(tmp_path / name) for name in "ab"]
    assert main([*paths, "--format", "html,latex,csv"]) == 0
    assert "B faster" in capsys.readouterr().out
    tables = tmp_path / "report_a_against_b" / "tables"
    numbers = pd.read_csv(tables / "comparison_timings.csv")
    assert set(numbers["B / A"]) == {0.5} and len(numbers) == len(latency_rows())
    text = (tables / "comparison_timings.tex").read_text()
    assert text.isascii() and r"A \textmu{}s" in text and "B faster" in text
    own = sorted(tables.glob("latency_*.tex"))  # the same work twice: each run has its own
    assert [path.stem[-2:] for path in own] == ["_a", "_b"]
    assert all("vs best dense" in path.read_text() for path in own)
    page = (tmp_path / "report_a_against_b" / "report.html").read_text()
    assert "B faster" in page and 'class="left"' in page
