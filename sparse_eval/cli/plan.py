"""plan=true: what would run and what it would cost, from shapes and the machine; no weights."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.table import Table

from sparse_eval.cli.config import Settings
from sparse_eval.cli.kits import KITS
from sparse_eval.cli.machine import Machine, measured_now
from sparse_eval.device import DTYPES, describe_device
from sparse_eval.inputs.checkpoint import what_is_missing
from sparse_eval.models import ModelInfo, model_info
from sparse_eval.needle.config import needle_config
from sparse_eval.needle.gate import can_pass, not_run_line
from sparse_eval.storage.cells import CellStore
from sparse_eval.terminal import labelled, make_console
from sparse_eval.units import byte_size

if TYPE_CHECKING:
    from sparse_eval.tasks.live_task import Work
    from sparse_eval.tasks.recall import Recall

LAYER_NORMS, POLICY_NORMS = 55, 55
"""What starting the operations of a decode step's layer takes, in RMS norms of one token: those of
transformers' own layer, and those that a policy and the shared kernel add. Fitted to SmolLM2-135M
on one and two CPU cores, where they are 1.0 ms each; nothing was fitted to a GPU."""


@dataclass(frozen=True)
class Cost:
    """What one job is predicted to take. seconds: with answers as long as they may be; None where
    the model's size is not known. fewest_seconds: with answers as short."""

    prefills: int
    captures_cached: int
    cells: int
    cells_cached: int
    fewest_seconds: float | None
    seconds: float | None
    memory_bytes: float | None
    disk_bytes: float | None


def cost_of(settings: Settings, machine: Machine) -> Cost:
    if settings.task["name"] == "latency":  # no model and no prompt; minutes of GPU time
        cells = len(settings.task["batches"]) * len(settings.task["contexts"])
        return Cost(0, 0, cells, 0, None, None, None, None)
    name, store = settings.task["name"], CellStore(settings.cache_dir)
    task: Any = KITS[name].task(settings, None)  # type: ignore[arg-type]
    if name == "recall":
        return recall_cost(task, store, machine)
    return live_cost(settings, task.work(store), machine)


def live_cost(settings: Settings, work: Work, machine: Machine) -> Cost:
    """Of prefills, and of decode steps under a policy."""
    info = model_info(settings.model)
    longest = max(work.prefills, default=settings.context)
    kv = _kv_bytes(settings, info, longest)
    known = info.num_parameters and info.num_layers
    seconds = fewest = None
    if known:
        prefill = sum(_prefill_flops(info, tokens) for tokens in work.prefills)
        step = step_seconds(settings, info, longest, machine, LAYER_NORMS + POLICY_NORMS)
        fewest, seconds = (
            prefill / machine.flops + steps * step for steps in (work.fewest_steps, work.steps)
        )
    weights = (info.num_parameters or 0) * DTYPES[settings.dtype].itemsize
    return Cost(
        prefills=len(work.prefills),
        captures_cached=0,
        cells=work.cells,
        cells_cached=work.cells_known,
        fewest_seconds=fewest,
        seconds=seconds,
        # the prefilled cache, and the fork that grows
        memory_bytes=weights + 2 * kv if known and kv is not None else None,
        disk_bytes=len(work.prefills) * kv if settings.cache_prefill and kv is not None else 0,
    )


def recall_cost(task: Recall, store: CellStore, machine: Machine) -> Cost:
    settings, cells = task.settings, task.settings.cells()
    prompts = task.local_prompts()
    cached = captured = 0
    for prompt in prompts or []:
        cached += sum(store.has(task.key(prompt, *cell)) for cell in cells)
        captured += os.path.isfile(task.capture_path(prompt))
    n = settings.prompts["n"]
    info = model_info(settings.model)
    prefills = n - captured
    seconds = _seconds(settings, info, machine, prefills, len(cells) * n - cached)
    return Cost(
        prefills=prefills,
        captures_cached=captured,
        cells=len(cells) * n,
        cells_cached=cached,
        fewest_seconds=seconds,
        seconds=seconds,
        memory_bytes=_memory(settings, info),
        disk_bytes=_capture_bytes(settings, info, prefills),
    )


