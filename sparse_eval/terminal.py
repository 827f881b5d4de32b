"""The terminal of every command. A word is shown as it is: a folder's `[a,b]` is no markup."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text


def make_console(pipe_width: int, *, soft_wrap: bool = False) -> Console:
    """The terminal; a pipe gets tables of at most pipe_width characters, and with soft_wrap lines
    as long as they are."""
    console = Console(markup=False, emoji=False, highlight=False)
    if console.is_terminal:
        return console
    return Console(
        markup=False, emoji=False, highlight=False, width=pipe_width, soft_wrap=soft_wrap
    )


def labelled(label: str, text: str) -> Text:
    """A line that a yellow label begins."""
    return Text.assemble((label, "yellow"), f" {text}")
