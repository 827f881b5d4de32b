"""Pictures: the files exist, and what is drawn says what it should."""

from __future__ import annotations

import pandas as pd
import pytest
from PIL import Image

from sparse_eval.reporting import plots
from sparse_eval.reporting.palette import look_of
from tests.factories import NAN, recall_rows

ROWS = pd.DataFrame(recall_rows(num_samples=2, num_layers=5, num_kv_heads=1))


@pytest.fixture
def drawn(monkeypatch, tmp_path):
    """Draws a picture, checks that it is one, and returns its axes."""
    figures = []
    save = plots.save

    def watched(figure, path):
        figures.append(figure)
        return save(figure, path)

    monkeypatch.setattr(plots, "save", watched)

    def draw(plot, *arguments):
        path = tmp_path / "plots" / "picture.png"
        assert plot(arguments[0], path, *arguments[1:]) == path
        with Image.open(path) as image:
            assert image.format == "PNG" and image.width > 1000
        return figures[-1].axes[0]

    return draw


@pytest.mark.parametrize("plot", [plots.recall_curve, plots.recall_by_budget])
def test_the_legend_names_every_policy(drawn, plot):
    legend = [text.get_text() for text in drawn(plot, ROWS).get_legend().get_texts()]
    expected = {"quest", "full", "oracle (not realisable)", "window", "random"}
    assert set(legend) == expected and len(legend) == 5


@pytest.mark.parametrize("plot", [plots.recall_curve, plots.recall_by_budget, plots.recall_heatmap])
def test_titles_say_what_was_measured(drawn, plot):
    axes = drawn(plot, ROWS)
    subject = " ".join(text.get_text() for text in axes.figure.texts)
    for part in ("synthetic-135m", "Q4_1", "context 4,096 tokens", "made up", "n = 2 prompts"):
        assert part in subject
    assert axes.get_xlabel() and "recall" in axes.figure.get_suptitle()


def test_full_is_a_point_at_one(drawn):
    axes = drawn(plots.recall_curve, ROWS)
    lines = {container.get_label(): container.lines[0] for container in axes.containers}
    assert lines["full"].get_xydata().tolist() == [[1.0, 1.0]]
    assert len(lines["quest"].get_xdata()) == 4


def test_error_bars_need_more_than_one_prompt(drawn):
    one = ROWS[ROWS["sample"] == 0]
    bars = [bool(c.lines[2]) for c in drawn(plots.recall_curve, one).containers]
    assert not any(bars)
    assert any(bool(c.lines[2]) for c in drawn(plots.recall_curve, ROWS).containers)


def test_dense_layers_are_hatched_and_what_reads_everything_is_left_out(drawn):
    axes = drawn(plots.recall_heatmap, ROWS, 256)
    assert [patch.get_hatch() for patch in axes.patches] == ["////", "////"]
    names = [label.get_text() for label in axes.get_yticklabels()]
    assert names == ["quest", "oracle", "window", "random"]
    assert "256 tokens" in axes.figure.get_suptitle()


def test_a_budget_that_was_not_measured_is_refused(tmp_path):
    with pytest.raises(ValueError, match="budget must be one of 256, 512, 1024, 2048"):
        plots.recall_heatmap(ROWS, tmp_path / "x.png", 300)


def test_adaptive_policies_stand_beside_budgets_in_the_heat_map(drawn):
    adaptive = pd.DataFrame(recall_rows(("top_p",), (512,), num_layers=5, num_kv_heads=1))
    rows = pd.concat([ROWS, adaptive.assign(budget_tokens=NAN)])
    axes = drawn(plots.recall_heatmap, rows)
    names = [label.get_text() for label in axes.get_yticklabels()]
    assert "top_p (adaptive: 12.5%)" in names and "quest" in names


def test_a_policy_looks_the_same_in_every_picture():
    assert look_of("quest") == look_of("quest")
    assert look_of("quest:group=sum").light == look_of("quest").light
    assert look_of("quest:group=sum").dash != look_of("quest").dash
    looks = {(look_of(n).light, look_of(n).marker) for n in plots_known()}
    assert len(looks) == len(plots_known())


def plots_known() -> list[str]:
    return ["full", "oracle", "quest", "window", "random", "mean_std", "snapkv"]