def _attention_flops(info: ModelInfo, queries: int, tokens: int) -> float:
    """QK and PV of every layer and head, `queries` against `tokens` keys."""
    assert info.num_layers and info.num_heads and info.head_dim
    return 4.0 * info.num_layers * info.num_heads * info.head_dim * queries * tokens


def _seconds(
    settings: Settings, info: ModelInfo, machine: Machine, prefills: int, cells: int
) -> float | None:
    if not info.num_parameters or not info.num_layers:
        return None
    n, steps = settings.context, settings.task["steps"]
    decode = steps * step_seconds(settings, info, n, machine, LAYER_NORMS)
    prefill = _prefill_flops(info, n) / machine.flops + decode
    cell = 2 * _attention_flops(info, steps, n) / machine.flops
    return prefills * prefill + cells * cell


def _prefill_flops(info: ModelInfo, tokens: int) -> float:
    assert info.num_parameters
    return 2.0 * info.num_parameters * tokens + _attention_flops(info, tokens, tokens) / 2


def step_seconds(
    settings: Settings, info: ModelInfo, tokens: int, machine: Machine, norms: int
) -> float:
    """One decode step: every weight is read, and the cache, which grows by being copied, is read
    twice and written once; each layer starts operations that take as long as `norms`."""
    assert info.num_parameters and info.num_layers
    weights = info.num_parameters * DTYPES[settings.dtype].itemsize
    moved = weights + 3 * (_kv_bytes(settings, info, tokens) or 0)
    return moved / machine.bytes_per_second + info.num_layers * norms * machine.norm_seconds


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
    console = make_console(130)
    feasible = [(name, s) for name, s in jobs if isinstance(s, Settings)]
    machines: dict[tuple[str, str], Machine] = {}
    table = Table(title="Plan: no weights were loaded", title_justify="left")
    for column in ("job", "cells", "cached", "prefills", "time", "peak memory", "new on disk"):
        table.add_column(column, justify="left" if column == "job" else "right")
    for name, s in feasible:
        where = (s.device, s.dtype)
        machines[where] = machines.get(where) or measured_now(s.device, DTYPES[s.dtype])
        cost = cost_of(s, machines[where])
        table.add_row(
            name or "(defaults)",
            str(cost.cells),
            str(cost.cells_cached),
            str(cost.prefills),
            _time(cost.fewest_seconds, cost.seconds),
            _bytes(cost.memory_bytes),
            _bytes(cost.disk_bytes),
        )
    if feasible:
        console.print(table)
    for line in dict.fromkeys(
        line for _, s in feasible for line in [*model_notes(s), *gate_notes(s)]
    ):
        console.print(labelled("note:", line), soft_wrap=True)
    for name, error in jobs:
        if isinstance(error, ValueError) and len(jobs) == 1:
            print(f"error: {error}", file=sys.stderr)
        elif isinstance(error, ValueError):
            line = f"{name or '(defaults)'}: {error}"
            console.print(labelled("infeasible", line), soft_wrap=True)
    for (device, dtype), machine in machines.items():
        console.print(
            f"predicted from {machine.flops / 1e9:,.0f} GFLOP/s and "
            f"{machine.bytes_per_second / 1e9:,.0f} GB/s, measured now by {dtype} products on "
            f"{describe_device(device)}; from the shortest answers to the longest; without "
            "loading, imports and pictures",
            style="dim",
        )


def model_notes(settings: Settings) -> list[str]:
    """A model that is not here yet; timings need its shapes alone."""
    if settings.task["name"] == "latency":
        return []
    first = what_is_missing(settings.model, settings.model_cache)
    title = model_info(settings.model).title
    return [f"{title} is not on this machine: a run first {first}"] if first else []


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


def _time(fewest: float | None, most: float | None) -> str:
    if fewest is None or most is None:
        return "unknown"
    size, unit = (1, "s") if most < 120 else (60, "min")
    low, high = f"{fewest / size:.0f}", f"{most / size:.0f}"
    return f"{high} {unit}" if low == high else f"{low} to {high} {unit}"


def _bytes(num_bytes: float | None) -> str:
    return "unknown" if num_bytes is None else byte_size(num_bytes)
