"""A job's (policy, budget) pairs: measured together; one by one once something in them fails."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

from sparse_eval.budgets import Budget, resolve_budget
from sparse_eval.cli.config import Settings, token_budgets
from sparse_eval.cli.failure import failure_of, told
from sparse_eval.cli.progress import Progress
from sparse_eval.core import Row
from sparse_eval.inputs.store import Unavailable
from sparse_eval.provenance import code_hash, version_of
from sparse_eval.storage.cells import CellStore, cell_key
from sparse_eval.storage.files import to_json, write_atomic
from sparse_eval.tasks.shared import SharedFailed

log = logging.getLogger("sparse_eval")

NEUTRAL = ("tracking", "name", "cache_dir", "model_cache", "cache_gb", "verbose", "retry_failed")
"""Settings that cannot make a measurement fail or work."""

PASSING = (OSError, MemoryError, Unavailable)
"""Failures of the machine, not of the configuration: never remembered."""

ENDING = (*PASSING, SharedFailed)
"""Failures that no other policy or budget would escape."""


class Task(Protocol):
    def run(self, store: CellStore) -> Iterator[list[Row]]: ...
    def facts(self) -> dict[str, Any]: ...


@dataclass
class Parts:
    """make: settings -> the task that measures them. remembers: a part of a sweep that failed
    before, with the same configuration and code, is not tried again unless retry_failed."""

    settings: Settings
    progress: Progress
    make: Callable[[Settings, Progress], Task]
    remembers: bool = False
    failures: list[dict[str, str]] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    seen: set[Any] = field(default_factory=set)

    def run(self, store: CellStore) -> Iterator[list[Row]]:
        """Rows of one cell at a time, each cell once. What fails is in `failures` at the end.
        Raises the error where the cause is not one policy or budget."""
        try:
            yield from self._run(store)
        except SharedFailed as failed:
            cause = failed.__cause__
            assert isinstance(cause, Exception)
            self.remember(self.settings, cause)
            raise cause from cause.__cause__

    def _run(self, store: CellStore) -> Iterator[list[Row]]:
        """Together; where that fails, and not for what all share, one by one."""
        parts = parts_of(self.settings)
        known = {name: self.recall(part) for name, part in parts.items()}
        if not any(known.values()):
            try:
                yield from self._measure(self.settings, store)
                return
            except Exception as error:
                if len(parts) == 1 or isinstance(error, ENDING):
                    if not isinstance(error, SharedFailed):
                        self.remember(self.settings, error)
                    raise
                log.exception("the job failed: its policies and budgets are measured one by one")
        for name, part in parts.items():
            if failure := known[name]:
                self.failures.append(failure | {"part": name})
                continue
            try:
                yield from self._measure(part, store)
            except Exception as error:
                if isinstance(error, ENDING):
                    raise
                self.progress.warn(f"{name} failed: {told(error)}")
                self.remember(part, error)
                self.failures.append(plain_failure(error) | {"part": name})

    def _measure(self, settings: Settings, store: CellStore) -> Iterator[list[Row]]:
        task = self.make(settings, self.progress)
        try:
            for rows in task.run(store):
                key = (rows[0].get("cell_key"), rows[0].get("role"), rows[0].get("policy"))
                if key[0] is None or key not in self.seen:
                    self.seen.add(key)
                    yield rows
        finally:
            self.facts |= task.facts()

    def recall(self, part: Settings) -> dict[str, str] | None:
        """How the part failed before; None: it did not, or it is to be tried again."""
        if not self.remembers or part.retry_failed:
            return None
        try:
            failure = json.loads(memory_path(part).read_text())
            line = f"{failure['error']} (failed {failure['when']}; retry_failed=true tries again)"
            return {"error": line, "traceback": str(failure["traceback"])}
        except (OSError, ValueError, KeyError, TypeError):  # not there, or damaged: tried again
            return None

    def remember(self, part: Settings, error: Exception) -> None:
        passing = isinstance(error, PASSING) or "OutOfMemory" in type(error).__name__
        if not self.remembers or passing:
            return
        when = datetime.now().astimezone().isoformat(timespec="seconds")
        for one in parts_of(part).values():
            try:
                data = to_json(plain_failure(error) | {"when": when})
                write_atomic(memory_path(one), data.encode())
            except OSError as problem:
                log.warning("failure not remembered: %s", problem)


def parts_of(settings: Settings) -> dict[str, Settings]:
    """One settings object for every policy at every budget, policies in turn."""
    s, parts = settings, {}
    for asked in s.budgets_asked:
        for named in s.policies:
            one = (named,)
            name = (
                named.label
                if named.policy.adaptive
                else f"{named.label} at {told_budget(s, asked)}"
            )
            parts[name] = replace(
                s,
                policies=one,
                budgets=token_budgets([asked], s.context, one),
                budgets_asked=(asked,),
            )
    return parts


def told_budget(settings: Settings, asked: Budget) -> str:
    """A budget as the tables have it, in tokens; a share that stands for one number of tokens per
    context stays a share."""
    if isinstance(asked, float) and settings.task.get("contexts"):
        return f"{asked:.1%} of the context"
    return f"{resolve_budget(asked, settings.context):,} tokens"


def plain_failure(error: BaseException) -> dict[str, str]:
    failure = failure_of(error)
    return {"error": failure["error"], "traceback": failure["traceback"]}


def memory_path(part: Settings) -> Path:
    """Where a failure of these settings, with this code and these input files, is remembered."""
    config = {key: value for key, value in config_record(part).items() if key not in NEUTRAL}
    key = cell_key(
        {
            "config": config,
            "code": code_hash(*(type(named.policy) for named in part.policies)),
            "versions": {name: version_of(name) for name in ("torch", "transformers", "triton")},
            "files": file_states([part.model, part.prompts, part.task]),
        }
    )
    return part.cache_dir / "failures" / f"{key}.json"


def file_states(value: Any) -> dict[str, list[int]]:
    """Size and time of every file that a config names: a mended file is another configuration."""
    if isinstance(value, dict | list):
        inner = value.values() if isinstance(value, dict) else value
        return {name: state for item in inner for name, state in file_states(item).items()}
    if not isinstance(value, str) or not value or not os.path.exists(value):
        return {}
    stat = os.stat(value)
    return {value: [stat.st_size, stat.st_mtime_ns]}


def config_record(settings: Settings) -> dict[str, Any]:
    """Settings as plain JSON values."""
    record = {key: value for key, value in vars(settings).items() if key != "policies"}
    record["policies"] = {n.label: n.policy.config() for n in settings.policies}
    return json.loads(json.dumps(record, default=str))
