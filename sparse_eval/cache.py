"""What lies in a cache folder, and making room in it: `python -m sparse_eval.cache`."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from sparse_eval.inputs.store import locked
from sparse_eval.terminal import make_console

KINDS = {
    "captures": "K, V and decode queries of a prompt; made again by one prefill",
    "prefills": "a prompt's dense cache; made again by one prefill",
    "cells": "measured rows; made again only by measuring",
    "failures": "what failed, so that a sweep does not try it again",
}
LARGE = ("captures", "prefills")
"""Kinds that count against cache_gb: large, cheap to make again. Cells never go by themselves."""

STALE_SECONDS = 3600


@dataclass(frozen=True)
class Entry:
    kind: str
    path: Path
    size: int
    used: float  # seconds since the epoch: when it was written or last read


def entries(cache_dir: Path, kinds: Sequence[str] = tuple(KINDS)) -> list[Entry]:
    """Files of the cache, those used longest ago first."""
    found = []
    for kind in kinds:
        for path in (cache_dir / kind).glob("*"):
            if path.name.startswith(".") or path.suffix == ".lock":
                continue
            with suppress(FileNotFoundError):  # another process made room
                stat = path.stat()
                found.append(Entry(kind, path, stat.st_size, stat.st_mtime))
    return sorted(found, key=lambda entry: entry.used)


def make_room(cache_dir: Path, limit_gb: float, keep: Path | None = None) -> list[Entry]:
    """Removes captures and prefills, those used longest ago first, until the rest takes at most
    limit_gb (1e9 bytes); `keep` stays. Returns what was removed."""
    remove_stale(cache_dir)
    found = entries(cache_dir, LARGE)
    excess = sum(entry.size for entry in found) - limit_gb * 1e9
    removed = []
    for entry in found:
        if excess <= 0:
            break
        if entry.path == keep:
            continue
        entry.path.unlink(missing_ok=True)
        excess -= entry.size
        removed.append(entry)
    return removed


def remove_stale(cache_dir: Path) -> None:
    """Unfinished files of processes that were killed, and locks, an hour old or more."""
    for kind in KINDS:
        for path in [*(cache_dir / kind).glob(".*"), *(cache_dir / kind).glob("*.lock")]:
            with suppress(FileNotFoundError):
                if time.time() - path.stat().st_mtime > STALE_SECONDS:
                    path.unlink()


def touch(path: Path) -> None:
    """Notes that the file was used; where that cannot be written, it looks older than it is."""
    with suppress(OSError):
        os.utime(path)


@contextmanager
def making(path: Path, what: str) -> Iterator[None]:
    """Of several processes that want `path`, one makes it and the others wait. Where no lock can
    be written (a read-only or full disk) each makes its own."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = locked(path, what)
        lock.__enter__()
    except OSError:
        yield
        return
    try:
        yield
    finally:
        lock.__exit__(None, None, None)


def listing(cache_dir: Path) -> Table:
    """One line a kind."""
    table = Table(title=str(cache_dir), title_justify="left")
    for column in ("kind", "files", "MB", "used last", "what it is"):
        table.add_column(column, justify="right" if column in ("files", "MB") else "left")
    for kind, what in KINDS.items():
        found = entries(cache_dir, [kind])
        last = time.strftime("%Y-%m-%d %H:%M", time.localtime(found[-1].used)) if found else ""
        size = sum(entry.size for entry in found) / 1e6
        table.add_row(kind, f"{len(found):,}", f"{size:,.1f}", last, what)
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m sparse_eval.cache", description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=Path("outputs/cache"))
    parser.add_argument(
        "--prune", type=float, metavar="GB", help="remove captures and prefills down to GB"
    )
    parser.add_argument(
        "--clear", nargs="+", choices=KINDS, metavar="KIND", help=f"remove: {', '.join(KINDS)}"
    )
    options = parser.parse_args(arguments)
    if not os.path.isdir(options.folder):
        print(f"error: no cache folder at {options.folder}", file=sys.stderr)
        return 2
    if options.prune is not None and not options.prune >= 0:
        print(f"error: --prune must be GB >= 0, got {options.prune}", file=sys.stderr)
        return 2
    try:
        removed = make_room(options.folder, options.prune) if options.prune is not None else []
        for entry in entries(options.folder, options.clear or []):
            entry.path.unlink(missing_ok=True)
            removed.append(entry)
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    console = make_console(110)
    if options.prune is not None or options.clear:
        size = sum(entry.size for entry in removed) / 1e6
        console.print(f"removed {len(removed):,} files, {size:,.1f} MB")
    console.print(listing(options.folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
