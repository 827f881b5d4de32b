"""What a name in lm-eval's index stands for: its tasks, through groups and tags, none loaded."""

from __future__ import annotations

import difflib
import functools
import glob
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sparse_eval.lm.config import LmConfig
from sparse_eval.lm.quiet import quiet
from sparse_eval.one_line import first_line

BUNDLED = Path(__file__).resolve().parent.parent / "lm_tasks"


class Unknown(ValueError):
    """A name that an index does not have, or a glob that matches none of it. group: the one that
    lists it, "" if none does."""

    def __init__(self, name: str, group: str) -> None:
        super().__init__(f"lm-eval has no task {'like ' * glob.has_magic(name)}{name!r}")
        self.name, self.group = name, group


def check_names(config: LmConfig) -> None:
    """ValueError in one line for tasks that lm-eval does not have, or that are named twice, and for
    limits and floors of tasks that are not asked for. Its own names take seconds to list. config:
    its globs expanded."""
    index = index_for(config.tasks, config.include_path).task_index
    named_by: dict[str, str] = {}
    for name in config.tasks:
        for task in dict.fromkeys(tasks_of(index, name)):
            if task in named_by:
                raise ValueError(
                    f"task.tasks: {task} is named twice, by {named_by[task]} and by {name}"
                )
            named_by[task] = name
    limits = config.limit if isinstance(config.limit, Mapping) else {}
    for key, given in (("task.limit", limits), ("task.gate.floors", config.gate.floors)):
        for task in given:
            if task not in named_by:
                raise ValueError(
                    f"{key}: {task} is not one of the tasks: {', '.join(named_by)}"
                    f"{hint_of(task, named_by)}"
                )


def index_for(names: Sequence[str], include_path: tuple[str, ...], metadata: str = "{}") -> Any:
    """The smallest index that knows all names, and all that globs match. Raises ValueError for a
    name that none knows."""
    near = (str(BUNDLED), *include_path)
    places = [(lambda: near, False), (lambda: families(tuple(names)) + near, False)]
    if any(map(glob.has_magic, names)):
        del places[0]  # which knows some matches, and not that there are more
    for paths, defaults in [*places, (lambda: near, True)]:
        with quiet():
            found = manager(paths(), defaults, metadata)
        try:
            for name in names:
                for match in names_like(found, name):
                    list(tasks_of(found.task_index, match))
        except Unknown as error:
            unknown = error
            continue
        return found
    listed = f", which its group {unknown.group} lists" if unknown.group else ""
    raise ValueError(f"task.tasks: {unknown}{listed}{hint_of(unknown.name, found.all_tasks)}")


def names_like(found: Any, name: str) -> list[str]:
    """A name itself, or what lm-eval or a folder of yamls has for a glob. found: a TaskManager.
    Raises Unknown."""
    if not glob.has_magic(name):
        return [name]
    is_path = name.endswith(".yaml")
    matches = sorted(glob.glob(os.path.expanduser(name))) if is_path else found.match_tasks([name])
    if not matches:
        raise Unknown(name, "")
    return matches


@functools.cache
def manager(paths: tuple[str, ...], defaults: bool, metadata: str = "{}") -> Any:
    """lm-eval's index of the tasks below some folders. defaults: also all of its own, of which
    there are 14,000 yamls: seconds."""
    from lm_eval.tasks import TaskManager

    try:
        return TaskManager(
            include_path=list(paths), include_defaults=defaults, metadata=json.loads(metadata)
        )
    except TypeError as error:  # it sorts names
        raise ValueError(
            f"task.include_path: lm-eval cannot index {', '.join(paths)}, as where the task of a "
            f"yaml is no text: {first_line(error)}"
        ) from None


@functools.cache
def families(names: tuple[str, ...]) -> tuple[str, ...]:
    """lm-eval's own folders in which a yaml mentions one of the names, or what a glob spells."""
    import lm_eval.tasks

    root = Path(lm_eval.tasks.__file__).parent
    mention = re.compile("|".join(re.escape(longest_literal(name)) for name in names))
    return tuple(
        str(root / folder)
        for folder in sorted(
            {
                path.relative_to(root).parts[0]
                for path in root.glob("*/**/*.yaml")
                if mention.search(path.read_text(errors="ignore"))
            }
        )
    )


def longest_literal(name: str) -> str:
    """Of a glob: the longest piece that every match holds. A name is its own."""
    return max(re.split(r"[*?]|\[[^]]*\]", name), key=len) if glob.has_magic(name) else name


def tasks_of(index: Mapping[str, Any], name: str, above: tuple[str, ...] = ()) -> Iterator[str]:
    """The names of the tasks that a task, group, tag or path of a yaml stands for. above: the
    groups that list it. Raises Unknown, or ValueError for groups that hold nothing or themselves"""
    entry = index.get(name) or of_path(name)
    if entry is None:
        raise Unknown(name, above[-1] if above else "")
    if entry.name in above:
        raise ValueError(f"task.tasks: lm-eval group {entry.name} contains itself")
    kind = entry.kind.name
    if kind == "TAG":
        yield from sorted(task for task in entry.tags if task in index)
    elif kind == "GROUP":
        yield from members_of(index, entry.name, entry.cfg, above)
    else:
        yield entry.name


def of_path(name: str) -> Any | None:
    """lm-eval's entry of a task's yaml that is no part of an index. Groups have to be."""
    from lm_eval.tasks._index import TaskIndex
    from lm_eval.tasks._yaml_loader import load_yaml

    path = Path(os.path.expanduser(name))
    if not (name.endswith(".yaml") and os.path.isfile(path)):
        return None
    try:
        config = load_yaml(path.resolve(), resolve_func=False)
    except Exception as error:  # of a yaml, and of those that it includes
        raise ValueError(f"task.tasks: {name} cannot be read: {first_line(error)}") from None
    if "group" in config:
        raise ValueError(
            f"task.tasks: {name} is the yaml of a group, which lm-eval finds by name alone: "
            f"task.tasks=[{config['group']}] task.include_path={path.parent}"
        )
    return TaskIndex.entry_from_path(path) if "task" in config else None


def members_of(
    index: Mapping[str, Any], group: str, config: Mapping[str, Any], above: tuple[str, ...]
) -> Iterator[str]:
    """The tasks of a group; those that it defines itself get its name in front, as in lm-eval."""
    members = config.get("task")
    if not isinstance(members, list) or not members:
        raise ValueError(f"task.tasks: lm-eval group {group} lists no tasks, got {members!r}")
    for member in members:
        given = member if isinstance(member, Mapping) else {"task": member}
        name = str(given.get("group", given.get("task")))
        if name in index or not isinstance(member, Mapping):
            yield from tasks_of(index, name, (*above, group))
        elif "group" in given:
            yield from members_of(index, f"{group}::{name}", given, (*above, group))
        else:
            yield f"{group}::{name}"


def hint_of(name: str, known: Any) -> str:
    close = difflib.get_close_matches(name, list(known), n=3)
    return f"; did you mean {', '.join(close)}?" if close else ""
