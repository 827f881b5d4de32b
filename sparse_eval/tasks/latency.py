"""task=latency: how long a decode step's attention takes on this GPU, and what it is compared with.

A cell is a batch and a context; its parts are timed in turns over the same buffers. Shapes come
from the model's configuration, weights are never loaded.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from sparse_eval.cli.config import Settings
from sparse_eval.cli.progress import Progress
from sparse_eval.core import Row
from sparse_eval.device import DTYPES, describe_device
from sparse_eval.latency.config import FFD_PARTS
from sparse_eval.models import model_info
from sparse_eval.storage.cells import CellStore
from sparse_eval.tasks.latency_bench import Bench
from sparse_eval.tasks.latency_ffd import ffd_cell_rows, rules_rows
from sparse_eval.tasks.latency_quest import PARTS, quest_cell_rows


@dataclass
class Latency:
    """One run's measurement. Timings are of this machine now: no cell comes from the store."""

    settings: Settings
    progress: Progress

    @cached_property
    def bench(self) -> Bench:
        return Bench(self.settings, self.progress)

    def facts(self) -> dict[str, Any]:
        """Further keys of summary.json."""
        return {
            "gpu": describe_device(self.settings.device),
            "l2_bytes": self.bench.l2_bytes,
            "ceiling": self.bench.ceilings,
            "baselines_not_timed": self.bench.not_timed,
        }

    def run(self, store: CellStore) -> Iterator[list[Row]]:
        c = self.bench.config
        torch.manual_seed(self.settings.seed)
        cells = [(b, n) for b in c.batches for n in c.contexts]
        sdpa = {"sdpa"} if self.sdpa_is_quests else set()
        groups = {
            quest_cell_rows: {*PARTS} | sdpa,
            ffd_cell_rows: {*FFD_PARTS},
            rules_rows: {"rules"},
        }
        wanted = [rows_of for rows_of, names in groups.items() if names & {*c.what}]
        if wanted:
            with self.progress.bar("timing", len(cells) * len(wanted), unit="cells") as tick:
                for batch, context in cells:
                    for rows_of in wanted:
                        started = time.perf_counter()
                        rows = rows_of(self.bench, batch, context)
                        seconds = (time.perf_counter() - started) / len(rows)
                        yield [row | {"seconds": seconds} for row in rows]
                        torch.cuda.empty_cache()
                        tick(1)
        if "generate" in c.what:
            for context in c.contexts:
                yield generated_rows(self.bench, context)
                torch.cuda.empty_cache()

    @property
    def sdpa_is_quests(self) -> bool:
        """Where parts of top-δ alone are timed, they bring their own SDPA rows."""
        what = {*self.bench.config.what}
        return bool({*PARTS} & what) or not {*FFD_PARTS} & what


def generated_rows(bench: Bench, context: int) -> list[Row]:
    """The patched loop and the dense one, one row each; the median is per token."""
    from sparse_eval.latency.generate import decode_times, random_model

    s, info = bench.settings, model_info(bench.settings.model)
    num_layers = info.num_layers or 28
    model = random_model(bench.config.shapes, num_layers, context, s.device, DTYPES[s.dtype])
    ids = torch.randint(3, 250, (context,), device=s.device)
    with bench.progress.stage(f"generating after {context:,} tokens"):
        times = decode_times(
            model,
            ids,
            bench.policy,
            s.budgets[0],
            new_tokens=bench.config.new_tokens,
            dense_layers=s.dense_layers,
        )
    return [
        bench.common(1, context)
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
