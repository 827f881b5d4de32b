"""Top-level keys: their types and ranges, and what they mean together. No Hydra, no model."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparse_eval.budgets import Budget, parse_budget, resolve_budget
from sparse_eval.tracking.options import check_tracking

if TYPE_CHECKING:
    from sparse_eval.policies.base import Policy

TASKS = ("recall", "needle", "fidelity", "lm_eval", "latency")
QUERIES = ("greedy", "text")
SHARED_FIELDS = ("page_size", "sink_pages", "local_pages")
KEYS = tuple(
    [
        "model",
        "policy",
        "prompts",
        "task",
        "suite",
        "protocol",
        "tracking",
        "compare",
        "budget",
        "page_size",
        "sink_pages",
        "local_pages",
        "context",
        "queries",
        "dense_layers",
        "backend",
        "device",
        "dtype",
        "seed",
        "name",
        "cache_dir",
        "model_cache",
        "cache_prefill",
        "cache_gb",
        "sweep",
        "retry_failed",
        "plan",
        "verbose",
    ]
)


@dataclass(frozen=True)
class NamedPolicy:
    """A policy and the label its rows carry, such as "quest" or "quest:group=sum"."""

    label: str
    policy: Policy


@dataclass(frozen=True)
class Settings:
    """A validated run. Budgets are in tokens; budgets_asked are as given, fractions of a prompt's
    length among them. device, dtype and backend are resolved names."""

    task: dict[str, Any]
    model: dict[str, Any]
    prompts: dict[str, Any]
    protocol: dict[str, Any]
    tracking: dict[str, Any]
    policies: tuple[NamedPolicy, ...]
    budgets: tuple[int, ...]
    budgets_asked: tuple[Budget, ...]
    context: int
    queries: str
    dense_layers: tuple[int, ...]
    backend: str
    device: str
    dtype: str
    seed: int
    name: str
    cache_dir: Path
    model_cache: Path
    cache_prefill: bool
    verbose: int
    cache_gb: float = 50.0
    retry_failed: bool = False

    def cells(self) -> list[tuple[NamedPolicy, int | None]]:
        """Every (policy, budget) of one prompt; adaptive policies have no budget."""
        return [
            (named, budget)
            for named in self.policies
            for budget in ((None,) if named.policy.adaptive else self.budgets)
        ]


def check_values(cfg: Mapping[str, Any]) -> None:
    """Keys, and every value that can be judged by itself: what needs no policy, model or device.

    Raises ValueError in one line, in the time it takes to compose a config."""
    for key in cfg:
        if key not in KEYS:
            raise ValueError(unknown_key(key, KEYS))
    one_of(cfg["task"], "name", TASKS, "task.")
    for key in ("plan", "cache_prefill", "retry_failed"):
        flag(cfg, key)
    for key in SHARED_FIELDS:
        integer(cfg, key, 0 if key == "sink_pages" else 1)
    integer(cfg, "context", 2)
    budgets(cfg["budget"])
    one_of(cfg, "queries", QUERIES)
    layer_indices(cfg["dense_layers"], None)
    compared(cfg["compare"])
    for key in ("seed", "verbose"):
        integer(cfg, key, 0)
    for key in ("name", "cache_dir", "device", "dtype", "backend"):
        text(cfg, key)
    if Path(cfg["name"]).is_absolute() or ".." in Path(cfg["name"]).parts:
        raise ValueError(f"name must be a folder's name under outputs/, got {cfg['name']!r}")
    if cfg["model_cache"] is not None:
        text(cfg, "model_cache")
    gigabytes(cfg, "cache_gb")
    check_tracking(cfg["tracking"])


def compared(value: Any) -> list[str]:
    """compare: a list of policy names, each with its fields behind colons."""
    if not isinstance(value, list) or any(not isinstance(word, str) for word in value):
        raise ValueError(
            "compare must be a list of policy names, such as 'compare=[window,random]', got "
            f"{value!r}"
        )
    return value


def mapping(value: Any, name: str) -> Mapping[str, Any]:
    """A mapping of field names to values."""
    if not isinstance(value, Mapping) or any(not isinstance(key, str) for key in value):
        raise ValueError(f"{name} must be a mapping {{name: value}}, got {value!r}")
    return value


def integer(cfg: Mapping[str, Any], key: str, least: int, group: str = "") -> int:
    """cfg[key], an integer >= least. group: the prefix that the line names it with, "task."."""
    value = cfg[key]
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{group}{key} must be an integer >= {least}, got {value!r}")
    return value


def one_of(cfg: Mapping[str, Any], key: str, accepted: Sequence[str], group: str = "") -> str:
    value = cfg[key]
    if value not in accepted:
        raise ValueError(f"{group}{key} must be one of {', '.join(accepted)}, got {value!r}")
    return value


def flag(cfg: Mapping[str, Any], key: str) -> bool:
    value = cfg[key]
    if not isinstance(value, bool):
        raise ValueError(f"{key} must be true or false, got {value!r}")
    return value


def gigabytes(cfg: Mapping[str, Any], key: str) -> float:
    value = cfg[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"{key} must be a number of GB > 0, got {value!r}")
    return float(value)


def text(cfg: Mapping[str, Any], key: str) -> str:
    value = cfg[key]
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{key} must be a non-empty text, got {value!r}")
    return value


def budgets(value: Any) -> tuple[Budget, ...]:
    """One budget or a list of them, checked."""
    values = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [value]
    if not values:
        raise ValueError("budget must be tokens, a fraction in (0, 1) or a list of them, got []")
    return tuple(parse_budget(v) for v in values)


def one_budget(asked: Sequence[Budget]) -> None:
    """ValueError where task=latency is given several budgets: it times the steps of one."""
    given = dict.fromkeys(asked)
    if len(given) > 1:
        words = ",".join(map(str, given))
        raise ValueError(
            f"task=latency takes one budget, got [{words}]; for several: -m budget={words}"
        )


def layer_indices(value: Any, num_layers: int | None) -> tuple[int, ...]:
    """dense_layers: a list of distinct indices below num_layers."""
    is_list = isinstance(value, Sequence) and not isinstance(value, str)
    if not is_list or any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in value):
        raise ValueError(f"dense_layers must be a list of layer indices >= 0, got {value!r}")
    if num_layers is not None and any(i >= num_layers for i in value):
        raise ValueError(
            f"dense_layers must be below the model's {num_layers} layers, got {list(value)}"
        )
    return tuple(sorted(set(value)))


def check_fidelity(task: Mapping[str, Any], context: int) -> None:
    """task=fidelity's own keys."""
    window = integer(task, "short_window", 2, "task.")
    if window >= context:
        raise ValueError(f"task.short_window must be below the context of {context}, got {window}")
    gain = task["long_gain"]
    if isinstance(gain, bool) or not isinstance(gain, int | float) or gain < 0:
        raise ValueError(f"task.long_gain must be a number >= 0 (nats), got {gain!r}")


