"""task=latency's own settings, checked."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparse_eval.kernels.quest_select import can_select
from sparse_eval.kernels.thumbnail import MAX_TRITON_PAGE_SIZE, RULES, can_use_triton
from sparse_eval.latency.replay import check_keys, check_replay
from sparse_eval.policies.quest import Quest

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
    graph, at least. lists: None: scattered page lists; a path: lists replayed from that capture.
    new_tokens: of what=generate, which decodes one row. keys: of the ffd parts; None: random ones,
    at densities, the shares of the tokens that a KV head's union reads; a path: a capture's, at
    deltas. scales: their thumbnails' step rule; keep_ratio: share of the tokens that a query head
    keeps in what=rules."""

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
    what = listed("task.what", task["what"])
    for name in what:
        if name not in WHAT:
            raise ValueError(f"task.what must be among {', '.join(WHAT)}, got {name!r}")
    batches = listed("task.batches", task["batches"])
    contexts = listed("task.contexts", task["contexts"])
    for name, values, least in (("batches", batches, 1), ("contexts", contexts, 16)):
        for value in values:
            whole_number(f"task.{name}", value, least)
    graph = listed("task.graph", task["graph"])
    if any(not isinstance(value, bool) for value in graph):
        raise ValueError(f"task.graph must be a list of true and false, got {graph}")
    if isinstance(task["working_set"], bool) or not isinstance(task["working_set"], int | float):
        raise ValueError(f"task.working_set must be a number > 0, got {task['working_set']!r}")
    return LatencyConfig(
        what=tuple(what),
        batches=tuple(batches),
        contexts=tuple(contexts),
        graph=tuple(graph),
        repeats=whole_number("task.repeats", task["repeats"], 3),
        working_set=float(task["working_set"]),
        steps=whole_number("task.steps", task["steps"], 1),
        lists=capture_path("task.lists", task["lists"], "scattered"),
        new_tokens=whole_number("task.new_tokens", task["new_tokens"], 2),
        keys=capture_path("task.keys", task["keys"], "random"),
        densities=tuple(
            share("task.densities", x) for x in listed("task.densities", task["densities"])
        ),
        deltas=tuple(delta_of(x) for x in listed("task.deltas", task["deltas"])),
        scales=scales_of(task["scales"]),
        keep_ratio=share("task.keep_ratio", task["keep_ratio"]),
        shapes=shapes_of(task["shapes"], info),
    )


def check_latency(task: Mapping[str, Any], info: Any, policy: Any, device: str) -> None:
    """ValueError in one line for what cannot be timed here."""
    config = latency_config(task, info)
    if not device.startswith("cuda"):
        raise ValueError(
            f"task=latency needs a CUDA GPU, got device={device}: nothing is emulated, and times "
            "on a CPU would say nothing about one"
        )
    if type(policy) is not Quest or policy.metadata_dtype == "float32":
        given = type(policy).__name__.lower()
        if isinstance(policy, Quest):
            given += f" with {policy.metadata_dtype}"
        raise ValueError(
            "task=latency times Quest's select kernel: policy must be quest with metadata_dtype "
            f"auto or int8, got {given}"
        )
    uses_thumbnails = {*FFD_PARTS, "rules"} & {*config.what}
    if uses_thumbnails and not can_use_triton(policy.page_size):
        raise ValueError(
            f"task.what={sorted(uses_thumbnails)[0]} takes page sizes that are powers of two up to "
            f"{MAX_TRITON_PAGE_SIZE}, got {policy.page_size}"
        )
    if config.keys is not None and {*FFD_PARTS} & {*config.what}:
        check_keys(config.keys, vars(config.shapes), config.contexts)
    if not {*QUEST_PARTS, "generate"} & {*config.what}:
        return
    num_pages = max(config.contexts) // policy.page_size
    if not can_select(policy.group, num_pages):
        raise ValueError(
            "task=latency: the select kernel takes group max or sum and fewer than 32,768 pages, "
            f"got group={policy.group} and {num_pages:,} pages"
        )
    if config.lists is not None:
        check_replay(config.lists, config.shapes.num_kv_heads, config.contexts)


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


def listed(name: str, value: Any) -> list[Any]:
    values = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [value]
    if not values:
        raise ValueError(f"{name} must have at least one value, got []")
    return values


def capture_path(name: str, value: Any, otherwise: str) -> Path | None:
    """None where value is the word that stands for no capture."""
    if value == otherwise:
        return None
    if not Path(str(value)).is_file():
        raise ValueError(f"{name} must be {otherwise} or a capture's path, got {value!r}")
    return Path(value)


def delta_of(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(f"task.deltas must be numbers >= 0, in logits, got {value!r}")
    return float(value)


def share(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1:
        raise ValueError(f"{name} must be a number between 0 and 1, got {value!r}")
    return float(value)


def scales_of(value: Any) -> str:
    if value not in RULES:
        raise ValueError(f"task.scales must be one of {', '.join(RULES)}, got {value!r}")
    return str(value)


def whole_number(name: str, value: Any, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be an integer >= {least}, got {value!r}")
    return value
