"""task=needle's own settings, checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sparse_eval.needle.kinds import KEYS, KINDS
from sparse_eval.needle.template import CHATS

SPARE_TOKENS = 16
"""What an answer may have beside the value's own tokens."""
LONGEST_VALUE = 48
"""Tokens that no value exceeds: a uuid has 36 characters."""


@dataclass(frozen=True)
class GateConfig:
    """dense_min: what the lower bound of dense accuracy must reach. n: samples of its own per
    (context, depth, kind). confidence: of the one-sided bound."""

    dense_min: float
    n: int
    confidence: float


@dataclass(frozen=True)
class NeedleConfig:
    """contexts: tokens. n: samples per (context, depth, kind). max_new_tokens: None: as many as the
    value has, and 16 more."""

    kinds: tuple[str, ...]
    depths: tuple[float, ...]
    contexts: tuple[int, ...]
    n: int
    distractors: int
    chat: str
    max_new_tokens: int | None
    gate: GateConfig
    measure_recall: bool

    @property
    def most_new_tokens(self) -> int:
        """The most tokens an answer may have, generated or fed."""
        return self.max_new_tokens or LONGEST_VALUE + SPARE_TOKENS


def needle_config(task: Mapping[str, Any], *, context: int, n: int, protocol: str) -> NeedleConfig:
    """context: the run's; n: prompts.n. Raises ValueError in one line."""
    kinds = listed("task.kinds", task["kinds"])
    for kind in kinds:
        if kind not in KINDS:
            raise ValueError(f"task.kinds must be among {', '.join(KINDS)}, got {kind!r}")
    depths = listed("task.depths", task["depths"])
    if any(not is_number(d) or not 0 <= d <= 1 for d in depths):
        raise ValueError(f"task.depths must lie in [0, 1], got {depths}")
    contexts = [context] if task["contexts"] is None else listed("task.contexts", task["contexts"])
    for value in contexts:
        whole_number("task.contexts", value, 2)
    if task["chat"] not in CHATS:
        raise ValueError(f"task.chat must be one of {', '.join(CHATS)}, got {task['chat']!r}")
    if not isinstance(task["measure_recall"], bool):
        raise ValueError(
            f"task.measure_recall must be true or false, got {task['measure_recall']!r}"
        )
    if task["measure_recall"] and protocol != "decode":
        raise ValueError(f"task.measure_recall=true needs protocol=decode, got {protocol!r}")
    if task["max_new_tokens"] is not None:
        whole_number("task.max_new_tokens", task["max_new_tokens"], 1)
    distractors = whole_number("task.distractors", task["distractors"], 1)
    if distractors >= len(KEYS):
        raise ValueError(f"task.distractors must be below {len(KEYS)}, got {distractors}")
    return NeedleConfig(
        kinds=tuple(dict.fromkeys(kinds)),
        depths=tuple(dict.fromkeys(float(d) for d in depths)),
        contexts=tuple(dict.fromkeys(contexts)),
        n=n,
        distractors=distractors,
        chat=task["chat"],
        max_new_tokens=task["max_new_tokens"],
        gate=gate_config(task["gate"], n),
        measure_recall=task["measure_recall"],
    )


def gate_config(gate: Any, n: int) -> GateConfig:
    mapped("task.gate", gate)
    for key in ("dense_min", "confidence"):
        if not is_number(gate[key]) or not 0 < gate[key] < 1:
            raise ValueError(f"task.gate.{key} must lie in (0, 1), got {gate[key]!r}")
    own = n if gate["n"] is None else whole_number("task.gate.n", gate["n"], 0)
    if gate["confidence"] <= 0.5:
        raise ValueError(f"task.gate.confidence must be > 0.5, got {gate['confidence']!r}")
    return GateConfig(float(gate["dense_min"]), own, float(gate["confidence"]))


def mapped(name: str, value: Any) -> Mapping[str, Any]:
    """A group of keys."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} must be a mapping {{name: value}}, got {value!r}")
    return value


def listed(name: str, value: Any) -> list[Any]:
    """A list, not empty."""
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise ValueError(f"{name} must be a list with at least one entry, got {value!r}")
    return list(value)


def whole_number(name: str, value: Any, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be an integer >= {least}, got {value!r}")
    return value


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
