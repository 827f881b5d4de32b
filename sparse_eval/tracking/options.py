"""conf/tracking/'s keys, checked. Loads nothing: a bad one ends a run before anything is there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MODES = ("offline", "online", "disabled")


def check_tracking(tracking: Mapping[str, Any]) -> None:
    """Raises ValueError, with one line, for a tracker or a mode that does not exist."""
    if tracking.get("name") not in ("none", "wandb"):
        raise ValueError(f"tracking must be one of none, wandb, got {tracking.get('name')!r}")
    if tracking["name"] == "none":
        return
    if tracking["mode"] not in MODES:
        raise ValueError(
            f"tracking.mode must be one of {', '.join(MODES)}, got {tracking['mode']!r}"
        )
    for key in ("init_timeout", "finish_timeout"):
        if not isinstance(tracking[key], int | float) or tracking[key] <= 0:
            raise ValueError(f"tracking.{key} must be seconds > 0, got {tracking[key]!r}")
