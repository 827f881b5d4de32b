"""An error as one line, whoever raised it."""

from __future__ import annotations


def first_line(error: BaseException) -> str:
    """Its message's first line; the next ones too where it ends with a colon, as a heading does.
    The type's name where there is no message."""
    told = ""
    for line in filter(None, (line.strip() for line in str(error).splitlines())):
        told = f"{told} {line}".strip()
        if not told.endswith(":"):
            break
    return told or type(error).__name__
