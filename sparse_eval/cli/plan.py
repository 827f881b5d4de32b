"""plan=true: what would run and what it would cost, from shapes and a short matmul; no weights."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sparse_eval.cli.config import Settings
from sparse_eval.cli.kits import KITS
from sparse_eval.device import DTYPES, describe_device
from sparse_eval.models import ModelInfo, model_info
from sparse_eval.needle.config import needle_config
from sparse_eval.needle.gate import can_pass, not_run_line
from sparse_eval.storage.cells import CellStore

if TYPE_CHECKING:
    from sparse_eval.tasks.live_task import Work
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


def cost_of(settings: Settings, flops: float) -> Cost:
    if settings.task["name"] == "latency":  # no model and no prompt; minutes of GPU time
        cells = len(settings.task["batches"]) * len(settings.task["contexts"])
        return Cost(0, 0, cells, 0, None, None, None)
    name, store = settings.task["name"], CellStore(settings.cache_dir)
    task: Any = KITS[name].task(settings, None)  # type: ignore[arg-type]
    if name == "recall":
        return recall_cost(task, store, flops)
    return live_cost(settings, task.work(store), flops)


def live_cost(settings: Settings, work: Work, flops: float) -> Cost:
    """Of prefills, and of decode steps that read every weight."""
    info = model_info(settings.model)
    longest = max(work.prefills, default=settings.context)
    kv = _kv_bytes(settings, info, longest)
    known = info.num_parameters and info.num_layers
    seconds = None
    if known:
        prefill = sum(_prefill_flops(info, tokens) for tokens in work.prefills)
        seconds = (prefill + _decode_flops(info, work.steps)) / flops
    weights = (info.num_parameters or 0) * DTYPES[settings.dtype].itemsize
    return Cost(
        prefills=len(work.prefills),
        captures_cached=0,
        cells=work.cells,
        cells_cached=work.cells_known,
        seconds=seconds,
        # the prefilled cache, and the fork that grows
        memory_bytes=weights + 2 * kv if known and kv is not None else None,
        disk_bytes=len(work.prefills) * kv if settings.cache_prefill and kv is not None else 0,
    )


def recall_cost(task: Recall, store: CellStore, flops: float) -> Cost:
    settings, cells = task.settings, task.settings.cells()
    prompts = task.local_prompts()
    cached = captured = 0
    for prompt in prompts or []:
        cached += sum(store.has(task.key(prompt, *cell)) for cell in cells)
        captured += task.capture_path(prompt).is_file()
    n = settings.prompts["n"]
    info = model_info(settings.model)
    prefills = n - captured
    return Cost(
        prefills=prefills,
        captures_cached=captured,
        cells=len(cells) * n,
        cells_cached=cached,
        seconds=_seconds(settings, info, flops, prefills, len(cells) * n - cached),
        memory_bytes=_memory(settings, info),
        disk_bytes=_capture_bytes(settings, info, prefills),
    )


def _attention_flops(info: ModelInfo, queries: int, tokens: int) -> float:
    """QK and PV of every layer and head, `queries` against `tokens` keys."""
    assert info.num_layers and info.num_heads and info.head_dim
    return 4.0 * info.num_layers * info.num_heads * info.head_dim * queries * tokens


def _seconds(
    settings: Settings, info: ModelInfo, flops: float, prefills: int, cells: int
) -> float | None:
    if not info.num_parameters or not info.num_layers:
        return None
    n, steps = settings.context, settings.task["steps"]
    prefill = _prefill_flops(info, n) + _decode_flops(info, steps)
    cell = 2 * _attention_flops(info, steps, n)
    return (prefills * prefill + cells * cell) / flops


def _prefill_flops(info: ModelInfo, tokens: int) -> float:
    assert info.num_parameters
    return 2.0 * info.num_parameters * tokens + _attention_flops(info, tokens, tokens) / 2


def _decode_flops(info: ModelInfo, steps: int) -> float:
    """Decoding reads every weight per step: as slow as 16 tokens' worth of arithmetic."""
    assert info.num_parameters
    return 2.0 * info.num_parameters * 16 * steps


def _kv_bytes(settings: Settings, info: ModelInfo, tokens: int) -> float | None:
    if not (info.num_layers and info.num_kv_heads and info.head_dim):
        return None
    size = DTYPES[settings.dtype].itemsize
    return 2.0 * info.num_layers * info.num_kv_heads * info.head_dim * size * tokens


def _memory(settings: Settings, info: ModelInfo) -> float | None:
    """Weights, the prefilled cache, the decoding fork's copy of it, and the capture."""
    kv = _kv_bytes(settings, info, settings.context + settings.task["steps"])
    if kv is None or not info.num_parameters:
        return None
    return info.num_parameters * DTYPES[settings.dtype].itemsize + 3 * kv


def _capture_bytes(settings: Settings, info: ModelInfo, captures: int) -> float | None:
    kv = _kv_bytes(settings, info, settings.context + settings.task["steps"])
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
            escape(name or "(defaults)"),
            str(cost.cells),
            str(cost.cells_cached),
            str(cost.prefills),
            _time(cost.seconds),
            _bytes(cost.memory_bytes),
            _bytes(cost.disk_bytes),
        )
    if feasible:
        console.print(table)
    for line in dict.fromkeys(line for _, s in feasible for line in gate_notes(s)):
        console.print(f"[yellow]note:[/yellow] {line}", soft_wrap=True)
    for name, error in jobs:
        if isinstance(error, ValueError) and len(jobs) == 1:
            print(f"error: {error}", file=sys.stderr)
        elif isinstance(error, ValueError):
            line = escape(f"{name or '(defaults)'}: {error}")
            console.print(f"[yellow]infeasible[/yellow] {line}", soft_wrap=True)
    for (device, dtype), rate in rates.items():
        console.print(
            f"[dim]predicted from {rate / 1e9:,.0f} GFLOP/s, measured now by a {dtype} matrix "
            f"product on {describe_device(device)}; without loading, imports and pictures[/dim]"
        )


def gate_notes(settings: Settings) -> list[str]:
    """A dense gate that will not be run."""
    if settings.task["name"] != "needle":
        return []
    gate = needle_config(
        settings.task,
        context=settings.context,
        n=settings.prompts["n"],
        protocol=settings.protocol["name"],
    ).gate
    return [] if can_pass(gate) else [not_run_line(gate)]


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "unknown"
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def _bytes(size: float | None) -> str:
    if size is None:
        return "unknown"
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"
