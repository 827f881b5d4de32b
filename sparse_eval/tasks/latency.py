"""task=latency: how long a decode step's attention takes on this GPU, and what it is compared with.

A cell is a batch and a context; its parts are timed in turns over the same buffers. Shapes come
from the model's configuration, weights are never loaded.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from sparse_eval.cli.config import Settings
from sparse_eval.cli.progress import Progress
from sparse_eval.core import Row
from sparse_eval.device import DTYPES, describe_device, peak_memory_bytes
from sparse_eval.latency.baselines import Attend, other_kernels, sdpa_variants, those_that_run
from sparse_eval.latency.cell import Buffer, Cell
from sparse_eval.latency.clock import Ceiling, Timed, Timing, measure, memory_ceiling
from sparse_eval.latency.config import FFD_PARTS, LatencyConfig, latency_config
from sparse_eval.latency.ffd_cell import FFDBuffer, FFDCell, Reading
from sparse_eval.latency.replay import (
    CapturedKeys,
    CapturedLists,
    captured_keys,
    captured_lists,
)
from sparse_eval.latency.rules import kept, matched, rule_work
from sparse_eval.models import model_info
from sparse_eval.policies.quest import Quest
from sparse_eval.provenance import code_hash, version_of
from sparse_eval.storage.cells import CellStore, cell_key
from sparse_eval.storage.columns import SCHEMA

log = logging.getLogger("sparse_eval")
NAN = float("nan")
PARTS = ("dense", "metadata", "select", "attend", "step")
SCREENING_REPEATS = 3


@dataclass
class Latency:
    """One run's measurement. Timings are of this machine now: no cell comes from the store."""

    settings: Settings
    progress: Progress
    ceilings: dict[str, float] = field(default_factory=dict)
    not_timed: dict[str, str] = field(default_factory=dict)

    @cached_property
    def config(self) -> LatencyConfig:
        return latency_config(self.settings.task, model_info(self.settings.model))

    @cached_property
    def policy(self) -> Quest:
        policy = self.settings.policies[0].policy
        assert isinstance(policy, Quest)  # settings.resolve has seen to it
        return policy

    @cached_property
    def ceiling(self) -> Ceiling:
        with self.progress.stage("measuring the memory's ceiling"):
            ceiling = memory_ceiling(torch.device(self.settings.device))
        self.ceilings.update(
            copy_terabytes_per_s=ceiling.copy / 1e12, read_terabytes_per_s=ceiling.read / 1e12
        )
        return ceiling

    @cached_property
    def l2_bytes(self) -> int:
        return torch.cuda.get_device_properties(self.settings.device).L2_cache_size

    def facts(self) -> dict[str, Any]:
        """Further keys of summary.json."""
        return {
            "gpu": describe_device(self.settings.device),
            "l2_bytes": self.l2_bytes,
            "ceiling": self.ceilings,
            "baselines_not_timed": self.not_timed,
        }

    def run(self, store: CellStore) -> Iterator[list[Row]]:
        c = self.config
        torch.manual_seed(self.settings.seed)
        cells = [(b, n) for b in c.batches for n in c.contexts]
        groups = {
            self.measured: {*PARTS, "sdpa"} - ({"sdpa"} if self.sdpa_is_of_ffd else set()),
            self.measured_ffd: {*FFD_PARTS},
            self.measured_rules: {"rules"},
        }
        wanted = [measured for measured, names in groups.items() if names & {*c.what}]
        if wanted:
            with self.progress.bar("timing", len(cells) * len(wanted), unit="cells") as tick:
                for batch, context in cells:
                    for measured in wanted:
                        yield measured(batch, context)
                        torch.cuda.empty_cache()
                        tick(1)
        if "generate" in c.what:
            for context in c.contexts:
                yield self.generated(context)
                torch.cuda.empty_cache()

    @property
    def sdpa_is_of_ffd(self) -> bool:
        """No part but ffd's is timed: they bring their own SDPA rows."""
        return bool({*FFD_PARTS} & {*self.config.what}) and not {*PARTS} & {*self.config.what}

    def cell(self, batch: int, context: int) -> Cell:
        s = self.settings
        return Cell(
            batch=batch,
            context=context,
            shapes=self.config.shapes,
            dtype=DTYPES[s.dtype],
            policy=self.policy,
            budget=s.budgets[0],
            device=torch.device(s.device),
            listed_tokens=None if self.lists is None else self.lists.mean_tokens,
        )

    @cached_property
    def lists(self) -> CapturedLists | None:
        """Page lists for `attend` alone; None: scattered ones."""
        path = self.config.lists
        if path is None:
            return None
        with self.progress.stage("selecting on the capture"):
            return captured_lists(path, self.policy, self.settings.budgets[0], self.settings.device)

    @torch.inference_mode()
    def measured(self, batch: int, context: int) -> list[Row]:
        """All rows of one cell: every part and baseline, as a graph and eager."""
        started = time.perf_counter()
        ceiling, cell = self.ceiling, self.cell(batch, context)
        working_set = int(self.config.working_set * self.l2_bytes)
        parts = [what for what in PARTS if what in self.config.what]
        baselines = "sdpa" in self.config.what
        needed = {what: cell.num_buffers(what, working_set) for what in [*parts, "dense"]}
        lists = cell.scattered_lists if self.lists is None else self.lists.drawn(batch)
        buffers = [cell.buffer(lists) for _ in range(max(needed.values()))]
        steps = cell.work(buffers)
        dense = self.baselines(cell, buffers) if baselines else {}
        rows: list[Row] = []
        for graph in self.config.graph:
            work = {what: self.timed(steps[what], needed[what], graph) for what in parts}
            for name, attend in dense.items():
                work[name] = self.timed(over(attend, buffers), needed["dense"], graph)
            timings = measure(work, repeats=self.config.repeats, seed=self.settings.seed)
            rows += self.rows_of(cell, timings, list(dense), graph, needed, ceiling)
        spent = time.perf_counter() - started
        return [row | {"seconds": spent / len(rows)} for row in rows]

    @torch.inference_mode()
    def measured_ffd(self, batch: int, context: int) -> list[Row]:
        """Top-δ parts and SDPA in the same turns: over random keys at each union density, over each
        captured layer at each δ."""
        started = time.perf_counter()
        s, c, p = self.settings, self.config, self.policy
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
        turns = range(cell.num_buffers(int(c.working_set * self.l2_bytes)))
        rows: list[Row] = []
        if c.keys is None:
            buffers = [cell.buffer() for _ in turns]
            for target in c.densities:
                readings = [cell.reading(x, target) for x in buffers]
                aim = {"keys": "random", "density_target": target}
                rows += [row | aim for row in self.ffd_rows(cell, buffers, readings)]
        for layer in self.captured_keys:
            buffers = [cell.replayed(layer, turn) for turn in turns]
            for delta in c.deltas:
                readings = [cell.reading_at(x, delta) for x in buffers]
                aim = {"keys": str(c.keys), "layer": layer.layer, "delta_target": delta}
                rows += [row | aim for row in self.ffd_rows(cell, buffers, readings)]
            del buffers, readings  # before the next layer's
        spent = time.perf_counter() - started
        return [row | {"seconds": spent / len(rows)} for row in rows]

    @cached_property
    def captured_keys(self) -> list[CapturedKeys]:
        """Of the ffd parts; none where their keys are random."""
        path, s = self.config.keys, self.settings
        return [] if path is None else captured_keys(path, s.device, DTYPES[s.dtype])

    def ffd_rows(
        self, cell: FFDCell, buffers: list[FFDBuffer], readings: list[Reading]
    ) -> list[Row]:
        c = self.config
        parts = [what for what in FFD_PARTS if what in c.what]
        steps = cell.work(buffers, readings)
        density = sum(r.density for r in readings) / len(readings)
        plain = self.cell(cell.batch, cell.context)
        dense = self.baselines(plain, buffers) if "sdpa" in c.what else {}
        rows: list[Row] = []
        for graph in c.graph:
            work = {what: self.timed(steps[what], len(buffers), graph) for what in parts}
            for name, attend in dense.items():
                work[name] = self.timed(over(attend, buffers), len(buffers), graph)
            timings = measure(work, repeats=c.repeats, seed=self.settings.seed)
            sdpa_us = min(
                (timings[n].median_us for n in dense if n.startswith("sdpa")), default=NAN
            )
            best_us = min((timings[n].median_us for n in dense), default=NAN)
            for name, t in timings.items():
                is_dense = name in dense
                moved = cell.dense_bytes if is_dense else cell.bytes_of(name, buffers[0], density)
                rows.append(
                    self.common(cell.batch, cell.context)
                    | self.timing_columns(t, moved, graph, self.ceiling)
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
                        "l2_resident": moved * len(buffers) <= self.l2_bytes,
                        "baseline": name if is_dense else "",
                        "speedup_vs_sdpa": sdpa_us / t.median_us,
                        "speedup_vs_best": best_us / t.median_us,
                        "floor_speedup": cell.dense_bytes / moved,
                        "buffers": len(buffers),
                    }
                )
        return rows

    @torch.inference_mode()
    def measured_rules(self, batch: int, context: int) -> list[Row]:
        """Top-k, top-p and top-δ per query head on the same scores at one keep ratio."""
        started = time.perf_counter()
        ceiling, c, p = self.ceiling, self.config, self.policy
        shape = (batch, c.shapes.num_heads, context)
        num_bytes = 4 * batch * c.shapes.num_heads * context
        count = max(1, min(16, int(c.working_set * self.l2_bytes) // num_bytes + 1))
        scores = [torch.randn(shape, device=self.settings.device) for _ in range(count)]
        forced = (max(1, p.sink_pages * p.page_size), p.local_pages * p.page_size)
        numbers = matched(scores[0], c.keep_ratio, *forced)
        steps = rule_work(scores, numbers, *forced)
        shares = kept(steps, scores[0])
        rows: list[Row] = []
        for graph in c.graph:
            work = {name: self.timed(step, count, graph) for name, step in steps.items()}
            timings = measure(work, repeats=c.repeats, seed=self.settings.seed)
            for name, t in timings.items():
                rows.append(
                    self.common(batch, context)
                    | self.timing_columns(t, num_bytes, graph, ceiling)
                    | {
                        "what": name,
                        "policy": name,
                        "policy_config": vars(numbers),
                        "adaptive": name != "top_k",
                        "budget_tokens": NAN,
                        "keep_ratio": c.keep_ratio,
                        "density": shares[name],
                        "l2_resident": num_bytes * count <= self.l2_bytes,
                        "baseline": "",
                        "top_delta_speedup": t.median_us / timings["top_delta"].median_us,
                        "buffers": count,
                    }
                )
        spent = time.perf_counter() - started
        return [row | {"seconds": spent / len(rows)} for row in rows]

    def timing_columns(self, t: Timing, moved: int, graph: bool, ceiling: Ceiling) -> Row:
        rate = moved / t.median_us * 1e6
        return {
            "graph": graph,
            "median_us": t.median_us,
            "p10_us": t.p10_us,
            "p90_us": t.p90_us,
            "bytes": moved,
            "terabytes_per_s": rate / 1e12,
            "ceiling_fraction": rate / ceiling.best,
        }

    def timed(self, step: Callable[[int], object], num_buffers: int, graph: bool) -> Timed:
        rounds = -(-self.config.steps // num_buffers)
        return Timed(step, num_buffers, rounds * num_buffers, graph)

    def baselines(self, cell: Cell, buffers: Sequence[Buffer | FFDBuffer]) -> dict[str, Attend]:
        """The fastest SDPA variant, found by a short trial, and what else can be imported."""
        x = buffers[0]
        truth = reference_attention(x)
        tried = those_that_run(sdpa_variants(), x.q, x.k, x.v, truth)
        variants = tried.good
        if not variants:
            raise RuntimeError(f"no SDPA backend runs on these shapes: {tried.refused}")
        others = self.others(x, truth)
        trial = {name: Timed(over(f, buffers), 1, 1, True) for name, f in variants.items()}
        times = measure(trial, repeats=SCREENING_REPEATS, warmup=1)
        best = min(times, key=lambda name: times[name].median_us)
        return {f"sdpa {best}": variants[best], **others}

    def others(self, x: Buffer | FFDBuffer, truth: Tensor) -> dict[str, Attend]:
        """Other packages' kernels that run on x; why one does not is logged once, and kept."""
        found = other_kernels()
        tried = those_that_run(found.good, x.q, x.k, x.v, truth)
        for name, why in (found.refused | tried.refused).items():
            if self.not_timed.setdefault(name, why) is why:
                log.info("baseline %s is not timed: %s", name, why)
        return tried.good

    def rows_of(
        self,
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
                self.common(cell.batch, cell.context)
                | self.timing_columns(t, moved, graph, ceiling)
                | {
                    "what": what,
                    "l2_resident": needed[kind] * moved <= self.l2_bytes,
                    "baseline": name if name in dense else "",
                    "speedup_vs_sdpa": sdpa_us / t.median_us,
                    "speedup_vs_best": best_us / t.median_us,
                    "model_speedup_bound": self.model_bound(cell, ceiling, best_us, t)
                    if what == "step"
                    else NAN,
                    "buffers": needed[kind],
                }
            )
        return rows

    def model_bound(self, cell: Cell, ceiling: Ceiling, dense_us: float, step: Timing) -> float:
        """What a model's decode step can gain at most: weights read once at the ceiling, every
        layer's best dense attention against dense layers plus this step on the others."""
        info = model_info(self.settings.model)
        if not (info.num_parameters and info.num_layers):
            return NAN
        weights_us = info.num_parameters * cell.dtype.itemsize / ceiling.best * 1e6
        num_dense = len([i for i in self.settings.dense_layers if i < info.num_layers])
        sparse_us = num_dense * dense_us + (info.num_layers - num_dense) * step.median_us
        return (weights_us + info.num_layers * dense_us) / (weights_us + sparse_us)

    def generated(self, context: int) -> list[Row]:
        """The patched loop and the dense one, one row each; the median is per token."""
        from sparse_eval.latency.generate import decode_times, random_model

        s, info = self.settings, model_info(self.settings.model)
        num_layers = info.num_layers or 28
        model = random_model(self.config.shapes, num_layers, context, s.device, DTYPES[s.dtype])
        ids = torch.randint(3, 250, (context,), device=s.device)
        with self.progress.stage(f"generating after {context:,} tokens"):
            times = decode_times(
                model,
                ids,
                self.policy,
                s.budgets[0],
                new_tokens=self.config.new_tokens,
                dense_layers=s.dense_layers,
            )
        return [
            self.common(1, context)
            | {
                "what": "generate",
                "graph": False,
                "l2_resident": False,
                "median_us": t.median_us,
                "p10_us": t.p10_us,
                "p90_us": t.p90_us,
                "tokens_per_second": 1e6 / t.median_us,
                "baseline": "dense loop" if name == "dense" else "",
                "speedup_vs_sdpa": times["dense"].median_us / t.median_us,
            }
            for name, t in times.items()
        ]

    def common(self, batch: int, context: int) -> Row:
        s, c, info = self.settings, self.config, model_info(self.settings.model)
        named = s.policies[0]
        return {
            "schema": SCHEMA,
            "task": "latency",
            "model": info.label,
            "revision": info.revision,
            "weights": "none: shapes only",
            "policy": named.label,
            "policy_config": self.policy.config(),
            "adaptive": False,
            "budget_tokens": s.budgets[0],
            "page_size": self.policy.page_size,
            "sink_pages": self.policy.sink_pages,
            "local_pages": self.policy.local_pages,
            "context": context,
            "protocol": s.protocol["name"],
            "dense_layers": list(s.dense_layers),
            "backend": s.backend,
            "device": describe_device(s.device),
            "dtype": s.dtype,
            "seed": s.seed,
            "batch": batch,
            "num_heads": c.shapes.num_heads,
            "num_kv_heads": c.shapes.num_kv_heads,
            "head_dim": c.shapes.head_dim,
            "lists": "scattered" if c.lists is None else str(c.lists),
            "cell_key": self.key(batch, context),
            "peak_memory": peak_memory_bytes(s.device),
        }

    def key(self, batch: int, context: int) -> str:
        s = self.settings
        return cell_key(
            {
                "task": s.task,
                "shapes": vars(self.config.shapes),
                "cell": [batch, context],
                "config": self.policy.config(),
                "budget": s.budgets[0],
                "lists": None if self.lists is None else self.lists.capture_hash,
                "keys": [keys.capture_hash for keys in self.captured_keys[:1]],
                "device": describe_device(s.device),
                "dtype": s.dtype,
                "versions": {name: version_of(name) for name in ("torch", "triton")},
                "code": code_hash(),
            }
        )


def over(attend: Attend, buffers: Sequence[Buffer | FFDBuffer]) -> Callable[[int], object]:
    def step(i: int) -> object:
        x = buffers[i]
        return attend(x.q, x.k, x.v)

    return step


def reference_attention(x: Buffer | FFDBuffer) -> Tensor:
    """Dense attention in float32, one row at a time: [B, H, D]."""
    kv_heads, scale = x.k.shape[1], x.q.shape[2] ** -0.5
    rows = []
    for q, k, v in zip(x.q, x.k, x.v, strict=True):
        s = scale * q.float().unflatten(0, (kv_heads, -1)) @ k.float().mT
        rows.append((s.softmax(-1) @ v.float()).flatten(0, 1))
    return torch.stack(rows)
