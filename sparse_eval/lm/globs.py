"""Globs in task.tasks (`arc_*`) -> names, matched as lm-eval matches them."""

from __future__ import annotations

import functools
import glob
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from sparse_eval.lm.config import LmConfig
from sparse_eval.lm.names import index_for, names_like, tasks_of


def expanded(config: LmConfig) -> LmConfig:
    """With names in the place of globs; as it is where there are none. Raises ValueError in one
    line for a glob that matches nothing."""
    if not any(map(glob.has_magic, config.tasks)):
        return config
    return replace(config, tasks=spelled_out(config.tasks, config.include_path))


@functools.cache
def spelled_out(asked: tuple[str, ...], include_path: tuple[str, ...]) -> tuple[str, ...]:
    """Each glob's matches in its place, in order of their names. A glob matches groups and tags
    beside their tasks: each task is named once, by the largest group or tag that matches, and those
    that are named without a glob stay."""
    manager = index_for(asked, include_path)
    plain = [name for name in asked if not glob.has_magic(name)]
    named = {task for name in plain for task in tasks_of(manager.task_index, name)}
    found = list[str]()
    for name in asked:
        found += sorted(matches(manager, name, named)) if glob.has_magic(name) else [name]
    return tuple(found)


def matches(manager: Any, pattern: str, named: set[str]) -> Iterator[str]:
    """What a glob adds to the tasks that are named already, which grow by it."""
    index = manager.task_index
    stands_for = {match: list(tasks_of(index, match)) for match in names_like(manager, pattern)}
    for match, tasks in sorted(stands_for.items(), key=lambda item: (-len(item[1]), item[0])):
        new = [task for task in tasks if task not in named]
        if len(new) == len(tasks):
            yield match
        else:  # the rest of a group, part of which is named already
            yield from (task for task in new if task in index)
        named.update(new)
