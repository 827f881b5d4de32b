"""The head of every picture: its headline, and below that what was measured, in as many lines as
fit the picture's width. The picture grows by them, so panels keep their room."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg, RendererAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.layout_engine import ConstrainedLayoutEngine

DPI = 160
INK, MUTED = "#1f2933", "#5f6b7a"
BETWEEN = "  ·  "
"""What stands between two facts of what was measured."""
BREAKS = ((BETWEEN, BETWEEN), (" ", " "), ("(?<=,)", ""), ("", ""))
"""Where a line may end, the best place first: a pattern, and what stood there."""
EDGE = 0.13
"""Inches between the picture's edge and the head."""
HEADLINE = FontProperties(size=12.5, weight="bold")
SUBTITLE = FontProperties(size=8.5)
PANEL = FontProperties(size=9.5)
LINE = 1.25
"""A line's height over its font's size."""
USUAL = LINE * (12.5 + 8.5) / 72
"""Inches of a head of one line each, which heights of pictures include."""


def new_picture(headline: str, measured_what: str, width: float, height: float) -> Figure:
    """An empty figure with its head. width, height: inches; height: of a picture whose headline and
    measured_what take one line each. No pyplot, no global state."""
    room = width - 2 * EDGE
    titles = wrapped(headline, room, HEADLINE)
    facts = wrapped(measured_what, room, SUBTITLE)
    below_titles = EDGE + len(titles) * line_height(HEADLINE)
    head = below_titles + len(facts) * line_height(SUBTITLE)
    height += head - EDGE - USUAL
    layout = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1, rect=(0, 0, 1, 1 - head / height))
    figure = Figure(figsize=(width, height), dpi=DPI, layout=layout, facecolor="white")
    FigureCanvasAgg(figure)
    common: dict[str, Any] = {"x": EDGE / width, "ha": "left", "va": "top", "linespacing": 1.2}
    title = figure.suptitle(
        "\n".join(titles), y=1 - EDGE / height, color=INK, fontproperties=HEADLINE, **common
    )
    title.set(in_layout=False, parse_math=False)
    note = figure.text(
        y=1 - below_titles / height,
        s="\n".join(facts),
        color=MUTED,
        fontproperties=SUBTITLE,
        parse_math=False,
        **common,
    )
    note.set_in_layout(False)  # the layout's rect leaves the head's room free
    return figure


def line_height(font: FontProperties) -> float:
    """Inches."""
    return font.get_size_in_points() * LINE / 72


def panel_title(axes: Axes, title: str, room: float) -> None:
    """A panel's own title, in as many lines as fit `room` inches."""
    lines = "\n".join(wrapped(title, room, PANEL))
    axes.set_title(lines, loc="left", color=INK, fontproperties=PANEL, parse_math=False)


def wrapped(text: str, room: float, font: FontProperties) -> list[str]:
    """Lines of a text that are at most `room` inches wide: broken between facts; within a fact,
    between words, fields and letters, only where that is too wide by itself."""
    renderer = RendererAgg(1, 1, DPI)

    def fits(line: str) -> bool:
        return renderer.get_text_width_height_descent(line, font, False)[0] <= room * DPI

    return broken(text, fits, BREAKS)


def broken(text: str, fits: Callable[[str], bool], breaks: Sequence[tuple[str, str]]) -> list[str]:
    if fits(text) or not breaks:
        return [text]
    (where, between), *finer = breaks
    lines: list[str] = []
    for piece in re.split(where, text):
        if lines and fits(longer := lines[-1] + between + piece):
            lines[-1] = longer
        else:
            lines += broken(piece, fits, finer)
    return lines
