"""What a person at the terminal sees of a run: stages, bars, warnings. Quiet in a pipe."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

log = logging.getLogger("sparse_eval")


def make_console() -> Console:
    """The terminal; a pipe gets plain lines 110 wide."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=110, soft_wrap=True)


@dataclass
class Progress:
    console: Console = field(default_factory=make_console)
    verbose: int = 0
    _live: RichProgress | None = None

    @contextmanager
    def stage(self, what: str) -> Iterator[None]:
        """Say what begins; when it took over a second, say how long."""
        log.info("%s", what)
        started = time.perf_counter()
        status = (
            self.console.status(f"{what} …")
            if self.console.is_terminal and not self._live
            else None
        )
        if status:
            status.start()
        try:
            yield
        finally:
            if status:
                status.stop()
        seconds = time.perf_counter() - started
        if seconds >= 1 or self.verbose:
            self.console.print(f"[dim]{what}: {seconds:.1f} s[/dim]")

    @contextmanager
    def bar(self, what: str, total: int, unit: str = "") -> Iterator[Callable[[int], None]]:
        """A bar on a terminal; one line with the time elsewhere. Yields tick(n)."""
        started = time.perf_counter()
        outer = self._live is None
        if self._live is None:
            self._live = RichProgress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                console=self.console,
                transient=True,
                disable=not self.console.is_terminal,
            )
            self._live.start()
        live = self._live
        task = live.add_task(what, total=total)
        try:
            yield lambda n: live.advance(task, n)
        finally:
            live.remove_task(task)
            if outer:
                live.stop()
                self._live = None
        seconds = time.perf_counter() - started
        log.info("%s: %d %s in %.1f s", what, total, unit or "steps", seconds)
        self.console.print(f"[dim]{what}: {total:,} {unit or 'tokens'} in {seconds:.1f} s[/dim]")

    def note(self, text: str) -> None:
        log.info("%s", text)
        if self.verbose:
            self.console.print(f"[dim]{text}[/dim]")

    def warn(self, text: str) -> None:
        log.warning("%s", text)
        self.console.print(f"[yellow]warning:[/yellow] {text}")
