"""A score and a rule make a policy: TopK, TopP, TopDelta over bound, thumbnail, mean, … scores.

A rule needs a `max` or a `log_mass` (score.py); a score that does not give it is refused. A new
pair is a yaml; a new score a class and its line in SCORES.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from torch import Tensor

from sparse_eval.core import AttentionCall
from sparse_eval.policies.base import (
    Policy,
    Selection,
    State,
    check_number,
    check_one_of,
    forced_BP,
)
from sparse_eval.policies.channel_scores import BoundScore, MeanScore, MeanStdScore
from sparse_eval.policies.exact import ExactScore
from sparse_eval.policies.page_score import GROUP_RULES, share_in_group
from sparse_eval.policies.rules import (
    margin_BHP,
    nucleus_BHP,
    peak_BH1,
    union_selection,
    within_delta_BHP,
)
from sparse_eval.policies.score import QUANTITIES, Score, score_of
from sparse_eval.policies.thumbnail import ThumbnailScore
from sparse_eval.policies.topk import top_pages

SCORES: dict[str, type[Score]] = {
    kind.name: kind for kind in (BoundScore, ThumbnailScore, MeanScore, MeanStdScore, ExactScore)
}


@dataclass(frozen=True, kw_only=True)
class ScoredPolicy(Policy[State]):
    """score: a Score, its name, or a mapping of its name and fields. An unrealisable one forces the
    current page alone, as the oracle does."""

    score: Any = "bound"
    evidence: ClassVar[Literal["query"]] = "query"

    def __post_init__(self) -> None:
        super().__post_init__()
        score = score_of(self.score, SCORES)
        object.__setattr__(self, "score", score)
        # of the class where a class is one method; here the score decides
        object.__setattr__(self, "realisable", score.realisable)
        if self.needs not in score.gives:
            able = ", ".join(kind.name for kind in SCORES.values() if self.needs in kind.gives)
            raise ValueError(
                f"{type(self).__name__} needs a {self.needs}, which score {score.name} does not "
                f"give; scores that do: {able}"
            )

    @property
    @abstractmethod
    def needs(self) -> str:
        """What the rule needs of a score: max or log_mass."""

    @property
    def forced_pages(self) -> int:
        return super().forced_pages if self.realisable else 1

    def check_cache(self, head_dim: int | None, num_tokens: int) -> None:
        self.score.check_heads(head_dim)

    def config(self) -> dict[str, Any]:
        return super().config() | {"score": self.score.config()}

    def init(self, call: AttentionCall, prompt_queries_BWHD: Tensor | None = None) -> State:
        return self.score.init(call, self.page_size)

    def extend(self, state: State, call: AttentionCall) -> None:
        self.score.extend(state, call, self.page_size)

    def values(self, call: AttentionCall, state: State) -> tuple[Tensor, Tensor]:
        """What the rule needs of every page, [B, H, P], and which pages it is known of, [B, P]."""
        x = self.score.of(self.needs, call, state, self.page_size)
        return x, self.score.known(call, self.page_size, x.shape[-1])

    def forcing(self, budget: int | None = None) -> Policy:
        """The policy whose sink and local pages are forced on the selection."""
        if not self.realisable:
            return replace(self, sink_pages=0, local_pages=1)
        return replace(self, local_pages=self.local_pages_at(budget))


@dataclass(frozen=True, kw_only=True)
class TopK(ScoredPolicy):
    """The best pages that the budget holds (topk.py).

    rank: what pages are ranked by, max or log_mass. group: how a GQA group shares its pages
    (page_score.py). local_share: the share of the budget that local pages take, the score has the
    rest; 0: local_pages as they are (an unrealisable score takes no other), 1: a sliding window."""

    rank: str = "max"
    group: str = "max"
    local_share: float = 0.0

    def __post_init__(self) -> None:
        check_one_of("rank", self.rank, QUANTITIES)
        check_one_of("group", self.group, GROUP_RULES)
        check_number("local_share", self.local_share, 0, 1)
        super().__post_init__()
        if self.local_share and not self.realisable:
            raise ValueError(
                f"local_share must be 0 with score {self.score.name}, which forces the current "
                f"page alone, as the oracle does, got {self.local_share}"
            )

    @property
    def needs(self) -> str:
        return self.rank

    def local_pages_at(self, budget: int | None) -> int:
        if budget is None or not self.realisable:
            return super().local_pages_at(budget)
        num_selected = budget // self.page_size
        shared = min(int(self.local_share * num_selected), num_selected - self.sink_pages)
        return max(self.local_pages, shared)

    def select(self, call: AttentionCall, state: State, budget: int | None) -> Selection:
        budget = self.checked(budget)
        x_BHP, known_BP = self.values(call, state)
        shared = share_in_group(x_BHP, call.num_kv_heads, self.group, known_BP)
        return top_pages(shared, call, self.forcing(budget), budget)


@dataclass(frozen=True, kw_only=True)
class AdaptivePolicy(ScoredPolicy):
    """Each query head's rule decides how many pages it reads; a group reads the union.

    max_tokens: most tokens a KV head reads, None: no cap."""

    max_tokens: int | None = None
    adaptive: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_cap(self, self.max_tokens)

    def select(self, call: AttentionCall, state: State, budget: int | None) -> Selection:
        x_BHP, known_BP = self.values(call, state)
        own_BHP, margin_BHP = self.choose(x_BHP, known_BP, call)
        forcing = self.forcing()
        return union_selection(own_BHP, margin_BHP, known_BP, call, forcing, self.max_tokens)

    @abstractmethod
    def choose(self, x_BHP: Tensor, known_BP: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor]:
        """Pages that each head chooses, and its pages' scores relative to a level of its own."""