def check_context(context: int, max_context: int | None, steps: int, model: str) -> None:
    if max_context is not None and context + steps > max_context:
        raise ValueError(
            f"context must be <= {max_context - steps} tokens ({model}'s {max_context} less "
            f"{steps} decode steps), got {context}"
        )


def token_budgets(
    wanted: Sequence[Budget], context: int, policies: Sequence[NamedPolicy]
) -> tuple[int, ...]:
    """Budgets in tokens, each large enough for every policy's forced pages."""
    tokens = {resolve_budget(b, context): b for b in reversed(wanted)}
    for named in policies:
        for budget, asked in reversed(tokens.items()):
            if not named.policy.adaptive and budget < named.policy.min_budget:
                p = named.policy
                raise ValueError(
                    f"budget must be >= {p.min_budget} tokens for {named.label} ({p.sink_pages} "
                    f"sink + {p.local_pages} local pages of {p.page_size}), got "
                    f"{budget if isinstance(asked, int) else of_context(asked, context, p)}"
                )
    return tuple(dict.fromkeys(resolve_budget(b, context) for b in wanted))


def of_context(share: float, context: int, policy: Policy) -> str:
    """What a share of the context comes to, and the context at which it is enough."""
    enough = math.ceil(policy.min_budget / share)
    return (
        f"{share:g} of {context} tokens = {resolve_budget(share, context)}; use context >= {enough}"
    )


def unknown_key(given: str, accepted: Sequence[str]) -> str:
    """The line for a key that does not exist, with the nearest one that does. accepted: the last
    names of a dotted key."""
    near = difflib.get_close_matches(given.rpartition(".")[2], accepted, n=1)
    hint = f"; did you mean {near[0]}?" if near else ";"
    return f"unknown key {given!r}{hint} accepted: {', '.join(accepted)}"
