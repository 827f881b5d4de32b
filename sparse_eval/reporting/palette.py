"""One colour, marker and line a policy label, the same in every picture and on the page.

Colours are Okabe and Ito's (https://jfly.uni-koeln.de/color/), lightened for dark backgrounds;
marker and dash say the same again without colour. Known names only pick a colour: any label works.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

BLUE = ("#0072B2", "#5AB0F0")
VERMILION = ("#D55E00", "#FF8A4C")
GREEN = ("#00855F", "#3CCB9B")
PURPLE = ("#B4568F", "#E69AC9")
AMBER = ("#B97900", "#F2B33D")
TEAL = ("#2A8C99", "#6FD3DE")
INDIGO = ("#4B3FA0", "#A79CF5")
WINE = ("#8C2D4B", "#E5819F")
GREY = ("#7A828C", "#9AA4B0")
INK = ("#1F2933", "#E6EAF0")

KNOWN = {
    "full": (INK, "*"),
    "oracle": (INK, "o"),
    "quest": (BLUE, "o"),
    "window": (VERMILION, "s"),
    "random": (GREY, "X"),
    "mean_std": (GREEN, "D"),
    "snapkv": (PURPLE, "^"),
    "ffd": (AMBER, "v"),
    "thumbnail_topk": (TEAL, "P"),
    "thumbnail_topp": (GREEN, "<"),
    "quest_topdelta": (INDIGO, ">"),
    "quest_topp": (WINE, "^"),
    "hybrid": (PURPLE, "D"),
    "oracle_topdelta": (INK, "v"),
    "oracle_topp": (INK, "p"),
}
OTHERS = ((AMBER, "v"), (TEAL, "P"), (INDIGO, "<"), (WINE, ">"), (GREEN, "p"), (PURPLE, "h"))
MARKERS = "osD^vP<>ph"
DASHES = ("solid", "dashed", "dashdot", "dotted")
PLOTLY_MARKERS = {
    "*": "star",
    "o": "circle",
    "s": "square",
    "D": "diamond",
    "^": "triangle-up",
    "v": "triangle-down",
    "<": "triangle-left",
    ">": "triangle-right",
    "P": "cross",
    "X": "x",
    "p": "pentagon",
    "h": "hexagon",
}
PLOTLY_DASHES = {"solid": "solid", "dashed": "dash", "dashdot": "dashdot", "dotted": "dot"}


@dataclass(frozen=True)
class Look:
    """How a policy is drawn. light, dark: its colour on a light and on a dark background."""

    light: str
    dark: str
    marker: str
    dash: str

    @property
    def plotly_marker(self) -> str:
        return PLOTLY_MARKERS[self.marker]

    @property
    def plotly_dash(self) -> str:
        return PLOTLY_DASHES[self.dash]


def look_of(label: str) -> Look:
    """A variant such as "quest:group=sum" keeps its policy's colour and gets its own line."""
    name, _, variant = label.partition(":")
    (light, dark), marker = KNOWN.get(name) or OTHERS[number_of(name) % len(OTHERS)]
    if not variant:
        return Look(light, dark, marker, "solid")
    number = number_of(variant)
    return Look(light, dark, MARKERS[number % len(MARKERS)], DASHES[1 + number % 3])


def number_of(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")
