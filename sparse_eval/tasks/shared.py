"""Failures of what every policy of a job shares: its model, its prompts, their captures."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class SharedFailed(Exception):
    """No policy and no budget can be measured; __cause__ is the error, to be told as it is."""


@contextmanager
def shared() -> Iterator[None]:
    """What fails inside fails whatever the policy: it is told once, and no policy tried alone.

    Raises SharedFailed from the error."""
    try:
        yield
    except SharedFailed:
        raise
    except Exception as error:
        raise SharedFailed(str(error)) from error