@dataclass(frozen=True, kw_only=True)
class TopDelta(AdaptivePolicy):
    """Every page whose max is within delta of the peak.

    delta: in logits; e^-delta of the peak is the most a dropped token weighs where scores are
    exact. peak: the largest score of all pages, or of the sink and local pages (forced), which is
    never higher: the set can only grow."""

    delta: float = 5.0
    peak: str = "all"
    dense_at: ClassVar[dict[str, Any]] = {"delta": float("inf")}

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("delta", self.delta, 0)
        check_one_of("peak", self.peak, ("all", "forced"))

    @property
    def needs(self) -> str:
        return "max"

    def choose(self, x_BHP: Tensor, known_BP: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor]:
        of = known_BP
        if self.peak == "forced":
            of = known_BP & forced_BP(call, self, x_BHP.shape[-1])
        peak = peak_BH1(x_BHP, of)
        own_BHP = within_delta_BHP(x_BHP, peak, self.delta)
        return own_BHP, margin_BHP(x_BHP, peak, known_BP)


@dataclass(frozen=True, kw_only=True)
class TopP(AdaptivePolicy):
    """The fewest pages that hold a share p of the mass of all pages that have a score, forced pages
    first: they are read anyway. The page of the newest token has none unless the score is exact,
    so its mass counts on neither side."""

    p: float = 0.95
    dense_at: ClassVar[dict[str, Any]] = {"p": 1.0}

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("p", self.p, 0, 1)

    @property
    def needs(self) -> str:
        return "log_mass"

    def choose(self, x_BHP: Tensor, known_BP: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor]:
        first_BP = forced_BP(call, self.forcing(), x_BHP.shape[-1])
        own = nucleus_BHP(x_BHP, known_BP, first_BP, self.p)
        total = x_BHP.masked_fill(~known_BP[:, None], float("-inf")).logsumexp(-1, keepdim=True)
        return own, x_BHP - total


def check_cap(policy: Policy, max_tokens: int | None) -> None:
    """max_tokens must hold the forced pages."""
    if max_tokens is None:
        return
    is_integer = isinstance(max_tokens, int) and not isinstance(max_tokens, bool)
    if not is_integer or max_tokens < policy.min_budget:
        raise ValueError(
            f"max_tokens must be an integer >= {policy.min_budget} tokens ({policy.forced_pages} "
            f"pages of {policy.page_size} that {type(policy).__name__} always reads), got "
            f"{max_tokens!r}"
        )
