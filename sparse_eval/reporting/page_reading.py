"""The page's section on what is read: tokens and bytes, who is ahead by which, and the pictures."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from sparse_eval.reporting.dashboard import picture
from sparse_eval.reporting.frontiers import ranking_sentence
from sparse_eval.reporting.summarise import split_settings

PREFIX = "read_"
"""How the names of this section's pictures begin."""


def is_reading(path: Path) -> bool:
    return path.stem.startswith(PREFIX)


def reading_section(rows: pd.DataFrame, pictures: Sequence[Path]) -> str:
    """rows: recall, of any settings."""
    lines = []
    for name, part in split_settings(rows).items():
        where = f"<b>{html.escape(name)}</b>: " if name else ""
        lines.append(f'<p class="hint">{where}{html.escape(ranking_sentence(part))}</p>')
    figures = "".join(
        f'<figure style="margin:8px 0">{picture(path)}</figure>'
        for path in pictures
        if is_reading(path)
    )
    figures = figures.replace("<img ", '<img style="max-width:100%" ')
    return (
        '<section id="reading"><div class="head"><h2>Tokens and bytes</h2></div>'
        f"{''.join(lines)}{figures}</section>"
    )
