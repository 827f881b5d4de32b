"""A composed config -> Settings: policies instantiated, budgets in tokens, names resolved."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sparse_eval.check import policy_class
from sparse_eval.cli import config
from sparse_eval.cli.compose import Composer, quoted
from sparse_eval.cli.config import NamedPolicy, Settings
from sparse_eval.device import check_runs, resolve_backend, resolve_device, resolve_dtype
from sparse_eval.inputs.store import user_cache
from sparse_eval.latency.checks import check_latency
from sparse_eval.lm.config import lm_config
from sparse_eval.models import model_info
from sparse_eval.needle.config import needle_config
from sparse_eval.policies.base import Policy
from sparse_eval.prompts import check_prompts
from sparse_eval.storage.columns import flat


def resolve(composer: Composer, overrides: Sequence[str]) -> Settings:
    """Compose and validate everything a job will use. Raises ValueError with one line."""
    cfg = composer.compose(overrides)
    config.check_values(cfg)
    model = model_info(cfg["model"])
    context = config.integer(cfg, "context", 2)
    suite = choice(overrides, "suite")
    if suite is not None and cfg["task"]["name"] != "lm_eval":
        raise ValueError(f"suite={suite} needs task=lm_eval, got task={cfg['task']['name']}")
    if cfg["task"]["name"] != "latency":
        config.integer(cfg["task"], "prompt_queries", 2, "task.")
    check_prompts(cfg["prompts"])
    asked = config.budgets(cfg["budget"])
    device = resolve_device(config.text(cfg, "device"))
    dtype = str(resolve_dtype(config.text(cfg, "dtype"), device)).removeprefix("torch.")
    policies = policies_of(composer, overrides, cfg)
    check_selects(policies, device)
    if cfg["task"]["name"] == "latency":
        config.one_budget(asked)
        compare = choice(overrides, "compare")
        if compare not in (None, "[]"):
            raise ValueError(
                "task=latency times quest's kernels and those of top-δ, no other policies: leave "
                f"compare out, got compare={compare}"
            )
        check_latency(cfg["task"], model, policies[0].policy, device)
    for tokens, steps in prompt_lengths(cfg, context):
        config.check_context(tokens, model.max_context, steps, model.name)
        config.token_budgets(asked, tokens, policies)
        for named in policies:
            with naming(named.label):
                named.policy.check_cache(model.head_dim, tokens + steps)
    return Settings(
        task=cfg["task"],
        model=cfg["model"],
        prompts=cfg["prompts"],
        protocol=cfg["protocol"],
        tracking=cfg["tracking"],
        policies=policies,
        budgets=config.token_budgets(asked, context, policies),
        budgets_asked=asked,
        context=context,
        queries=config.one_of(cfg, "queries", config.QUERIES),
        dense_layers=config.layer_indices(cfg["dense_layers"], model.num_layers),
        backend=resolve_backend(config.text(cfg, "backend"), device),
        device=device,
        dtype=dtype,
        seed=config.integer(cfg, "seed", 0),
        name=config.text(cfg, "name"),
        cache_dir=Path(os.path.expanduser(config.text(cfg, "cache_dir"))),
        model_cache=Path(os.path.expanduser(cfg["model_cache"] or user_cache())),
        cache_prefill=config.flag(cfg, "cache_prefill"),
        verbose=config.integer(cfg, "verbose", 0),
        cache_gb=config.gigabytes(cfg, "cache_gb"),
        retry_failed=config.flag(cfg, "retry_failed"),
    )


def prompt_lengths(cfg: Mapping[str, Any], context: int) -> list[tuple[int, int]]:
    """Prompt lengths and the decode steps after each, in tokens; the task's own keys checked."""
    task, protocol = cfg["task"], cfg["protocol"]["name"]
    if task["name"] == "needle":
        needle = needle_config(task, context=context, n=cfg["prompts"]["n"], protocol=protocol)
        if cfg["prompts"]["source"] == "transcripts":
            raise ValueError(
                "prompts must be docs, kjv, file or dataset for task=needle, got 'transcripts'"
            )
        return [(tokens, needle.most_new_tokens) for tokens in needle.contexts]
    if task["name"] == "lm_eval":
        lm_eval = lm_config(task, cfg["protocol"], cfg["seed"])
        from sparse_eval.lm.globs import expanded
        from sparse_eval.lm.names import check_names

        check_names(expanded(lm_eval))
        return [(context, 0)]
    if protocol != "decode":
        raise ValueError(
            f"protocol must be decode for task={task['name']}, which has no question of its own, "
            f"got {protocol!r}"
        )
    if task["name"] == "latency":
        return []  # no prompt; its contexts are its own
    if task["name"] == "fidelity":
        config.check_fidelity(task, context)
    return [(context, config.integer(task, "steps", 1, "task."))]


