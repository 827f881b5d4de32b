"""task=lm_eval's own settings, checked. No lm-eval here."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparse_eval.needle.config import is_number, listed, mapped, whole_number

CHATS = ("none", "template")
LEAST_RULER = 1024
"""Tokens at which all of RULER's generators were seen to end."""


@dataclass(frozen=True)
class FloorConfig:
    """What dense must reach for a task to be ranked: the floor given, or chance + margin; chance -
    margin where a score is better when lower."""

    margin: float
    floors: Mapping[str, float]
    n: int
    confidence: float

    def floor(self, task: str, chance: float, *, higher_is_better: bool) -> float:
        """NaN where a score is better when lower and neither a floor nor chance is known."""
        margin = self.margin if higher_is_better else -self.margin
        return self.floors.get(task, chance + margin)


@dataclass(frozen=True)
class LmConfig:
    """limit: documents per task, a number, a share or by task's name; None: all. max_new_tokens,
    max_length: None: the task's own, the model's. question_tokens: of protocol=question, None where
    the documents tell."""

    tasks: tuple[str, ...]
    include_path: tuple[str, ...]
    metadata: Mapping[str, Any]
    limit: float | Mapping[str, float] | None
    num_fewshot: int | None
    chat: str
    system: str | None
    max_new_tokens: int | None
    max_length: int | None
    strict: bool
    batch_size: int
    gate: FloorConfig
    is_question: bool
    question_tokens: int | None
    seed: int

    @property
    def all_metadata(self) -> dict[str, Any]:
        """The metadata given, and what tasks that are made on demand should know of this run."""
        made: dict[str, Any] = {"apply_chat_template": True} if self.chat != "none" else {}
        limits = self.limit.values() if isinstance(self.limit, Mapping) else (self.limit,)
        counts = [int(limit) for limit in limits if limit is not None and limit >= 1]
        if counts:
            made["num_samples"] = max(counts) + self.gate.n
        return made | dict(self.metadata)

    def num_documents(self, task: str, available: int) -> int:
        """How many of a task's documents are compared."""
        limit = self.limit.get(task) if isinstance(self.limit, Mapping) else self.limit
        if limit is None:
            return available
        asked = -(-available * limit // 1) if limit < 1 else limit
        return min(available, int(asked))


def lm_config(task: Mapping[str, Any], protocol: Mapping[str, Any], seed: int) -> LmConfig:
    """Raises ValueError in one line."""
    tasks = listed("task.tasks", task["tasks"])
    if any(not isinstance(name, str) or not name for name in tasks):
        raise ValueError(f"task.tasks must be names of lm-eval tasks, got {tasks}")
    if task["chat"] not in CHATS:
        raise ValueError(f"task.chat must be one of {', '.join(CHATS)}, got {task['chat']!r}")
    if task["system"] is not None and not isinstance(task["system"], str):
        raise ValueError(f"task.system must be a text or null, got {task['system']!r}")
    if not isinstance(task["strict"], bool):
        raise ValueError(f"task.strict must be true or false, got {task['strict']!r}")
    if not isinstance(task["metadata"], Mapping):
        raise ValueError(f"task.metadata must be a mapping, got {task['metadata']!r}")
    check_ruler(task["metadata"].get("max_seq_lengths", []))
    asked = protocol.get("question_tokens")
    return LmConfig(
        tasks=tuple(dict.fromkeys(tasks)),
        include_path=folders(task["include_path"]),
        metadata=dict(task["metadata"]),
        limit=limit_of(task["limit"]),
        num_fewshot=optional("task.num_fewshot", task["num_fewshot"], 0),
        chat=task["chat"],
        system=task["system"],
        max_new_tokens=optional("task.max_new_tokens", task["max_new_tokens"], 1),
        max_length=optional("task.max_length", task["max_length"], 2),
        strict=task["strict"],
        batch_size=whole_number("task.batch_size", task["batch_size"], 1),
        gate=floor_config(task["gate"]),
        is_question=protocol["name"] == "question",
        question_tokens=optional("protocol.question_tokens", asked, 1),
        seed=seed,
    )


def check_ruler(lengths: Any) -> None:
    """RULER's own generators do not end where a length leaves no room for their sentences."""
    for length in listed("task.metadata.max_seq_lengths", lengths) if lengths != [] else ():
        whole_number("task.metadata.max_seq_lengths", length, LEAST_RULER)


def floor_config(gate: Any) -> FloorConfig:
    mapped("task.gate", gate)
    margin, confidence = gate["margin"], gate["confidence"]
    if not is_number(margin) or not 0 < margin < 1:
        raise ValueError(f"task.gate.margin must lie in (0, 1), got {margin!r}")
    if not is_number(confidence) or not 0.5 < confidence < 1:
        raise ValueError(f"task.gate.confidence must lie in (0.5, 1), got {confidence!r}")
    floors = gate["floors"] or {}
    if not isinstance(floors, Mapping) or not all(map(is_finite, floors.values())):
        raise ValueError(f"task.gate.floors must map tasks to scores, got {floors!r}")
    floors = {str(task): float(score) for task, score in floors.items()}
    n = whole_number("task.gate.n", gate["n"], 0)
    return FloorConfig(float(margin), floors, n, float(confidence))


def is_finite(value: Any) -> bool:
    return is_number(value) and math.isfinite(value)


def limit_of(value: Any) -> Any:
    """A number of documents >= 1, a share below 1, those by task, or None."""
    if value is None:
        return None
    if isinstance(value, Mapping):
        found = {str(task): limit_of(one) for task, one in value.items()}
        if not any(isinstance(one, Mapping) for one in found.values()):
            return found
    if not is_number(value) or value <= 0 or (value > 1 and value != int(value)):
        raise ValueError(
            "task.limit must be a number of documents, a share in (0, 1), {task: number} or null, "
            f"got {value!r}"
        )
    return value


def optional(name: str, value: Any, least: int) -> int | None:
    return None if value is None else whole_number(name, value, least)


def folders(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    given = [value] if isinstance(value, str) else listed("task.include_path", value)
    for folder in given:
        if not isinstance(folder, str) or not os.path.isdir(folder):
            raise ValueError(f"task.include_path must be a folder, got {folder!r}")
    return tuple(str(Path(folder).resolve()) for folder in given)
