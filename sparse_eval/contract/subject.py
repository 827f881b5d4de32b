"""The policy under check, how the checks build it, and how a broken promise is raised."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sparse_eval.contract.cases import MakePolicy, Text, random_text
from sparse_eval.policies.base import Policy

VARIANTS = (
    {"page_size": 4, "sink_pages": 1, "local_pages": 2},
    {"page_size": 1, "sink_pages": 3, "local_pages": 2},
    {"page_size": 5, "sink_pages": 0, "local_pages": 1},
)


class Fault(AssertionError):
    """What a policy did against the contract."""


class Skip(Exception):
    """Why a promise does not apply to a policy."""


def expect(condition: bool, fault: str) -> None:
    if not condition:
        raise Fault(fault)


@dataclass(frozen=True)
class Subject:
    """The policy under check: make_policy(**fields) builds it; fields its user fixed win."""

    make_policy: MakePolicy
    device: str = "cpu"

    def policy(self, **fields: Any) -> Policy:
        return self.make_policy(**(VARIANTS[0] | fields))

    def texts(self, count: int, num_tokens: int, group_size: int = 2, seed: int = 0) -> list[Text]:
        options: dict[str, Any] = {"group_size": group_size, "device": self.device}
        return [random_text(num_tokens, seed=seed + b, **options) for b in range(count)]


def middle_budget(policy: Policy) -> int | None:
    """Three pages more than are forced, and half a page that is of no use."""
    if policy.adaptive:
        return None
    return (policy.sink_pages + policy.local_pages + 3) * policy.page_size + policy.page_size // 2


def few_policies(subject: Subject) -> list[tuple[Policy, list[int]]]:
    """Two page sizes, each with three prompt lengths: within the budget, across it, beyond."""
    cases = []
    for fields in VARIANTS[:2]:
        policy = subject.policy(**fields)
        size, forced = policy.page_size, policy.sink_pages + policy.local_pages
        cases.append((policy, [2 * size + 1, (forced + 5) * size, (forced + 8) * size - 1]))
    return cases
