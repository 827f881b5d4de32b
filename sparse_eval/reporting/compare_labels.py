"""One policy under other settings in A and in B: the labels that belong together, and how they
differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from sparse_eval.reporting.summarise import REPEATED
from sparse_eval.storage.table import fields_of


@dataclass(frozen=True)
class Other:
    """One policy, labelled a in A and b in B. shown: its name with the fields that differ."""

    a: str
    b: str
    shown: str


def base_of(label: str) -> str:
    """The policy of a label: "quest" of "quest:group=sum"."""
    return label.partition(":")[0]


def other_settings(a: pd.DataFrame, b: pd.DataFrame) -> list[Other]:
    """Labels that one run alone has, one of them meeting those of the same policy that the other
    alone has. Where both runs have several of a policy none is said to belong to another. a, b:
    rows whose labels stand for one set of fields each."""
    labels_a, labels_b = (list(dict.fromkeys(rows["policy"])) for rows in (a, b))
    alone_a = [label for label in labels_a if label not in labels_b]
    alone_b = [label for label in labels_b if label not in labels_a]
    found = []
    for base in dict.fromkeys(map(base_of, alone_a)):
        mine, others = (
            [label for label in alone if base_of(label) == base] for alone in (alone_a, alone_b)
        )
        if min(len(mine), len(others)) == 1:
            found += [Other(x, y, shown(base, a, x, b, y)) for x in mine for y in others]
    return found


def shown(base: str, a: pd.DataFrame, label_a: str, b: pd.DataFrame, label_b: str) -> str:
    first, second = fields(a, label_a), fields(b, label_b)
    keys = [key for key in dict.fromkeys([*first, *second]) if key not in REPEATED]
    differ = [
        f"{key} {first.get(key, '–')} → {second.get(key, '–')}"
        for key in keys
        if first.get(key) != second.get(key)
    ]
    return f"{base}: {', '.join(differ)}" if differ else f"{label_a} → {label_b}"


def fields(rows: pd.DataFrame, label: str) -> dict[str, Any]:
    if "policy_config" not in rows:
        return {}
    return fields_of(rows.loc[rows["policy"] == label, "policy_config"].iloc[0])


def aligned(
    a: Mapping[str, Any], b: Mapping[str, Any], others: Sequence[Other]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Two configs whose policies stand under one name where they are one policy; a policy that one
    run alone has is a line of its own, without its fields."""
    names_a = {o.a: base_of(o.a) for o in others if [x.a for x in others].count(o.a) == 1}
    names_b = {o.b: names_a[o.a] for o in others if o.a in names_a}
    if len(set(names_b.values())) < len(names_b):  # several meet one: each under its own label
        names_a, names_b = {}, {}
    first, second = renamed(a, names_a), renamed(b, names_b)
    for config, other in ((first, second), (second, first)):
        mine, theirs = config.get("policies"), other.get("policies")
        if isinstance(mine, Mapping) and isinstance(theirs, Mapping):
            config["policies"] = {
                label: fields if label in theirs else "measured" for label, fields in mine.items()
            }
    return first, second


def renamed(config: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    policies = config.get("policies")
    if not isinstance(policies, Mapping):
        return dict(config)
    return dict(config) | {"policies": {names.get(k, k): v for k, v in policies.items()}}
