"""Scores: what a page is worth to a query head, in logits. A rule makes pages of them (scored.py).

A score gives, per query head and page, a `max`: its word for the page's largest logit
scale · q·k; and/or a `log_mass`: its word for log Σ exp(scale · q·k) over the page's tokens, the
log of the page's part of the softmax's denominator (natural log). Which of the two a score gives
is its `gives`; what its word is worth (exact, a bound, an estimate) its docstring says.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Generic

from torch import Tensor

from sparse_eval.core import AttentionCall
from sparse_eval.policies.base import StateT, full_BP

QUANTITIES = ("max", "log_mass")


@dataclass(frozen=True, kw_only=True)
class Score(ABC, Generic[StateT]):
    """realisable: does not look at every key. Pages run to the state's room, P."""

    name: ClassVar[str]
    gives: ClassVar[tuple[str, ...]] = QUANTITIES
    realisable: ClassVar[bool] = True

    def check_heads(self, head_dim: int | None) -> None:  # noqa: B027
        """ValueError in one line for heads that cannot be scored; None: not known."""

    @abstractmethod
    def init(self, call: AttentionCall, page_size: int) -> StateT:
        """State for the cache as it stands."""

    @abstractmethod
    def extend(self, state: StateT, call: AttentionCall, page_size: int) -> None:
        """The cache grew by one token a row: update state in place."""

    @abstractmethod
    def max(self, call: AttentionCall, state: StateT, page_size: int) -> Tensor:
        """[B, H, P] float32; anything on pages that known() leaves out."""

    def log_mass(self, call: AttentionCall, state: StateT, page_size: int) -> Tensor:
        """[B, H, P] float32; anything on pages that known() leaves out."""
        raise NotImplementedError(f"{self.name} gives no log_mass")

    def of(self, quantity: str, call: AttentionCall, state: StateT, page_size: int) -> Tensor:
        """quantity: of `gives`."""
        return (self.max if quantity == "max" else self.log_mass)(call, state, page_size)

    def known(self, call: AttentionCall, page_size: int, num_pages: int) -> Tensor:
        """True for the pages that have a score: bool [B, P]."""
        return full_BP(call, page_size, num_pages)

    def config(self) -> dict[str, Any]:
        return {"name": self.name, **{f.name: getattr(self, f.name) for f in fields(self)}}


def score_of(given: Any, kinds: Mapping[str, type[Score]]) -> Score:
    """A Score, its name, or a mapping of its name and fields, as in a yaml. ValueError if none."""
    if isinstance(given, Score):
        return given
    config = {"name": given} if isinstance(given, str) else given
    accepted = ", ".join(kinds)
    name = config.get("name") if isinstance(config, Mapping) else config
    if not isinstance(config, Mapping) or not isinstance(name, str) or name not in kinds:
        raise ValueError(f"score must be one of {accepted}, got {name!r}")
    kind = kinds[name]
    own = {key: value for key, value in config.items() if key != "name"}
    known = fields_of(kind)
    for key in own:
        if key not in known:
            others = ", ".join(one.name for one in kinds.values() if key in fields_of(one))
            whose = f" ({others} has one)" if others else ""
            raise ValueError(
                f"score {kind.name} has no field {key!r}{whose}; accepted: "
                f"{', '.join(known) or 'none'}"
            )
    return kind(**own)


def fields_of(kind: type[Score]) -> list[str]:
    return [field.name for field in fields(kind)]