def policies_of(
    composer: Composer, overrides: Sequence[str], cfg: Mapping[str, Any]
) -> tuple[NamedPolicy, ...]:
    """The main policy first, then those it is compared with; equal labels are measured once."""
    main_name = composer.choice("policy", overrides)
    others = [word for word in overrides if not re.match(r"\+*policy[.=]", word)]
    has_fields = main_name != "external" and any(re.match(r"\+*policy\.", w) for w in overrides)
    plain = composer.compose([*others, f"policy={quoted(main_name)}"]) if has_fields else cfg
    main = build_policy(main_name, renamed(cfg["policy"], plain["policy"], overrides), cfg)
    named = [NamedPolicy(label(main_name, cfg["policy"], plain["policy"]), main)]
    for word in config.compared(cfg["compare"]):
        name, *fields = word.split(":")
        composer.check_option("policy", name, key="compare")
        with naming(f"compare, {word}" if fields else ""):
            usual = [*others, f"policy={quoted(name)}"]
            words = [f"policy.{field}" for field in fields]
            chosen = composer.compose([*usual, *words])
            own = renamed(chosen["policy"], composer.compose(usual)["policy"], words)
            policy = build_policy(name, own, chosen)
        named.append(NamedPolicy(word, policy))
    return tuple({n.label: n for n in named}.values())


def renamed(given: Any, usual: Any, words: Sequence[str]) -> Any:
    """A policy's fields; those of a nested part, such as a score, that words name anew are what
    words give: what its yaml says is of the part named there."""
    if not isinstance(given, Mapping) or not isinstance(usual, Mapping):
        return given
    said = {word.partition("=")[0].strip() for word in words}
    own = dict(given)
    for key, part in given.items():
        before = usual.get(key)
        if not isinstance(part, Mapping) or not isinstance(before, Mapping):
            continue
        if part.get("name") != before.get("name"):
            own[key] = {
                name: value
                for name, value in part.items()
                if name == "name" or value != before.get(name) or f"policy.{key}.{name}" in said
            }
    return own


def check_selects(policies: Sequence[NamedPolicy], device: str) -> None:
    """ValueError for a policy whose selection asks for a backend that does not run here."""
    for i, named in enumerate(policies):
        backend = getattr(named.policy, "select_backend", None)
        if isinstance(backend, str):
            with naming(f"compare, {named.label}" if i else ""):
                check_runs("select_backend" if i else "policy.select_backend", backend, device)


@contextmanager
def naming(where: str) -> Iterator[None]:
    """ValueErrors say where what they name was given."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{where}: {error}" if where else str(error)) from None


def choice(overrides: Sequence[str], group: str) -> str | None:
    """The option of a group that the command line itself names."""
    values = [word.partition("=")[2] for word in overrides if word.startswith(f"{group}=")]
    return values[-1].strip("'\"") if values else None


def label(name: str, given: Mapping[str, Any], plain: Mapping[str, Any]) -> str:
    """The policy's name and the fields that differ from its yaml: "quest:group=sum"."""
    usual = flat(plain)
    fields = [
        f"{key}={value}"
        for key, value in flat(given).items()
        if key not in config.SHARED_FIELDS and usual.get(key) != value
    ]
    if name == "external":
        fields = [
            given["target"].rsplit(".", 1)[-1],
            *(f"{k}={v}" for k, v in (given["config"] or {}).items()),
        ]
        return ":".join(fields)
    return ":".join([name, *fields])


def build_policy(name: str, cfg: Any, run: Mapping[str, Any]) -> Policy:
    """A policy from its group's config; ValueError with one line. run: where page_size, sink_pages
    and local_pages come from if its yaml leaves them out, so that rivals share them."""
    shared = {key: run[key] for key in config.SHARED_FIELDS}
    fields = shared | dict(config.mapping(cfg, f"policy {name}: its yaml"))
    if name == "external":
        target = fields.pop("target")
        given = fields.pop("config")
        fields |= {} if given is None else config.mapping(given, "policy.config")
    elif "_target_" in fields:
        target = fields.pop("_target_")
    else:
        raise ValueError(
            f"policy {name}: its yaml must name _target_, the import path of a Policy subclass, "
            f"got {', '.join(cfg) or 'no fields'}"
        )
    kind = policy_class(target)
    accepted = sorted(field.name for field in dataclasses.fields(kind))
    unknown = [key for key in fields if key not in accepted]
    if unknown:
        raise ValueError(f"policy {name}: {config.unknown_key(unknown[0], accepted)}")
    try:
        return kind(**fields)
    except TypeError as error:
        raise ValueError(f"policy {name}: {error}") from None
