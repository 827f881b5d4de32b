"""Strict JSON and atomic writes: what every file of a run is made with."""

from __future__ import annotations

import json
import math
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np


def to_json(value: Any, *, indent: int | None = None) -> str:
    """Strict JSON: NaN becomes null. Raises ValueError for infinities and for unknown types."""
    separators = (",", ":") if indent is None else None
    return json.dumps(
        plain(value), indent=indent, separators=separators, ensure_ascii=False, allow_nan=False
    )


def plain(value: Any) -> Any:
    """The value in JSON's own types: tuples become lists, NumPy scalars numbers, NaN None."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        if math.isinf(value):
            raise ValueError(f"expected a finite number or NaN, got {value}")
        return None if math.isnan(value) else value
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {plain_key(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | np.ndarray):
        return [plain(item) for item in value]
    raise ValueError(f"expected a number, text, list or mapping, got {type(value).__name__}")


def plain_key(key: Any) -> str:
    if not isinstance(key, str):
        raise ValueError(f"expected text as a key, got {key!r}")
    return key


def write_atomic(path: Path, data: bytes) -> None:
    """Whoever reads `path`, at any moment, sees the old file or the whole new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
