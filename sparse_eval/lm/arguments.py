"""What `--model sparse_eval` takes, checked from words alone: no model library is imported, and
torch only for a policy's own say."""

from __future__ import annotations

import ast
import difflib
import importlib.util
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparse_eval.budgets import check_budget, check_tokens

if TYPE_CHECKING:
    from sparse_eval.policies.base import Policy

SHARED_FIELDS = ("page_size", "sink_pages", "local_pages")
"""Fields of every policy, which have arguments of their own."""

NEAR = 0.8
"""How alike (of difflib) a key is to one that is known to be a misspelling of it: what is like none
goes on to the checkpoint's config, whose keys nobody lists."""


def check_arguments(given: Mapping[str, Any]) -> None:
    """ValueError in one line for model_args that a PolicyLM would refuse, or would hand on as if
    they were the checkpoint's: before anything is fetched or loaded."""
    ours = arguments_in(Path(__file__).with_name("adapter.py"), "PolicyLM")
    known = ours | arguments_in(lm_eval_file("models/huggingface.py"), "HFLM")
    strange = [key for key in given if key not in known]
    for key in strange:
        near = difflib.get_close_matches(key, sorted(known), n=3, cutoff=NEAR)
        if near:
            raise ValueError(
                f"--model_args: unknown key {key!r}; did you mean {' or '.join(near)}? "
                f"sparse_eval's own: {', '.join(sorted(ours))}; all others are those of --model hf"
            )
    layers_of(given.get("dense_layers", ()))
    check_batch_size(given.get("batch_size", 1))
    name, config = given.get("policy", "quest"), given.get("policy_config")
    check_words(name, config)
    check_tokens(given.get("budget"))
    # what follows imports torch
    policy = policy_of(name, config, {key: given[key] for key in SHARED_FIELDS if key in given})
    for key in strange:
        if hasattr(policy, key):
            raise ValueError(
                f"--model_args: {key} is a field of the policy, not of the model: "
                f'policy_config={{"{key}": {given[key]!r}}} gives it'
            )
    check_budget(policy, given.get("budget"))


def lm_eval_file(path: str) -> Path:
    """A file of lm-eval, not imported."""
    found = importlib.util.find_spec("lm_eval")
    assert found is not None and found.origin is not None
    return Path(found.origin).parent / path


def arguments_in(path: Path, kind: str) -> set[str]:
    """The names that a class's __init__ takes, read from its source: importing it takes seconds."""
    (init,) = [
        line
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and node.name == kind
        for line in node.body
        if isinstance(line, ast.FunctionDef) and line.name == "__init__"
    ]
    taken = init.args
    return {x.arg for x in (*taken.posonlyargs, *taken.args, *taken.kwonlyargs)} - {"self"}


def check_batch_size(size: Any) -> None:
    """HFLM takes any text: what is neither a number of rows nor auto ends somewhere inside it."""
    is_auto = re.fullmatch(r"auto(:\d+(\.\d+)?)?", str(size))
    if not is_auto and not (str(size).isdecimal() and int(size) >= 1):
        raise ValueError(f"batch_size must be an integer >= 1, auto or auto:N, got {size!r}")


def check_words(policy: Any, config: Any) -> None:
    """ValueError for a name that conf/policy/ does not have, or fields that it does not list."""
    if not isinstance(policy, str):
        raise ValueError(f"policy must be a name of conf/policy/ or a class's, got {policy!r}")
    if not isinstance(config, Mapping | None):
        raise ValueError(
            f'policy_config must be fields such as {{"page_size": 32}}, got {config!r}'
        )
    if "." not in policy:
        named_config(policy, config or {})


def policy_of(
    policy: str | Policy, config: Mapping[str, Any] | None, given: Mapping[str, Any]
) -> Policy:
    """config: fields by name. given: more of them, those that are None left out. A policy that is
    one already stays as it is."""
    from sparse_eval.policies.base import Policy

    if isinstance(policy, Policy):
        return policy
    check_words(policy, config)
    fields = dict(config or {}) | {k: v for k, v in given.items() if v is not None}
    return make_policy(policy, fields)


def make_policy(name: str, fields: Mapping[str, Any]) -> Policy:
    """A policy by its name in conf/policy/ or its class's dotted name, fields changed as given."""
    from sparse_eval.check import policy_class

    if "." in name:
        return build(policy_class(name), fields)
    config = named_config(name, fields)
    return build(policy_class(config.pop("_target_")), config | dict(fields))


def named_config(name: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """What conf/policy/ says of a policy: its class and all its fields. fields: those that will be
    changed."""
    from sparse_eval.cli.compose import Composer

    composer = Composer()
    composer.check_option("policy", name)
    config = composer.compose([f"policy={name}"])["policy"]
    own = [field for field in config if not field.startswith("_")]
    for field in fields:
        if field not in own:
            raise ValueError(f"policy {name} has no field {field!r}; accepted: {', '.join(own)}")
    return config


def build(kind: Any, fields: Mapping[str, Any]) -> Policy:
    try:
        return kind(**fields)
    except TypeError as error:
        raise ValueError(f"policy {kind.__name__}: {error}") from None


def layers_of(value: str | int | Sequence[int]) -> tuple[int, ...]:
    """dense_layers from a command line, where lists are hard to write: "0:1", 0, or "" for none."""
    if isinstance(value, int):
        return (value,)
    if isinstance(value, str):
        words = [word for word in value.split(":") if word.strip()]
        if not all(word.strip().isdigit() for word in words):
            raise ValueError(f'dense_layers must be layer indices such as "0:1", got {value!r}')
        return tuple(int(word) for word in words)
    return tuple(value)
