"""What a person at the terminal sees of a run: stages, bars, warnings. Quiet in a pipe."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

log = logging.getLogger("sparse_eval")


def make_console() -> Console:
    """The terminal; a pipe gets plain lines 110 wide."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=110, soft_wrap=True)


@dataclass(frozen=True)
class Level:
    """Which job of a sweep this is. total: 0 in a launcher's worker, which shares the terminal
    with others and draws no bars."""

    number: int
    total: int
    name: str


@dataclass
class Progress:
    """level: the job of a sweep, whose jobs are a bar above the job's own."""

    console: Console = field(default_factory=make_console)
    verbose: int = 0
    level: Level | None = None
    _live: RichProgress | None = None
    _warned: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        if self.level is not None:
            total = f" of {self.level.total}" if self.level.total else ""
            words = f"\n[bold]job {self.level.number + 1}{total}[/bold]  {escape(self.level.name)}"
            self.console.print(words)

    @property
    def draws(self) -> bool:
        return self.console.is_terminal and not (self.level and not self.level.total)

    @contextmanager
    def stage(self, what: str) -> Iterator[None]:
        """Say what begins; when it took over a second, say how long."""
        log.info("%s", what)
        started = time.perf_counter()
        status = self.console.status(f"{what} …") if self.draws and not self._live else None
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
    def bar(
        self, what: str, total: int, unit: str = "", *, is_one_of_many: bool = False
    ) -> Iterator[Callable[[int], None]]:
        """A bar on a terminal; one line with the time elsewhere, and for one of many that line only
        in the log. Yields tick(n)."""
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
                disable=not self.draws,
            )
            self._live.start()
            if self.level and self.level.total > 1:
                jobs = self._live.add_task("jobs", total=self.level.total)
                self._live.update(jobs, completed=self.level.number)
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
        if not is_one_of_many or self.verbose:
            told = f"{what}: {total:,} {unit or 'tokens'} in {seconds:.1f} s"
            self.console.print(f"[dim]{told}[/dim]")

    def note(self, text: str) -> None:
        log.info("%s", text)
        if self.verbose:
            self.console.print(f"[dim]{text}[/dim]")

    def warn(self, text: str, *, once: str = "") -> None:
        """once: what it is about, of which the terminal gets the first warning alone."""
        log.warning("%s", text)
        if once and once in self._warned:
            return
        self._warned.add(once)
        self.console.print(f"[yellow]warning:[/yellow] {text}")
