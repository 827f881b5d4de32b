"""Times and sizes as people read them."""

from __future__ import annotations


def duration(seconds: float) -> str:
    """70 -> "1 min 10 s"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    parts = [(hours, "h"), (minutes, "min"), (rest, "s")]
    return " ".join(f"{n} {unit}" for n, unit in parts if n) or "0 s"


def byte_size(num_bytes: float) -> str:
    """2**31 -> "2.0 GiB"."""
    if num_bytes >= 2**30:
        return f"{num_bytes / 2**30:.1f} GiB"
    return f"{num_bytes / 2**20:.0f} MiB"
