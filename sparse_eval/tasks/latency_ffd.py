"""Cells of top-δ decoding, and of the rules alone, as rows of task=latency."""

from __future__ import annotations

import torch

from sparse_eval.core import Row
from sparse_eval.device import DTYPES
from sparse_eval.latency.clock import measure
from sparse_eval.latency.config import FFD_PARTS
from sparse_eval.latency.ffd_cell import FFDBuffer, FFDCell, Reading
from sparse_eval.latency.rules import kept, matched, rule_work
from sparse_eval.tasks.latency_bench import NAN, Bench, over


@torch.inference_mode()
def ffd_cell_rows(bench: Bench, batch: int, context: int) -> list[Row]:
    """Top-δ parts and SDPA in the same turns: over random keys at each union density, over each
    captured layer at each δ."""
    s, c, p = bench.settings, bench.config, bench.policy
    cell = FFDCell(
        batch=batch,
        context=context,
        shapes=c.shapes,
        dtype=DTYPES[s.dtype],
        page_size=p.page_size,
        sink_pages=p.sink_pages,
        local_pages=p.local_pages,
        scales=c.scales,
        device=torch.device(s.device),
    )
    turns = range(cell.num_buffers(int(c.working_set * bench.l2_bytes)))
    rows: list[Row] = []
    if c.keys is None:
        buffers = [cell.buffer() for _ in turns]
        for target in c.densities:
            readings = [cell.reading(x, target) for x in buffers]
            aim = {"keys": "random", "density_target": target}
            rows += [row | aim for row in ffd_rows(bench, cell, buffers, readings)]
    for layer in bench.captured_keys:
        buffers = [cell.replayed(layer, turn) for turn in turns]
        for delta in c.deltas:
            readings = [cell.reading_at(x, delta) for x in buffers]
            aim = {"keys": str(c.keys), "layer": layer.layer, "delta_target": delta}
            rows += [row | aim for row in ffd_rows(bench, cell, buffers, readings)]
        del buffers, readings  # before the next layer's
    return rows


def ffd_rows(
    bench: Bench, cell: FFDCell, buffers: list[FFDBuffer], readings: list[Reading]
) -> list[Row]:
    c = bench.config
    parts = [what for what in FFD_PARTS if what in c.what]
    steps = cell.work(buffers, readings)
    density = sum(r.density for r in readings) / len(readings)
    plain = bench.cell(cell.batch, cell.context)
    dense = bench.baselines(plain, buffers) if "sdpa" in c.what else {}
    rows: list[Row] = []
    for graph in c.graph:
        work = {what: bench.timed(steps[what], len(buffers), graph) for what in parts}
        for name, attend in dense.items():
            work[name] = bench.timed(over(attend, buffers), len(buffers), graph)
        timings = measure(work, repeats=c.repeats, seed=bench.settings.seed)
        sdpa_us = min((timings[n].median_us for n in dense if n.startswith("sdpa")), default=NAN)
        best_us = min((timings[n].median_us for n in dense), default=NAN)
        for name, t in timings.items():
            is_dense = name in dense
            moved = cell.dense_bytes if is_dense else cell.bytes_of(name, buffers[0], density)
            rows.append(
                bench.common(cell.batch, cell.context)
                | bench.timing_columns(t, moved, graph, bench.ceiling)
                | {
                    "what": "sdpa" if name.startswith("sdpa") else name,
                    "policy": "ffd",
                    "policy_config": {
                        "scales": c.scales,
                        "bits": buffers[0].thumbnail.bits,
                        "delta": readings[0].delta,
                    },
                    "adaptive": True,
                    "budget_tokens": NAN,
                    "density": 1.0 if is_dense else density,
                    "delta": readings[0].delta,
                    "l2_resident": moved * len(buffers) <= bench.l2_bytes,
                    "baseline": name if is_dense else "",
                    "speedup_vs_sdpa": sdpa_us / t.median_us,
                    "speedup_vs_best": best_us / t.median_us,
                    "floor_speedup": cell.dense_bytes / moved,
                    "buffers": len(buffers),
                }
            )
    return rows


@torch.inference_mode()
def rules_rows(bench: Bench, batch: int, context: int) -> list[Row]:
    """Top-k, top-p and top-δ per query head on the same scores at one keep ratio."""
    ceiling, c, p = bench.ceiling, bench.config, bench.policy
    shape = (batch, c.shapes.num_heads, context)
    num_bytes = 4 * batch * c.shapes.num_heads * context
    count = max(1, min(16, int(c.working_set * bench.l2_bytes) // num_bytes + 1))
    scores = [torch.randn(shape, device=bench.settings.device) for _ in range(count)]
    forced = (max(1, p.sink_pages * p.page_size), p.local_pages * p.page_size)
    numbers = matched(scores[0], c.keep_ratio, *forced)
    steps = rule_work(scores, numbers, *forced)
    shares = kept(steps, scores[0])
    rows: list[Row] = []
    for graph in c.graph:
        work = {name: bench.timed(step, count, graph) for name, step in steps.items()}
        timings = measure(work, repeats=c.repeats, seed=bench.settings.seed)
        for name, t in timings.items():
            rows.append(
                bench.common(batch, context)
                | bench.timing_columns(t, num_bytes, graph, ceiling)
                | {
                    "what": name,
                    "policy": name,
                    "policy_config": vars(numbers),
                    "adaptive": name != "top_k",
                    "budget_tokens": NAN,
                    "keep_ratio": c.keep_ratio,
                    "density": shares[name],
                    "l2_resident": num_bytes * count <= bench.l2_bytes,
                    "baseline": "",
                    "top_delta_speedup": t.median_us / timings["top_delta"].median_us,
                    "buffers": count,
                }
            )
    return rows
