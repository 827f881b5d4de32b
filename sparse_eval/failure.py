"""How a run fails: one line, the traceback in run.log, exit code 1; 130 for Ctrl-C."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

log = logging.getLogger("sparse_eval")


class JobFailed(RuntimeError):
    """A job failed and has said so; Hydra's sweep goes on with the next."""


def run_guarded(action: Callable[[], Any], folder: Path) -> None:
    try:
        action()
    except KeyboardInterrupt:
        print(
            "\nstopped; every finished cell is kept: run the same command again to go on",
            file=sys.stderr,
        )
        sys.exit(130)
    except Exception as error:
        log.exception("the run failed")
        reason = str(error).strip().splitlines()
        print(
            f"error: {type(error).__name__}: {reason[0] if reason else ''}\n"
            f"       traceback in {folder / 'run.log'}; finished cells are kept",
            file=sys.stderr,
        )
        raise SystemExit(1) from None
