"""Files and folders that are made once and found again: locks, hashes, atomic renames."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
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
        raise ValueError(f"{key} must be a folder that can be written, got {folder} ({error.strerror})") from None
    return folder


@contextmanager
def locked(path: Path, what: str) -> Iterator[None]:
    """Hold `path`'s lock (a file beside it); says so when another process holds it first."""
    lock = FileLock(path.with_name(path.name + ".lock"))
    try:
        lock.acquire(timeout=0.5)
    except Timeout:
        log.info("another process is %s: waiting for it", what)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def content_hash(path: Path) -> str:
    """sha256 over the sha256 of each 64 MiB block: every byte counts, every core helps."""

    def block_digest(offset: int) -> bytes:
        digest = hashlib.sha256()
        with path.open("rb") as file:
            file.seek(offset)
            for _ in range(BLOCK_BYTES // READ_BYTES):
                digest.update(file.read(READ_BYTES))
        return digest.digest()

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        digests = pool.map(block_digest, range(0, path.stat().st_size, BLOCK_BYTES))
        return hashlib.sha256(b"".join(digests)).hexdigest()


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
            log.warning("%s is damaged (its files are not as written): making it again", folder)
            shutil.rmtree(folder)
        partial = folder.with_name(folder.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        try:
            build(partial)
            for path in partial.iterdir():
                path.chmod(0o644)  # safetensors writes for its user alone
            hashes = {path.name: content_hash(path) for path in sorted(partial.iterdir())}
            (partial / MANIFEST).write_text(json.dumps(hashes, indent=1))
            partial.rename(folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return folder


def is_intact(folder: Path) -> bool:
    """Whether every file of the folder's manifest is there and hashes as it did when written."""
    try:
        hashes = json.loads((folder / MANIFEST).read_text())
        return bool(hashes) and all(content_hash(folder / n) == h for n, h in hashes.items())
    except (OSError, ValueError, AttributeError):
        return False
