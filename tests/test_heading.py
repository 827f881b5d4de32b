"""The head of a picture: nothing of it is cut or drawn over, however much was measured."""

from __future__ import annotations

import pandas as pd
import pytest
from matplotlib.font_manager import FontProperties
from matplotlib.text import Text

from sparse_eval.reporting import plots, plots_density, plots_frontier, plots_needle
from sparse_eval.reporting.heading import BETWEEN, SUBTITLE, new_picture, wrapped
from sparse_eval.reporting.summarise_needle import split_needle
from tests.factories import recall_rows
from tests.needle_rows import needle_run

QUEST = "quest:group=sum,page_size=32,local_pages=4"
MODEL = "an-organisation/A-Model-With-A-Name-That-Nobody-Shortened-1.5B-Instruct"
TEMPLATE = "template:" + "0123456789abcdef" * 8
LONG = {"model": MODEL, "weights": "Q4_1 GGUF " * 8, "chat": TEMPLATE, "prompts": "a_text" * 12}


def texts_of(figure):
    """Every text but ticks' (those outside the axes are not drawn), with its place in pixels."""
    figure.draw_without_rendering()
    ticks = {t for axes in figure.axes for axis in (axes.xaxis, axes.yaxis) for t in labels(axis)}
    drawn = [t for t in figure.findobj(Text) if t.get_visible() and t not in ticks]
    return {t: t.get_window_extent() for t in drawn if t.get_text().strip()}


def labels(axis):
    return [*axis.get_ticklabels(), *axis.get_ticklabels(minor=True), axis.get_offset_text()]


def check(figure):
    """All within the picture, and titles on nothing else."""
    places = texts_of(figure)
    for text, box in places.items():
        inside = box.x0 >= -1 and box.y0 >= -1 and box.x1 <= figure.bbox.x1 + 1
        assert inside and box.y1 <= figure.bbox.y1 + 1, text
    titles = [*figure.texts, *(a._left_title for a in figure.axes)]
    boxes = [places[text] for text in titles if text in places]
    boxes += [axes.get_window_extent() for axes in figure.axes if axes.get_visible()]
    for i, box in enumerate(boxes):
        assert not any(box.overlaps(other.padded(-2)) for other in boxes[:i])


def needle_rows():
    rows = pd.DataFrame(needle_run(n=1, budgets=[96], policies=["quest", "window", "random"]))
    return rows.assign(**LONG, policy=rows["policy"].replace("quest", QUEST))


def frontier_rows():
    rows = pd.DataFrame(recall_rows(("quest", "window"), (512,), num_layers=4)).assign(**LONG)
    ours = {"policy": QUEST, "density_head": 0.1}
    return pd.concat([rows, rows[rows["policy"] == "quest"].assign(adaptive=True, **ours)])


@pytest.fixture
def figures(monkeypatch):
    found = []
    for module in (plots, plots_density, plots_frontier, plots_needle):
        monkeypatch.setattr(module, "save", lambda figure, path: found.append(figure))
    return found


def test_needle_pictures_of_much_are_whole(figures, tmp_path):
    (part,) = split_needle(needle_rows()).values()
    plots_needle.needle_pictures(needle_rows(), part, tmp_path, "")
    assert len(figures) == 4
    for figure in figures:
        check(figure)
        told = "".join(t.get_text().replace("\n", "") for t in figure.texts)
        assert TEMPLATE in told and MODEL in told and "n = 3" in told


def test_recall_pictures_of_much_are_whole(figures, tmp_path):
    rows = frontier_rows()
    plots.recall_curve(rows, tmp_path)
    plots.recall_heatmap(rows, tmp_path)
    plots_frontier.lse_curve(rows, tmp_path)
    plots_density.density_heatmap(rows, tmp_path, QUEST)
    assert len(figures) == 4
    for figure in figures:
        check(figure)


def test_more_lines_take_no_room_of_the_panels():
    def panel(measured_what):
        figure = new_picture("A headline", measured_what, 8.4, 4)
        axes = figure.subplots()
        figure.draw_without_rendering()
        return axes.get_window_extent().height

    assert panel(BETWEEN.join(["a fact of some length"] * 30)) == pytest.approx(panel("n"), abs=2)


def test_lines_break_between_facts_before_they_break_in_one():
    facts = ["the model", "8,192 tokens of a text", "n = 4"]
    assert wrapped(BETWEEN.join(facts), 2.3, SUBTITLE) == [BETWEEN.join(facts[:2]), facts[2]]
    assert wrapped(BETWEEN.join(facts), 1.5, SUBTITLE) == facts
    assert wrapped("8,192 tokens", 0.6, SUBTITLE) == ["8,192", "tokens"]
    assert wrapped("quest:group=sum,page_size=32", 1.2, SUBTITLE) == [
        "quest:group=sum,",
        "page_size=32",
    ]


@pytest.mark.parametrize("text", ["f" * 200, "$x$ and $y", "", "a  b " * 40])
def test_nothing_is_lost_by_breaking(text):
    lines = wrapped(text, 1.0, FontProperties(size=8.5))
    assert "".join("".join(lines).split()) == "".join(text.split())
