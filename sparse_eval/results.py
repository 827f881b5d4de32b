"""A run's files beside its journal: parquet, summary; and rows of many runs read back.

Journal, CellStore, cell_key, provenance and summarise_recall can be imported from here too.
"""

from __future__ import annotations

import glob
import io
import os
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from sparse_eval.provenance import code_hash, provenance
from sparse_eval.reporting.summarise import summarise_recall
from sparse_eval.storage.cells import CellStore, cell_key
from sparse_eval.storage.columns import (
    COMMON_COLUMNS,
    FIDELITY_COLUMNS,
    LATENCY_COLUMNS,
    LM_EVAL_COLUMNS,
    NEEDLE_COLUMNS,
    RECALL_COLUMNS,
    SCHEMA,
)
from sparse_eval.storage.files import to_json, write_atomic
from sparse_eval.storage.journal import Journal
from sparse_eval.storage.table import frame_of

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


def write_parquet(rows: Iterable[Row] | pd.DataFrame | Path | str, path: Path | str) -> None:
    """Rows, or the journal at a path, as one parquet file."""
    if isinstance(rows, Path | str):
        rows = Journal.read(rows)
    buffer = io.BytesIO()
    frame_of(rows).to_parquet(buffer, index=False)
    write_atomic(Path(path), buffer.getvalue())


def write_summary(path: Path | str, summary: Mapping[str, Any]) -> None:
    """summary.json: headline, config, provenance. path: the file, or the run's folder."""
    path = Path(path) / "summary.json" if os.path.isdir(path) else Path(path)
    write_atomic(path, (to_json(summary, indent=2) + "\n").encode())


def load(where: str | Path | Iterable[str | Path]) -> pd.DataFrame:
    """Rows of runs, each measurement once. where: folders, row files, globs (`outputs/**`).

    A run that was killed counts with the cells that it finished. Raises ValueError if nothing is
    there or if the rows' schemas differ."""
    sources = row_sources([where] if isinstance(where, str | Path) else list(where))
    frames = {source: with_run(read_rows(source), source) for source in sources}
    frames = {source: frame for source, frame in frames.items() if len(frame)}
    if not frames:
        raise ValueError(f"no rows in {where}: expected folders with rows.jsonl or rows.parquet")
    check_schemas(frames)
    parts = [frame.dropna(axis="columns", how="all") for frame in frames.values()]
    columns = dict.fromkeys(name for frame in frames.values() for name in frame)
    return frame_of(pd.concat(parts, ignore_index=True).reindex(columns=list(columns)))


def with_run(rows: pd.DataFrame, source: Path) -> pd.DataFrame:
    """Timings with the run that took them: timed again, the same cell is another measurement."""
    if "task" not in rows or "run" in rows or not (rows["task"] == "latency").any():
        return rows
    name = "/".join(source.resolve().parts[-2:])
    everywhere = pd.Series(name, rows.index, dtype=object)
    return rows.assign(run=everywhere.where(rows["task"] == "latency", None))


def row_sources(places: list[str | Path]) -> list[Path]:
    """Each folder that holds rows, or file of rows, that the places name; jobs of a sweep too."""
    found: dict[Path, None] = {}
    for place in places:
        # A job's folder may be called 0_budget=[256,512]: names that exist are no patterns.
        exact = [Path(place)] if os.path.exists(place) else []
        matches = exact or [Path(m) for m in glob.glob(str(place), recursive=True)]
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
