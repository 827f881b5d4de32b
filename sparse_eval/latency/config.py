"""task=latency's own settings, each checked by itself; together: checks.py."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from sparse_eval.kernels.thumbnail import RULES

QUEST_PARTS = ("dense", "metadata", "select", "attend", "step")
FFD_PARTS = ("ffd_select", "ffd_attend", "ffd_attend_residual", "ffd_step", "ffd_step_residual")
WHAT = ("sdpa", *QUEST_PARTS, "generate", *FFD_PARTS, "rules")


@dataclass(frozen=True)
class Shapes:
    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class LatencyConfig:
    """batches, contexts: rows and tokens of each cell. graph: which launch modes. repeats: replays
    timed. working_set: bytes the buffers rotate over, in L2 sizes. steps: attention steps in one
    graph, at least. lists: a capture's path, whose lists `attend` replays; None: scattered page
    lists, or nothing that reads lists. new_tokens: of what=generate, which decodes one row. keys:
    of the ffd parts; None: random ones (or no such part), at densities, the shares of the tokens
    that a KV head's union reads; a path: a capture's, at deltas. scales: their thumbnails' step
    rule; keep_ratio: share of the tokens that a query head keeps in what=rules. Values given twice
    are timed once."""

    what: tuple[str, ...]
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    graph: tuple[bool, ...]
    repeats: int
    working_set: float
    steps: int
    lists: Path | None
    new_tokens: int
    keys: Path | None
    densities: tuple[float, ...]
    deltas: tuple[float, ...]
    scales: str
    keep_ratio: float
    shapes: Shapes


def latency_config(task: Mapping[str, Any], info: Any) -> LatencyConfig:
    """info: the model's ModelInfo, whose shapes hold where the task gives none. Raises ValueError
    in one line."""
    what = distinct("task.what", task["what"])
    for name in what:
        if name not in WHAT:
            raise ValueError(f"task.what must be among {', '.join(WHAT)}, got {name!r}")
    graph = distinct("task.graph", task["graph"])
    if any(not isinstance(value, bool) for value in graph):
        raise ValueError(f"task.graph must be a list of true and false, got {list(graph)}")
    lists = capture_path("task.lists", task["lists"], "scattered")
    keys = capture_path("task.keys", task["keys"], "random")
    return LatencyConfig(
        what=what,
        batches=distinct("task.batches", task["batches"], partial(whole_number, least=1)),
        contexts=distinct("task.contexts", task["contexts"], partial(whole_number, least=16)),
        graph=graph,
        repeats=whole_number("task.repeats", task["repeats"], 3),
        working_set=positive("task.working_set", task["working_set"]),
        steps=whole_number("task.steps", task["steps"], 1),
        lists=lists if "attend" in what else None,
        # two tokens of each loop warm up
        new_tokens=whole_number("task.new_tokens", task["new_tokens"], 3),
        keys=keys if {*FFD_PARTS} & {*what} else None,
        densities=distinct("task.densities", task["densities"], share),
        deltas=distinct("task.deltas", task["deltas"], delta_of),
        scales=scales_of(task["scales"]),
        keep_ratio=share("task.keep_ratio", task["keep_ratio"]),
        shapes=shapes_of(task["shapes"], info),
    )


def shapes_of(given: Any, info: Any) -> Shapes:
    if not isinstance(given, Mapping):
        raise ValueError(f"task.shapes must be a mapping {{name: value}}, got {given!r}")
    values = {}
    for name in ("num_heads", "num_kv_heads", "head_dim"):
        value = getattr(info, name) if given[name] is None else given[name]
        if value is None:
            raise ValueError(f"task.shapes.{name} must be given: {info.name} does not tell it")
        values[name] = whole_number(f"task.shapes.{name}", value, 1)
    if values["num_heads"] % values["num_kv_heads"]:
        raise ValueError(
            f"task.shapes.num_heads must be a multiple of num_kv_heads "
            f"({values['num_kv_heads']}), got {values['num_heads']}"
        )
    return Shapes(**values)


def distinct(name: str, value: Any, of: Callable[[str, Any], Any] | None = None) -> tuple[Any, ...]:
    """One value or a list of them, each checked by `of` and taken once, in the order given."""
    values = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [value]
    if not values:
        raise ValueError(f"{name} must have at least one value, got []")
    checked = [x if of is None else of(name, x) for x in values]
    return tuple(x for i, x in enumerate(checked) if x not in checked[:i])


def capture_path(name: str, value: Any, otherwise: str) -> Path | None:
    """None where value is the word that stands for no capture."""
    if value == otherwise:
        return None
    path = os.path.expanduser(str(value))
    if not os.path.isfile(path):
        raise ValueError(f"{name} must be {otherwise} or a capture's path, got {value!r}")
    return Path(path)


def delta_of(name: str, value: Any) -> float:
    if not is_number(value) or not 0 <= value < math.inf:
        raise ValueError(f"{name} must be numbers >= 0, in logits, got {value!r}")
    return float(value)


def positive(name: str, value: Any) -> float:
    if not is_number(value) or not 0 < value < math.inf:
        raise ValueError(f"{name} must be a finite number > 0, got {value!r}")
    return float(value)


def share(name: str, value: Any) -> float:
    if not is_number(value) or not 0 < value < 1:
        raise ValueError(f"{name} must be a number between 0 and 1, got {value!r}")
    return float(value)


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def scales_of(value: Any) -> str:
    if value not in RULES:
        raise ValueError(f"task.scales must be one of {', '.join(RULES)}, got {value!r}")
    return str(value)


def whole_number(name: str, value: Any, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be an integer >= {least}, got {value!r}")
    return value
