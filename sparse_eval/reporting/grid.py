"""A table of texts for the terminal."""

from __future__ import annotations

from rich.table import Table

from sparse_eval.reporting.tables_live import TextTable


def grid_of(table: TextTable, title: str | None = None) -> Table:
    grid = Table(title=title, caption=table.note, title_justify="left", caption_justify="left")
    for name in table.head:
        is_left = name == table.head[0] or name in table.left
        grid.add_column(name, justify="left" if is_left else "right", overflow="fold")
    for line in table.lines:
        grid.add_row(*line)
    return grid
