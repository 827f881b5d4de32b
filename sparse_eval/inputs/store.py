"""Files and folders that are made once and found again: locks, hashes, atomic renames."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import sys
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

MANIFEST = "manifest.json"
BLOCK_BYTES = 1 << 26
READ_BYTES = 1 << 20

log = logging.getLogger(__name__)


class Unavailable(RuntimeError):
    """A model or text would have to be downloaded and cannot be; the message is one line."""


def say(line: str, level: int = logging.INFO) -> None:
    """A line for the person who waits, and for the log."""
    log.log(level, "%s", line)
    print(line, file=sys.stderr, flush=True)


def user_cache() -> Path:
    """Where models and texts are kept unless told otherwise: $XDG_CACHE_HOME or ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    root = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    return root / "sparse_eval" / "models"


def make_folder(folder: Path, key: str) -> Path:
    """Create it; a path that cannot be one is a ValueError that names the configuration key."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"{key} must be a folder that can be written, got {folder} ({error.strerror})"
        ) from None
    return folder


@contextmanager
def locked(path: Path, what: str) -> Iterator[None]:
    """Hold `path`'s lock (a file beside it); says so when another process holds it first."""
    lock = FileLock(path.with_name(path.name + ".lock"))
    try:
        lock.acquire(timeout=0.5)
    except Timeout:
        say(f"another process is {what}: waiting for it")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def checksum(path: Path) -> str:
    """The CRC-32 of every 64 MiB block, in hex: against damage, not against malice. Several times
    as fast as sha256, and on several cores: a checkpoint is checked whenever it is loaded."""

    def block_crc(offset: int) -> str:
        crc = 0
        with path.open("rb") as file:
            file.seek(offset)
            for _ in range(BLOCK_BYTES // READ_BYTES):
                crc = zlib.crc32(file.read(READ_BYTES), crc)
        return f"{crc:08x}"

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return "".join(pool.map(block_crc, range(0, path.stat().st_size, BLOCK_BYTES)))


def build_once(folder: Path, build: Callable[[Path], None], what: str) -> Path:
    """`folder`, made by build(partial) unless it is already there and intact.

    A folder appears whole or not at all (one rename); a damaged one is reported and built again;
    of several processes one builds and the others wait. what: the activity, for a waiting line.
    """
    if is_intact(folder):
        return folder
    with locked(folder, what):
        if is_intact(folder):
            return folder
        if folder.exists():
            say(f"{folder} is damaged (not as it was written): making it again", logging.WARNING)
            shutil.rmtree(folder)
        # what a killed builder left; a name of one's own, should a child of it still be writing
        for stale in folder.parent.glob(f"{folder.name}.*.partial"):
            shutil.rmtree(stale, ignore_errors=True)
        partial = folder.with_name(f"{folder.name}.{os.getpid()}.partial")
        partial.mkdir()
        try:
            build(partial)
            for path in partial.iterdir():
                path.chmod(0o644)  # safetensors writes for its user alone
            checksums = {path.name: checksum(path) for path in sorted(partial.iterdir())}
            (partial / MANIFEST).write_text(json.dumps(checksums, indent=1))
            partial.rename(folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return folder


def is_intact(folder: Path) -> bool:
    """Whether every file of the folder's manifest is there and as it was written."""
    try:
        checksums = json.loads((folder / MANIFEST).read_text())
        return bool(checksums) and all(checksum(folder / n) == c for n, c in checksums.items())
    except (OSError, ValueError, AttributeError):
        return False
