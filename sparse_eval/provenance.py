"""Where a number comes from: versions, machine, command, and a hash of the code that made it."""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import inspect
import os
import platform
import shlex
import subprocess
import sys
from datetime import datetime
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).resolve().parent
POLICIES = PACKAGE / "policies"
POLICY_PACKAGE = "sparse_eval.policies"

OUTPUT_FOLDERS = frozenset({"cli", "reporting", "storage", "tracking", "conf", "__pycache__"})
OWN_FOLDERS = frozenset({"policies"})
OUTPUT_MODULES = frozenset(
    {
        "__main__",
        "app",
        "cache",
        "check",
        "fetch",
        "frontiers",
        "parts",
        "provenance",
        "report",
        "results",
        "terminal",
        "units",
    }
)
"""What presents or keeps what was measured. Whatever else the package holds, new files included,
can change a cell; policies change their own."""


def code_hash(*policies: type) -> str:
    """SHA-256 of the code that can change a measurement: the package's, policies aside, and that of
    the given policies. So a new policy changes nothing that was captured, nor another's cells.

    Raises ValueError for a class whose source cannot be read: its cells cannot be told apart."""
    digest = hashlib.sha256(package_hash().encode())
    for policy in policies:
        for source in policy_sources(policy):
            digest.update(source.encode())
    return digest.hexdigest()


def policy_sources(policy: type) -> list[str]:
    """The module of a policy, and those of policies/ that it is built on."""
    own = source_of(policy)
    found: dict[str, str] = {}
    pending = set(policy_modules(own))
    while pending:
        name = pending.pop()
        path = POLICIES / f"{name}.py"
        if name not in found and path.is_file():
            found[name] = path.read_text()
            pending.update(policy_modules(found[name]))
    return [own, *(found[name] for name in sorted(found))]


@lru_cache(maxsize=256)
def policy_modules(source: str) -> frozenset[str]:
    """Names of the modules of policies/ that a source imports."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            names.add(module)
            names.update(f"{module}.{alias.name}" for alias in node.names)
    inside = (name.removeprefix(f"{POLICY_PACKAGE}.") for name in names if POLICY_PACKAGE in name)
    return frozenset(name.split(".")[0] for name in inside)


@cache
def package_hash() -> str:
    """Taken once a process: what was imported is what runs."""
    digest = hashlib.sha256()
    for path in measuring_files():
        digest.update(f"{path.relative_to(PACKAGE)}\0{path.stat().st_size}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def measuring_files() -> list[Path]:
    """Python files of the package that can change any cell; conf/ is part of the config instead."""
    files = []
    for folder, folders, files_here in os.walk(PACKAGE, followlinks=True):
        folders[:] = sorted(set(folders) - OUTPUT_FOLDERS - OWN_FOLDERS)
        paths = [Path(folder) / name for name in sorted(files_here) if name.endswith(".py")]
        files += [p for p in paths if p.parent != PACKAGE or p.stem not in OUTPUT_MODULES]
    return files


def source_of(cls: type) -> str:
    try:
        return Path(inspect.getfile(cls)).read_text()
    except (OSError, TypeError):
        pass
    try:
        return inspect.getsource(cls)
    except (OSError, TypeError) as error:
        raise ValueError(f"cannot read the source of {cls.__qualname__}") from error


def provenance(*, device: str, backend: str, dtype: str, started: datetime) -> dict[str, Any]:
    """What summary.json says about how its numbers came about; None = not known here. started:
    when the run began."""
    # torch loads here, not above: reports are made from rows alone, without it.
    import torch

    return {
        "command": command(),
        "started": started.isoformat(timespec="seconds"),
        "package": version_of("sparse-eval"),
        "git_commit": git("rev-parse", "HEAD"),
        "git_changed_files": count_lines(git("status", "--porcelain")),
        "code_hash": code_hash(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        **{name: version_of(name) for name in ("triton", "transformers", "numpy", "tokenizers")},
        "platform": platform.platform(),
        "cpu": cpu_name(),
        "cores": num_cores(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name(device) if device.startswith("cuda") else None,
        "device": device,
        "backend": backend,
        "dtype": dtype,
    }


def command() -> str:
    """The command line as it was typed, without the paths of interpreter and script."""
    program, *words = sys.orig_argv[1:] or [""]
    if program.startswith("-"):
        return shlex.join(["python", program, *words])
    return shlex.join([Path(program).name, *words])


@cache
def version_of(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def git(*arguments: str) -> str | None:
    """Output of git in the package's own checkout; None outside one, or where git fails.

    An installed package may lie inside somebody else's repository: that one is not asked."""
    root = PACKAGE.parent
    if not (root / "pyproject.toml").is_file() or not (root / ".git").exists():
        return None
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def count_lines(text: str | None) -> int | None:
    return None if text is None else len(text.splitlines())


def num_cores() -> int | None:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def cpu_name() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or None
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or None
