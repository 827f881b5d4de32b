"""What lm-eval prints goes to the log."""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Iterator

log = logging.getLogger("sparse_eval")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """What lm-eval and its tasks print goes to the log: bars, counts, advice."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            yield
    finally:
        for line in printed.getvalue().splitlines():
            log.debug("lm-eval: %s", line)
