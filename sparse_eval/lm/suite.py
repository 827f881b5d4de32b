"""Names -> lm-eval's own task objects, with their data here; a hub that is away is one line."""

from __future__ import annotations

import contextlib
import difflib
import functools
import io
import json
import logging
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparse_eval.inputs.hub import endpoint, is_offline, is_reachable
from sparse_eval.inputs.store import Unavailable

BUNDLED = Path(__file__).resolve().parent.parent / "lm_tasks"

log = logging.getLogger("sparse_eval")


@dataclass(frozen=True)
class Suite:
    """tasks: by name, in order. groups: lm-eval's group objects, by name."""

    tasks: dict[str, Any]
    groups: dict[str, Any]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """What lm-eval and its tasks print goes to the log: bars, counts, advice."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            yield
    finally:
        for line in printed.getvalue().splitlines():
            log.debug("lm-eval: %s", line)


@functools.cache
def manager(paths: tuple[str, ...], defaults: bool, metadata: str = "{}") -> Any:
    """lm-eval's index of the tasks below some folders. defaults: also all of its own, of which
    there are 14,000 yamls: seconds."""
    from lm_eval.tasks import TaskManager

    return TaskManager(
        include_path=list(paths), include_defaults=defaults, metadata=json.loads(metadata)
    )


def index_for(names: Sequence[str], include_path: tuple[str, ...], metadata: str = "{}") -> Any:
    """The smallest index that knows all names. Raises ValueError for one that none knows."""
    near = (str(BUNDLED), *include_path)
    places = [(lambda: near, False), (lambda: families(tuple(names)) + near, False)]
    for paths, defaults in [*places, (lambda: near, True)]:
        with quiet():
            found = manager(paths(), defaults, metadata)
            unknown = [name for name in names if not is_known(found, name)]
        if not unknown:
            return found
    close = difflib.get_close_matches(unknown[0], found.all_tasks, n=3)
    hint = f"; did you mean {', '.join(close)}?" if close else ""
    raise ValueError(f"task.tasks: lm-eval has no task {unknown[0]!r}{hint}")


@functools.cache
def families(names: tuple[str, ...]) -> tuple[str, ...]:
    """lm-eval's own folders in which a yaml mentions one of the names."""
    import lm_eval.tasks

    root = Path(lm_eval.tasks.__file__).parent
    mention = re.compile("|".join(map(re.escape, names)))
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


def is_known(found: Any, name: str) -> bool:
    """Whether an index has a task, and of a group each member that is a name."""
    entry = found.task_index.get(name)
    if entry is None:
        return name.endswith(".yaml") and Path(name).is_file()
    members = (entry.cfg or {}).get("task") if "group" in (entry.cfg or {}) else None
    named = [member for member in members or [] if isinstance(member, str) and member != name]
    return all(is_known(found, member) for member in named)


def load_suite(
    names: Sequence[str],
    include_path: tuple[str, ...],
    metadata: Mapping[str, Any],
    seed: int,
    num_fewshot: int | None = None,
) -> Suite:
    """Tasks with their documents. num_fewshot: None: each task's own; as in lm-eval, a task that
    says 0 stays at 0. Raises ValueError or Unavailable in one line that names the task whose data
    or packages are not here."""
    found = index_for(names, include_path, json.dumps(dict(metadata), sort_keys=True))
    tasks: dict[str, Any] = {}
    groups: dict[str, Any] = {}
    for name in names:
        seed_generators(seed)  # tasks that are made on demand draw from the global ones
        loaded = load_one(found, name)
        for task_name, task in loaded["tasks"].items():
            if task_name in tasks:
                raise ValueError(f"task.tasks: {task_name} is named twice, also by {name}")
            refuse_unsupported(task_name, task)
            if num_fewshot is not None and task.get_config("num_fewshot") != 0:
                task.set_config("num_fewshot", num_fewshot)
            tasks[task_name] = task
        groups |= loaded.get("groups", {})
    return Suite(tasks, groups)


def load_one(found: Any, name: str) -> Any:
    """From what is here; through the network only where that is not enough."""
    try:
        with quiet(), hub_offline():
            return found.load([name])
    except Exception as error:
        if not is_missing_data(error):
            raise failed(name, error) from error
    if is_offline():
        raise Unavailable(
            f"lm-eval task {name} needs data from the hub that is not in the local cache, and "
            "HF_HUB_OFFLINE is set; suite=offline needs none"
        )
    if not is_reachable():
        raise Unavailable(
            f"lm-eval task {name} needs data from the hub, and {endpoint()} cannot be reached; "
            "suite=offline needs none"
        )
    try:
        with quiet():
            return found.load([name])
    except Exception as error:
        raise failed(name, error) from error


@contextlib.contextmanager
def hub_offline() -> Iterator[None]:
    """The hub's libraries use what is cached and ask nobody; as they were on exit."""
    import datasets
    import huggingface_hub.constants as hub

    before = hub.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    hub.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        hub.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = before


def is_missing_data(error: BaseException | None) -> bool:
    """Whether the cause is something that a network might have."""
    while error is not None:
        text = f"{type(error).__name__}: {error}"
        if isinstance(error, ConnectionError | TimeoutError) or any(
            word in text for word in ("OfflineMode", "LocalEntryNotFound", "punkt", "HTTPError")
        ):
            return True
        error = error.__cause__ or error.__context__
    return False


def failed(name: str, error: Exception) -> Exception:
    """The error as one line. Missing packages are no fault of the configuration."""
    line = " ".join(str(error).split()) or type(error).__name__
    if type(error) is ValueError:  # said by the task itself
        line = line.removeprefix(f"{name}: ")
        line = re.sub("^max_length must", "context (as metadata max_length) must", line)
        return ValueError(f"lm-eval task {name}: {line[:400]}")
    text = f"lm-eval task {name} cannot be loaded: {type(error).__name__}: {line[:400]}"
    return Unavailable(text) if isinstance(error, ImportError | OSError) else ValueError(text)


def refuse_unsupported(name: str, task: Any) -> None:
    if task.OUTPUT_TYPE == "loglikelihood_rolling":
        raise ValueError(
            f"lm-eval task {name} asks for loglikelihood_rolling, perplexity of whole documents "
            "with no prompt: a decode-time policy has no part in it; task=fidelity measures that"
        )
    if getattr(task, "MULTIMODAL", False):
        raise ValueError(f"lm-eval task {name} is multimodal: only text is supported")
    if getattr(task, "UNSAFE_CODE", False):
        raise ValueError(f"lm-eval task {name} runs the model's code and is not supported")


def seed_generators(seed: int) -> None:
    import numpy as np

    random.seed(seed)
    np.random.seed(seed)


def seed_everything(task: Any, seed: int) -> None:
    """So that building a task's prompts again gives the same prompts."""
    seed_generators(seed)
    task.set_fewshot_seed(seed)
