"""A clock for GPU work: many steps per measurement, in turns, medians; and the memory ceiling.

A CUDA graph binds its addresses, so one graph holds many steps over all buffers in rotation, and
its time is divided by the steps: what a launch of the graph itself costs is shared by all of them.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

Step = Callable[[int], object]
"""Enqueues one step of work over buffer number i; its results keep their memory to themselves."""


@dataclass(frozen=True)
class Timing:
    """Microseconds of one step over the repeats."""

    median_us: float
    p10_us: float
    p90_us: float


@dataclass(frozen=True)
class Timed:
    """One thing to time: `steps` calls over buffers 0 .. num_buffers - 1 in rotation."""

    step: Step
    num_buffers: int
    steps: int
    graph: bool

    def prepared(self) -> Callable[[], None]:
        """Something that enqueues all steps: a graph's replay, or the calls themselves."""
        order = [i % self.num_buffers for i in range(self.steps)]

        def calls() -> None:
            for i in order:
                self.step(i)

        calls()  # compiles, allocates, and fills caches of handles
        torch.cuda.synchronize()
        if not self.graph:
            return calls
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            calls()
        return graph.replay


def measure(
    work: Mapping[str, Timed], *, repeats: int, warmup: int = 3, seed: int = 0
) -> dict[str, Timing]:
    """Times all of `work` in turns, each round in another order, so that drift hits all alike."""
    ready = {name: timed.prepared() for name, timed in work.items()}
    samples: dict[str, list[float]] = {name: [] for name in work}
    order = list(ready)
    shuffle = random.Random(seed).shuffle
    for turn in range(warmup + repeats):
        shuffle(order)
        for name in order:
            elapsed = elapsed_us(ready[name]) / work[name].steps
            if turn >= warmup:
                samples[name].append(elapsed)
    return {name: timing(values) for name, values in samples.items()}


def elapsed_us(run: Callable[[], None]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3


def timing(samples: Sequence[float]) -> Timing:
    tenths = statistics.quantiles(samples, n=10, method="inclusive")
    return Timing(statistics.median(samples), tenths[0], tenths[-1])


@dataclass(frozen=True)
class Ceiling:
    """Bytes per second that this device's memory gave in this run. copy counts reads and writes."""

    copy: float
    read: float

    @property
    def best(self) -> float:
        return max(self.copy, self.read)


def memory_ceiling(device: torch.device, repeats: int = 10) -> Ceiling:
    """A large copy and a large read, through a kernel that only loads."""
    from sparse_eval.latency.read_kernel import read_all

    size = min(4 << 30, torch.cuda.mem_get_info(device)[0] // 4)
    source = torch.empty(size // 4, dtype=torch.int32, device=device).fill_(1)
    target = torch.empty_like(source)
    timings = measure(
        {
            "copy": Timed(lambda i: target.copy_(source), 1, 2, True),
            "read": Timed(lambda i: read_all(source), 1, 2, True),
        },
        repeats=repeats,
    )
    per_us = {"copy": 2 * size, "read": size}
    rates = {name: per_us[name] / timings[name].median_us * 1e6 for name in per_us}
    return Ceiling(**rates)
