"""Rows on disk: a run's journal, the store of finished cells, parquet, summary, reading back."""

from __future__ import annotations

import glob
import hashlib
import io
import json
import os
import re
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from sparse_eval.columns import (
    COMMON_COLUMNS,
    FIDELITY_COLUMNS,
    FLAG,
    INTEGER,
    LATENCY_COLUMNS,
    LM_EVAL_COLUMNS,
    NEEDLE_COLUMNS,
    NUMBER,
    RECALL_COLUMNS,
    SCHEMA,
    frame_of,
)
from sparse_eval.files import to_json, write_atomic
from sparse_eval.provenance import code_hash, provenance
from sparse_eval.summarise import summarise_recall

if TYPE_CHECKING:
    from sparse_eval.core import Row

__all__ = [
    "COMMON_COLUMNS",
    "FIDELITY_COLUMNS",
    "LATENCY_COLUMNS",
    "LM_EVAL_COLUMNS",
    "NEEDLE_COLUMNS",
    "RECALL_COLUMNS",
    "SCHEMA",
    "CellStore",
    "Journal",
    "cell_key",
    "code_hash",
    "frame_of",
    "load",
    "provenance",
    "summarise_recall",
    "write_parquet",
    "write_summary",
]


class Journal:
    """`rows.jsonl` of a run folder: a cell's rows are on disk when append returns.

    An existing journal is continued; a line that an earlier run left torn is cut off first."""

    def __init__(self, folder: Path | str) -> None:
        self.path = Path(folder) / "rows.jsonl"
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
        path = Path(path) / "rows.jsonl" if Path(path).is_dir() else Path(path)
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


class CellStore:
    """`<cache_dir>/cells/<cell_key>`: rows of finished cells, shared by runs and processes.

    A file holds the SHA-256 of its rows and the rows; one that does not match is thrown away."""

    def __init__(self, cache_dir: Path | str) -> None:
        self.folder = Path(cache_dir) / "cells"

    def get(self, key: str) -> list[Row] | None:
        """The cell's rows, or None: not there, or damaged and now discarded (with a warning)."""
        path = self._path(key)
        try:
            digest, body = path.read_bytes().split(b"\n", 1)
            if hashlib.sha256(body).hexdigest().encode() != digest:
                raise ValueError("its checksum does not match")
            return [row_of(line) for line in body.splitlines()]
        except FileNotFoundError:
            return None
        except (ValueError, OSError) as error:
            warnings.warn(f"damaged cell {path} discarded: {error}", stacklevel=2)
            path.unlink(missing_ok=True)
            return None

    def has(self, key: str) -> bool:
        return self._path(key).is_file()

    def put(self, key: str, rows: Iterable[Row]) -> None:
        """Stores a finished cell; the last of two writers wins, and both wrote the same."""
        body = "".join(to_json(row) + "\n" for row in rows).encode()
        write_atomic(self._path(key), hashlib.sha256(body).hexdigest().encode() + b"\n" + body)

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


def write_parquet(rows: Iterable[Row] | pd.DataFrame | Path | str, path: Path | str) -> None:
    """Rows, or the journal at a path, as one parquet file."""
    if isinstance(rows, Path | str):
        rows = Journal.read(rows)
    buffer = io.BytesIO()
    frame_of(rows).to_parquet(buffer, index=False)
    write_atomic(Path(path), buffer.getvalue())


def write_summary(path: Path | str, summary: Mapping[str, Any]) -> None:
    """summary.json: headline, config, provenance. path: the file, or the run's folder."""
    path = Path(path) / "summary.json" if Path(path).is_dir() else Path(path)
    write_atomic(path, (to_json(summary, indent=2) + "\n").encode())


def load(where: str | Path | Iterable[str | Path]) -> pd.DataFrame:
    """Rows of runs, each measurement once. where: folders, row files, globs (`outputs/**`).

    A run that was killed counts with the cells that it finished. Raises ValueError if nothing is
    there or if the rows' schemas differ."""
    sources = row_sources([where] if isinstance(where, str | Path) else list(where))
    frames = {source: read_rows(source) for source in sources}
    frames = {source: frame for source, frame in frames.items() if len(frame)}
    if not frames:
        raise ValueError(f"no rows in {where}: expected folders with rows.jsonl or rows.parquet")
    check_schemas(frames)
    parts = [frame.dropna(axis="columns", how="all") for frame in frames.values()]
    columns = dict.fromkeys(name for frame in frames.values() for name in frame)
    return frame_of(pd.concat(parts, ignore_index=True).reindex(columns=list(columns)))


def row_sources(places: list[str | Path]) -> list[Path]:
    """Each folder that holds rows, or file of rows, that the places name; jobs of a sweep too."""
    found: dict[Path, None] = {}
    for place in places:
        matches = [Path(m) for m in glob.glob(str(place), recursive=True)]
        if not matches:
            raise ValueError(f"nothing at {place}: expected a run folder, a rows file or a glob")
        for match in sorted(matches):
            if match.is_file():
                if match.name in ("rows.jsonl", "rows.parquet"):
                    found[match.parent] = None
                elif match.suffix in (".jsonl", ".parquet") and match.name != "samples.jsonl":
                    found[match] = None
                continue
            inside = {path.parent for path in match.rglob("rows.*") if path.suffix != ".tmp"}
            found.update(dict.fromkeys([match] if match in inside else sorted(inside)))
    return list(found)


def read_rows(source: Path) -> pd.DataFrame:
    """A folder's rows: its journal, or its parquet file where that is as new or alone."""
    if source.is_file():
        return frame_of(
            pd.read_parquet(source) if source.suffix == ".parquet" else Journal.read(source)
        )
    journal, parquet = source / "rows.jsonl", source / "rows.parquet"
    if parquet.exists() and not (
        journal.exists() and journal.stat().st_mtime > parquet.stat().st_mtime
    ):
        try:
            return frame_of(pd.read_parquet(parquet))
        except (OSError, ValueError) as error:
            if not journal.exists():
                raise ValueError(f"cannot read {parquet}: {error}") from error
            warnings.warn(f"{parquet} is damaged ({error}): reading rows.jsonl", stacklevel=2)
    return frame_of(Journal.read(journal))


def check_schemas(frames: Mapping[Path, pd.DataFrame]) -> None:
    example: dict[int, Path] = {}
    for source, frame in frames.items():
        if "schema" not in frame:
            raise ValueError(f"rows in {source} have no schema column")
        example.update({int(schema): source for schema in frame["schema"].unique()})
    if len(example) > 1:
        listed = ", ".join(f"{schema} ({source})" for schema, source in sorted(example.items()))
        raise ValueError(f"rows of different schemas cannot be pooled: {listed}")
    if max(example) > SCHEMA:
        raise ValueError(f"rows have schema {max(example)}, this version reads up to {SCHEMA}")
