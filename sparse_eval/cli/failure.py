"""How a run ends early: one line, the traceback kept, exit code 1; signals stop it cleanly."""

from __future__ import annotations

import json
import logging
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from sparse_eval.one_line import first_line
from sparse_eval.storage.files import to_json, write_atomic

log = logging.getLogger("sparse_eval")

FAILURE_FILE = "failure.json"
SUMMARY_FILE = "summary.json"
GO_ON = "every finished cell is kept: run the same command again to go on"


class Stopped(BaseException):
    """A signal asked the process to end. Not an Exception: nothing handles it as a failure."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class PartsFailed(Exception):
    """Some policies or budgets of a job failed, the others are measured. failures: one a part."""

    def __init__(self, failures: Sequence[dict[str, str]], num_parts: int) -> None:
        self.failures = list(failures)
        first = self.failures[0]
        others = "" if len(self.failures) == num_parts else ", the others are measured"
        super().__init__(
            f"{len(self.failures)} of {num_parts} (policy, budget) failed{others}; "
            f"{first['part']}: {first['error']}"
        )


def stop_on_signals() -> None:
    """SIGTERM and SIGUSR1 (what schedulers send before preemption) end the process between two
    writes, resumable. A handler that somebody else has set, a launcher's, stays."""
    if threading.current_thread() is not threading.main_thread():
        return
    for number in (signal.SIGTERM, signal.SIGUSR1):
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, _stop)


def _stop(number: int, frame: FrameType | None) -> None:
    raise Stopped(number)


@contextmanager
def stoppable() -> Iterator[None]:
    """Ctrl-C and signals end the process with the shell's exit code for them, and one line."""
    try:
        yield
    except KeyboardInterrupt:
        print(f"\nstopped; {GO_ON}", file=sys.stderr)
        sys.exit(130)
    except Stopped as stop:
        log.info("stopped by %s", stop)
        print(f"stopped by {stop}; {GO_ON}", file=sys.stderr)
        sys.exit(128 + stop.number)


def run_guarded(action: Callable[[], Any], folder: Path, overrides: Sequence[str] = ()) -> bool:
    """Whether the action ran through. A failure is said in one line and kept in failure.json and
    run.log; Ctrl-C and signals end the process with the shell's exit code for them."""
    forget_end(folder)
    try:
        with stoppable():
            action()
        return True
    except Exception as error:
        log.exception("the run failed")
        print(
            f"error: {told(error)}\n"
            f"       traceback in {folder / 'run.log'}; finished cells are kept",
            file=sys.stderr,
        )
        keep_failure(folder, failure_of(error) | {"overrides": list(overrides)})
        return False


def forget_end(folder: Path) -> None:
    """A job that runs again in its old folder has not ended: not well, and not badly."""
    for name in (FAILURE_FILE, SUMMARY_FILE):
        with suppress(OSError):
            (folder / name).unlink(missing_ok=True)


def told(error: BaseException) -> str:
    """The error's type and first line."""
    name = "" if isinstance(error, PartsFailed) else f"{type(error).__name__}: "
    return name + (first_line(error) if str(error).strip() else "")


def failure_of(error: BaseException) -> dict[str, Any]:
    """What is kept of a failure."""
    text = "".join(traceback.format_exception(error))
    parts = error.failures if isinstance(error, PartsFailed) else []
    return {"error": told(error), "traceback": text, "parts": parts}


def keep_failure(folder: Path, failure: dict[str, Any]) -> None:
    """failure.json in a job's folder; where even that cannot be written, the line was said."""
    try:
        write_atomic(folder / FAILURE_FILE, (to_json(failure, indent=2) + "\n").encode())
    except OSError as error:
        print(f"       {FAILURE_FILE} not written: {error}", file=sys.stderr)


def read_failure(folder: Path) -> dict[str, Any] | None:
    path = folder / FAILURE_FILE
    return json.loads(path.read_text()) if path.is_file() else None
