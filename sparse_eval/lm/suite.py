"""Names -> lm-eval's own task objects, with their data here; a hub that is away is one line."""

from __future__ import annotations

import contextlib
import json
import random
import re
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sparse_eval.inputs.hub import endpoint, is_offline, is_reachable
from sparse_eval.inputs.store import Unavailable
from sparse_eval.lm.names import index_for
from sparse_eval.lm.quiet import quiet


@dataclass(frozen=True)
class Suite:
    """tasks: by name, in order. groups: lm-eval's group objects, by name."""

    tasks: dict[str, Any]
    groups: dict[str, Any]


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
    if empty_task(error):
        return ValueError(f"lm-eval task {name} has no documents")
    if type(error) is ValueError:  # said by the task itself
        line = first_words(error).removeprefix(f"{name}: ")
        line = re.sub("^max_length must", "context (as metadata max_length) must", line)
        return ValueError(f"lm-eval task {name}: {line}")
    text = f"lm-eval task {name} cannot be loaded: {told(error)}{first_document(error)}"
    return Unavailable(text) if isinstance(error, ImportError | OSError) else ValueError(text)


class Told(ValueError):
    """An error that names its task in one line already."""


@contextlib.contextmanager
def naming(name: str, what: str) -> Iterator[None]:
    """What a task's own code raises, an Exception of any kind, becomes a ValueError in one line."""
    try:
        yield
    except (MemoryError, OSError, Unavailable):
        raise
    except Told as error:
        raise ValueError(str(error)) from error
    except Exception as error:
        raise ValueError(f"lm-eval task {name} cannot {what}: {told(error)}") from error


def told(error: Exception) -> str:
    """An error of foreign code in one line: its kind, the function that raised it, its message."""
    empty = empty_task(error)
    if empty:
        return f"lm-eval task {empty} has no documents"
    frames = traceback.extract_tb(error.__traceback__)
    where = f" in {frames[-1].name}" if frames else ""
    return f"{type(error).__name__}{where}: {first_words(error)}"


def first_words(error: Exception) -> str:
    return (" ".join(str(error).split()) or type(error).__name__)[:400]


def first_document(error: Exception) -> str:
    """What lm-eval saw of a task's first document, if that was where it failed."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        seen = frame.f_locals
        if "test_choice" in seen:
            found = f"{seen['test_choice']!r:.80} and target {seen.get('test_target')!r:.40}"
            return f" (its first document has the choices {found})"
    return ""


def empty_task(error: Exception) -> str:
    """The task whose first document lm-eval was looking for where there is none, else ""."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        owner: Any = frame.f_locals.get("self")
        docs = getattr(owner, "task_docs", None)
        if docs is not None and not len(docs):
            return str(owner.get_config("task"))
    return ""


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
