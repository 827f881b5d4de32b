"""Finished cells, kept by content: what was measured once is never measured again."""

from __future__ import annotations

import hashlib
import json
import os
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparse_eval.storage.files import to_json, write_atomic
from sparse_eval.storage.journal import row_of

if TYPE_CHECKING:
    from sparse_eval.core import Row


class CellStore:
    """`<cache_dir>/cells/<cell_key>`: rows of finished cells, shared by runs and processes.

    A file holds the SHA-256 of its rows and the rows; one that does not match is thrown away."""

    def __init__(
        self, cache_dir: Path | str, on_error: Callable[[str], None] | None = None
    ) -> None:
        """on_error: told once where cells cannot be kept, and the run goes on; None: OSError."""
        self.folder = Path(cache_dir) / "cells"
        self.on_error = on_error
        self.has_told = False

    def get(self, key: str) -> list[Row] | None:
        """The cell's rows, or None: not there, or damaged and now discarded (with a warning)."""
        path = self._path(key)
        if not os.path.isfile(path):  # nor where the folder's name is no folder's
            return None
        try:
            digest, body = path.read_bytes().split(b"\n", 1)
            if hashlib.sha256(body).hexdigest().encode() != digest:
                raise ValueError("its checksum does not match")
            return [row_of(line) for line in body.splitlines()]
        except FileNotFoundError:
            return None
        except (ValueError, OSError) as error:
            warnings.warn(f"damaged cell {path} discarded: {error}", stacklevel=2)
            with suppress(OSError):
                path.unlink()
            return None

    def has(self, key: str) -> bool:
        return os.path.isfile(self._path(key))

    def put(self, key: str, rows: Iterable[Row]) -> None:
        """Stores a finished cell; the last of two writers wins, and both wrote the same."""
        body = "".join(to_json(row) + "\n" for row in rows).encode()
        data = hashlib.sha256(body).hexdigest().encode() + b"\n" + body
        try:
            write_atomic(self._path(key), data)
        except OSError as error:
            if self.on_error is None:
                raise
            if not self.has_told:
                self.on_error(f"cells are not kept in {self.folder} ({error}); the run goes on")
            self.has_told = True

    def _path(self, key: str) -> Path:
        if not re.fullmatch("[0-9a-f]{64}", key):
            raise ValueError(f"cell key must be 64 hexadecimal digits, got {key!r}")
        return self.folder / key


def cell_key(parts: Mapping[str, Any]) -> str:
    """SHA-256 of everything that can change a cell, as canonical JSON.

    Raises ValueError for NaN, infinities and objects that JSON cannot hold."""
    text = json.dumps(
        parts, sort_keys=True, separators=(",", ":"), allow_nan=False, default=not_canonical
    )
    return hashlib.sha256(text.encode()).hexdigest()


def not_canonical(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    raise ValueError(f"a cell key holds numbers, text, lists and mappings, got {value!r}")
