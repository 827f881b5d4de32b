"""What all cells of task=latency share: the clock's settings, baselines, the columns of a row."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from sparse_eval.cli.config import Settings
from sparse_eval.cli.progress import Progress
from sparse_eval.core import Row
from sparse_eval.device import DTYPES, describe_device, peak_memory_bytes
from sparse_eval.latency.baselines import Attend, other_kernels, sdpa_variants, those_that_run
from sparse_eval.latency.cell import Buffer, Cell
from sparse_eval.latency.clock import Ceiling, Timed, Timing, measure, memory_ceiling
from sparse_eval.latency.config import LatencyConfig, latency_config
from sparse_eval.latency.ffd_cell import FFDBuffer
from sparse_eval.latency.replay import (
    CapturedKeys,
    CapturedLists,
    captured_keys,
    captured_lists,
)
from sparse_eval.models import model_info
from sparse_eval.policies.quest import Quest
from sparse_eval.provenance import code_hash, version_of
from sparse_eval.storage.cells import cell_key
from sparse_eval.storage.columns import SCHEMA

log = logging.getLogger("sparse_eval")
NAN = float("nan")
SCREENING_REPEATS = 3


@dataclass
class Bench:
    """One run's settings and what it finds out once: the ceiling, what cannot be timed here."""

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

    @cached_property
    def captured_keys(self) -> list[CapturedKeys]:
        """Of the ffd parts; none where their keys are random."""
        path, s = self.config.keys, self.settings
        return [] if path is None else captured_keys(path, s.device, DTYPES[s.dtype])

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
