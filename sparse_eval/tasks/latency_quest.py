"""Cells of Quest's step and its parts as rows of task=latency."""

from __future__ import annotations

import torch

from sparse_eval.core import Row
from sparse_eval.latency.cell import Cell
from sparse_eval.latency.clock import Ceiling, Timing, measure
from sparse_eval.models import model_info
from sparse_eval.tasks.latency_bench import NAN, Bench, over

PARTS = ("dense", "metadata", "select", "attend", "step")


@torch.inference_mode()
def quest_cell_rows(bench: Bench, batch: int, context: int) -> list[Row]:
    """All rows of one cell: every part and baseline, as a graph and eager."""
    ceiling, cell = bench.ceiling, bench.cell(batch, context)
    working_set = int(bench.config.working_set * bench.l2_bytes)
    parts = [what for what in PARTS if what in bench.config.what]
    baselines = "sdpa" in bench.config.what
    needed = {what: cell.num_buffers(what, working_set) for what in [*parts, "dense"]}
    lists = cell.scattered_lists if bench.lists is None else bench.lists.drawn(batch)
    buffers = [cell.buffer(lists) for _ in range(max(needed.values()))]
    steps = cell.work(buffers)
    dense = bench.baselines(cell, buffers) if baselines else {}
    rows: list[Row] = []
    for graph in bench.config.graph:
        work = {what: bench.timed(steps[what], needed[what], graph) for what in parts}
        for name, attend in dense.items():
            work[name] = bench.timed(over(attend, buffers), needed["dense"], graph)
        timings = measure(work, repeats=bench.config.repeats, seed=bench.settings.seed)
        rows += rows_of(bench, cell, timings, list(dense), graph, needed, ceiling)
    return rows


def rows_of(
    bench: Bench,
    cell: Cell,
    timings: dict[str, Timing],
    dense: list[str],
    graph: bool,
    needed: dict[str, int],
    ceiling: Ceiling,
) -> list[Row]:
    sdpa_us = min((timings[n].median_us for n in dense if n.startswith("sdpa")), default=NAN)
    all_dense = [timings[n].median_us for n in (*dense, "dense") if n in timings]
    best_us = min(all_dense, default=NAN)
    rows = []
    for name, t in timings.items():
        what = "sdpa" if name.startswith("sdpa") else name
        kind = what if what in needed else "dense"
        moved = cell.bytes_of(kind)
        rows.append(
            bench.common(cell.batch, cell.context)
            | bench.timing_columns(t, moved, graph, ceiling)
            | {
                "what": what,
                "l2_resident": needed[kind] * moved <= bench.l2_bytes,
                "baseline": name if name in dense else "",
                "speedup_vs_sdpa": sdpa_us / t.median_us,
                "speedup_vs_best": best_us / t.median_us,
                "model_speedup_bound": model_bound(bench, cell, ceiling, best_us, t)
                if what == "step"
                else NAN,
                "buffers": needed[kind],
            }
        )
    return rows


def model_bound(bench: Bench, cell: Cell, ceiling: Ceiling, dense_us: float, step: Timing) -> float:
    """What a model's decode step can gain at most: weights read once at the ceiling, every
    layer's best dense attention against dense layers plus this step on the others."""
    info = model_info(bench.settings.model)
    if not (info.num_parameters and info.num_layers):
        return NAN
    weights_us = info.num_parameters * cell.dtype.itemsize / ceiling.best * 1e6
    num_dense = len([i for i in bench.settings.dense_layers if i < info.num_layers])
    sparse_us = num_dense * dense_us + (info.num_layers - num_dense) * step.median_us
    return (weights_us + info.num_layers * dense_us) / (weights_us + sparse_us)
