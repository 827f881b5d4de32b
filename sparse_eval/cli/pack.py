"""Jobs of a sweep that share prompts and captures become one job that has them all.

`policy=a,b budget=64,128` is four jobs that prefill the same prompts; packed it is one,
`policy=a compare=[b,…] budget=[64,128]`, whose rows are the same ones: a run measures the policies
of `compare` exactly as it measures the main one, and every row carries its policy's label.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from hydra.core.override_parser.types import Override

from sparse_eval.cli.compose import Composer, parse, quoted, sweep_jobs, values_of
from sparse_eval.cli.config import compared

PACKABLE = ("policy", "budget")


def pack(composer: Composer, overrides: Sequence[str]) -> list[str]:
    """The overrides with the keys of sweep.pack no longer swept. Raises ValueError with one line
    for a sweep.pack that is not a list of policy and budget."""
    parsed = parse(overrides, composer.loader)
    swept = {o.key_or_group: o for o in parsed if o.is_sweep_override()}
    config = composer.compose(without_hydra(sweep_jobs(parsed)[0]))
    wanted = packed_keys(config)
    if "sweep.pack" in swept:
        raise ValueError(f"{swept['sweep.pack'].input_line}: how jobs are packed cannot be swept")
    tasks = values_of(swept["task"]) if "task" in swept else [config["task"]["name"]]
    if "latency" in tasks:
        return list(overrides)  # times one policy at one budget
    words = list(overrides)
    if "budget" in wanted and "budget" in swept:
        words = replaced(words, "budget", f"budget=[{','.join(budgets_of(swept['budget']))}]")
    if "policy" in wanted and "policy" in swept and can_pack_policies(parsed, swept):
        main, *others = dict.fromkeys(values_of(swept["policy"]))
        compare = dict.fromkeys([*others, *compared(config["compare"])])
        words = replaced(words, "policy", f"policy={quoted(main)}")
        words = [word for word in words if not word.startswith("compare=")]
        words.append(f"compare=[{','.join(map(quoted, compare))}]")
    return words


def packed_keys(config: Mapping[str, Any]) -> list[str]:
    """sweep.pack, checked."""
    sweep = config["sweep"]
    if not isinstance(sweep, Mapping):
        raise ValueError(f"sweep must hold its keys (sweep.pack), got {sweep!r}")
    keys = sweep["pack"]
    if not isinstance(keys, list) or any(key not in PACKABLE for key in keys):
        raise ValueError(f"sweep.pack must be a list of {' and '.join(PACKABLE)}, got {keys!r}")
    return keys


def can_pack_policies(parsed: Sequence[Override], swept: Mapping[str, Override]) -> bool:
    """Not where a field is set for the main policy alone, nor where what it is compared with
    differs between the jobs."""
    has_fields = any(o.key_or_group.startswith("policy.") for o in parsed)
    is_external = "external" in values_of(swept["policy"])
    return not (has_fields or is_external or "compare" in swept or "experiment" in swept)


def budgets_of(override: Override) -> list[str]:
    """Each value, lists opened."""
    joined = ",".join(value.strip("[]") for value in values_of(override))
    return [part.strip() for part in joined.split(",") if part.strip()]


def replaced(words: Sequence[str], key: str, new: str) -> list[str]:
    return [new if word.partition("=")[0] == key else word for word in words]


def without_hydra(words: Sequence[str]) -> list[str]:
    """Words for the tool's own config; Hydra reads its own (launcher, sweep folder)."""
    return [word for word in words if not re.match(r"\+*hydra[./=]", word)]
