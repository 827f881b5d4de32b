"""The journals of a run: rows.jsonl, samples.jsonl; a line is on disk once its cell is measured."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from sparse_eval.storage.columns import FLAG, INTEGER, NUMBER
from sparse_eval.storage.files import to_json

if TYPE_CHECKING:
    from sparse_eval.core import Row


class Journal:
    """A run folder's `rows.jsonl`, or another name: a cell's rows are on disk when append returns.

    An existing journal is continued; a line that an earlier run left torn is cut off first."""

    def __init__(self, folder: Path | str, name: str = "rows.jsonl") -> None:
        self.path = Path(folder) / name
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.touch()
        self._cut(self.path.read_bytes().rfind(b"\n") + 1)

    def append(self, rows: Iterable[Row]) -> None:
        """Writes all rows of one cell, or none of them: OSError leaves the journal as it was."""
        data = "".join(to_json(row) + "\n" for row in rows).encode()
        before = self.path.stat().st_size
        try:
            with self.path.open("ab") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        except OSError:
            self._cut(before)
            raise

    def _cut(self, size: int) -> None:
        if self.path.stat().st_size > size:
            os.truncate(self.path, size)

    @staticmethod
    def read(path: Path | str) -> list[Row]:
        """Rows of a journal, or of a folder's, without a torn last line.

        Raises ValueError for a damaged line before the last."""
        path = Path(path) / "rows.jsonl" if os.path.isdir(path) else Path(path)
        *lines, torn = path.read_bytes().split(b"\n")
        rows = []
        for number, line in enumerate(lines, start=1):
            try:
                rows.append(row_of(line))
            except ValueError as error:
                if number < len(lines) or torn:
                    raise ValueError(
                        f"{path}, line {number}: expected a row as JSON, got {line[:60]!r}"
                    ) from error
        return rows


def row_of(line: bytes | str) -> Row:
    """A row from its JSON line: null in a column of numbers is NaN again."""
    row = json.loads(line)
    if not isinstance(row, dict):
        raise ValueError(f"expected a JSON object, got {type(row).__name__}")
    numbers = NUMBER | INTEGER | FLAG
    return {k: float("nan") if v is None and k in numbers else v for k, v in row.items()}
