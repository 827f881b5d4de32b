"""plan=true: what would run and what it would cost, from shapes and a short matmul; no weights."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table

from sparse_eval.config import Settings
from sparse_eval.device import DTYPES, describe_device
from sparse_eval.models import ModelInfo, model_info
from sparse_eval.needle.config import needle_config
from sparse_eval.results import CellStore
from sparse_eval.tasks.live_task import arms_of
from sparse_eval.tasks.recall import Recall


@dataclass(frozen=True)
class Cost:
    """What one job is predicted to take. seconds: None where the model's size is not known."""

    prefills: int
    captures_cached: int
    cells: int
    cells_cached: int
    seconds: float | None
    memory_bytes: float | None
    disk_bytes: float | None


def matmul_flops_per_second(device: str, dtype: torch.dtype) -> float:
    """Measured now: a product of the size a prefill chunk makes."""
    a = torch.randn(1024, 2048, device=device, dtype=dtype)
    b = torch.randn(2048, 2048, device=device, dtype=dtype)
    rates = []
    for _ in range(3):
        started = time.perf_counter()
        a @ b
        if device != "cpu":
            torch.cuda.synchronize(device)
        rates.append(2 * a.shape[0] * b.shape[0] * b.shape[1] / (time.perf_counter() - started))
    return max(rates)


@dataclass(frozen=True)
class Work:
    """What a job does if nothing is cached. steps: decode steps in all, its arms together."""

    prompts: int
    cells: int
    steps: int
    recall_cells: int = 0
    captures: int = 0


def work_of(settings: Settings) -> Work:
    task, n = settings.task, settings.prompts["n"]
    if task["name"] == "latency":  # no model and no prompt
        return Work(prompts=0, cells=len(task["batches"]) * len(task["contexts"]), steps=0)
    if task["name"] == "recall":
        cells = len(settings.cells()) * n
        return Work(n, cells, n * task["steps"], recall_cells=cells, captures=n)
    arms = len(arms_of(settings))
    if task["name"] == "fidelity":
        return Work(n, n * arms, n * arms * task["steps"])
    needle = needle_config(task, context=settings.context, n=n, protocol=settings.protocol["name"])
    spots = len(needle.contexts) * len(needle.kinds) * len(needle.depths)
    answers = spots * (n * arms + needle.gate.n)
    return Work(spots * (n + needle.gate.n), answers, answers * needle.most_new_tokens)


def cost_of(settings: Settings, flops: float) -> Cost:
    work, info = work_of(settings), model_info(settings.model)
    cached = captured = 0
    if work.recall_cells:
        task = Recall(settings, progress=None)  # type: ignore[arg-type]
        store = CellStore(settings.cache_dir)
        for prompt in task.local_prompts() or []:
            cached += sum(store.has(task.key(prompt, *cell)) for cell in settings.cells())
            captured += task.capture_path(prompt).is_file()
    return Cost(
        prefills=work.prompts - captured,
        captures_cached=captured,
        cells=work.cells,
        cells_cached=cached,
        seconds=_seconds(settings, info, flops, work, captured, cached) if work.prompts else None,
        memory_bytes=_memory(settings, info) if work.prompts else None,
        disk_bytes=_capture_bytes(settings, info, max(0, work.captures - captured)),
    )


def _attention_flops(info: ModelInfo, queries: int, tokens: int) -> float:
    """QK and PV of every layer and head, `queries` against `tokens` keys."""
    assert info.num_layers and info.num_heads and info.head_dim
    return 4.0 * info.num_layers * info.num_heads * info.head_dim * queries * tokens


def _seconds(
    settings: Settings, info: ModelInfo, flops: float, work: Work, captured: int, cached: int
) -> float | None:
    if not info.num_parameters or not info.num_layers:
        return None
    n, left = settings.context, 1 - captured / work.prompts
    prefill = 2.0 * info.num_parameters * n + _attention_flops(info, n, n) / 2
    # a decode step reads every weight: as slow as the arithmetic of 16 tokens
    step = 2.0 * info.num_parameters * 16
    cell = 2 * _attention_flops(info, settings.task.get("steps", 0), n)
    cells = work.recall_cells - cached if work.recall_cells else 0
    return (left * (work.prompts * prefill + work.steps * step) + cells * cell) / flops


def _kv_bytes(settings: Settings, info: ModelInfo) -> float | None:
    if not (info.num_layers and info.num_kv_heads and info.head_dim):
        return None
    size = DTYPES[settings.dtype].itemsize
    tokens = settings.context + settings.task.get("steps", 0)
    return 2.0 * info.num_layers * info.num_kv_heads * info.head_dim * size * tokens


def _memory(settings: Settings, info: ModelInfo) -> float | None:
    """Weights, the prefilled cache, the decoding fork's copy of it, and the capture."""
    kv = _kv_bytes(settings, info)
    if kv is None or not info.num_parameters:
        return None
    return info.num_parameters * DTYPES[settings.dtype].itemsize + 3 * kv


def _capture_bytes(settings: Settings, info: ModelInfo, captures: int) -> float | None:
    kv = _kv_bytes(settings, info)
    return None if kv is None else captures * kv


def print_plan(jobs: Sequence[tuple[str, Settings | ValueError]]) -> None:
    """One line a job, infeasible ones with their reason, then the sum."""
    console = Console(highlight=False, width=None if Console().is_terminal else 130)
    feasible = [(name, s) for name, s in jobs if isinstance(s, Settings)]
    rates: dict[tuple[str, str], float] = {}
    table = Table(title="Plan: no weights were loaded", title_justify="left")
    for column in ("job", "cells", "cached", "prefills", "time", "peak memory", "new on disk"):
        table.add_column(column, justify="left" if column == "job" else "right")
    for name, s in feasible:
        where = (s.device, s.dtype)
        rates[where] = rates.get(where) or matmul_flops_per_second(s.device, DTYPES[s.dtype])
        cost = cost_of(s, rates[where])
        table.add_row(
            name or "(defaults)",
            str(cost.cells),
            str(cost.cells_cached),
            str(cost.prefills),
            _time(cost.seconds),
            _bytes(cost.memory_bytes),
            _bytes(cost.disk_bytes),
        )
    console.print(table)
    for name, error in jobs:
        if isinstance(error, ValueError):
            line = f"[yellow]infeasible[/yellow] {name or '(defaults)'}: {error}"
            console.print(line, soft_wrap=True)
    for (device, dtype), rate in rates.items():
        console.print(
            f"[dim]predicted from {rate / 1e9:,.0f} GFLOP/s, measured now by a {dtype} matrix "
            f"product on {describe_device(device)}; without loading, imports and pictures[/dim]"
        )


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "unknown"
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def _bytes(size: float | None) -> str:
    if size is None:
        return "unknown"
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"
