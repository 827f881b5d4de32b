"""What a person sees of a run: stages, bars, warnings. A pipe gets a line now and then."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress
from rich.text import Text

from sparse_eval.terminal import labelled, make_console
from sparse_eval.units import duration

log = logging.getLogger("sparse_eval")

Tick = Callable[[int], None]

LINE_SECONDS = 20.0
"""Where no bar is drawn, a line says how far the work is, at most this often."""


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

    console: Console = field(default_factory=lambda: make_console(110, soft_wrap=True))
    verbose: int = 0
    level: Level | None = None
    _live: RichProgress | None = None
    _warned: set[str] = field(default_factory=set)
    _told_seconds: float = 0.0
    _spoke: float = field(default_factory=lambda: time.perf_counter())

    def __post_init__(self) -> None:
        if self.level is not None:
            total = f" of {self.level.total}" if self.level.total else ""
            job = f"\njob {self.level.number + 1}{total}"
            self.console.print(Text.assemble((job, "bold"), f"  {self.level.name}"))

    @property
    def draws(self) -> bool:
        return self.console.is_terminal and not (self.level and not self.level.total)

    def say(self, text: str) -> None:
        """A line that is not broken, so that a path in it can be copied."""
        self.console.print(text, soft_wrap=True)

    def _untold(self) -> float:
        """A clock of the seconds that no line has told yet: what a line tells is its own time,
        without the stages and bars inside that told theirs."""
        return time.perf_counter() - self._told_seconds

    def _tell(self, text: str, seconds: float) -> None:
        self._told_seconds += seconds
        self._spoke = time.perf_counter()
        self.console.print(f"{text} {seconds:.1f} s", style="dim")

    @contextmanager
    def stage(self, what: str) -> Iterator[None]:
        """Say what begins; when it took over a second, say how long."""
        log.info("%s", what)
        started = self._untold()
        status = self.console.status(Text(f"{what} …")) if self.draws and not self._live else None
        if status:
            status.start()
        try:
            yield
        finally:
            if status:
                status.stop()
        seconds = self._untold() - started
        if seconds >= 1 or self.verbose:
            self._tell(f"{what}:", seconds)

    @contextmanager
    def bar(
        self, what: str, total: int, unit: str = "", *, is_one_of_many: bool = False
    ) -> Iterator[Tick]:
        """A bar on a terminal, a line now and then elsewhere; at the end a line with the time, for
        one of many only in the log. Yields tick(n)."""
        unit = unit or "tokens"
        started, untold = time.perf_counter(), self._untold()
        outer = self._live is None
        if self._live is None:
            self._live = RichProgress(
                TextColumn("{task.description}", markup=False),
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
        done = 0

        def tick(n: int) -> None:
            nonlocal done
            done += n
            live.advance(task, n)
            now = time.perf_counter()
            if not self.draws and done < total and now - self._spoke >= LINE_SECONDS:
                self._spoke = now
                self.say(f"{what}: {done:,} of {total:,} {unit}, {duration(now - started)}")

        try:
            yield tick
        finally:
            live.remove_task(task)
            if outer:
                live.stop()
                self._live = None
        seconds = self._untold() - untold
        log.info("%s: %d %s in %.1f s", what, total, unit, seconds)
        if not is_one_of_many or self.verbose:
            self._tell(f"{what}: {total:,} {unit} in", seconds)

    def note(self, text: str) -> None:
        log.info("%s", text)
        if self.verbose:
            self.console.print(text, style="dim")

    def warn(self, text: str, *, once: str = "") -> None:
        """once: what it is about, of which the terminal gets the first warning alone."""
        log.warning("%s", text)
        if once and once in self._warned:
            return
        self._warned.add(once)
        self.console.print(labelled("warning:", text))
