"""Policies that each break one promise of the contract, and two kinds the project does not ship.

`promise` is the check that must catch a broken one.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import torch

from sparse_eval.policies.base import (
    Policy,
    Selection,
    State,
    current_page_B,
    forced_BP,
    num_pages_of,
    selection_from_mask,
    visible_BP,
)
from sparse_eval.policies.quest import Quest
from sparse_eval.policies.snapkv import SnapKV
from sparse_eval.policies.topk import top_pages
from sparse_eval.policies.window import Window


def as_mask(selection: Selection, call: Any, page_size: int) -> torch.Tensor:
    num_pages = num_pages_of(call.capacity, page_size)
    pages = selection.pages_BSK.long().where(selection.pages_BSK >= 0, num_pages)
    mask = torch.zeros(*pages.shape[:2], num_pages + 1, dtype=torch.bool, device=pages.device)
    return mask.scatter_(2, pages, True)[..., :num_pages]


@dataclass(frozen=True, kw_only=True)
class FailsOnSevenHeads(Window):
    promise: ClassVar[str] = "select runs on every shape"

    def select(self, call, state, budget):
        assert call.group_size != 7, "seven heads a group"
        return super().select(call, state, budget)


@dataclass(frozen=True, kw_only=True)
class Crashes(Window):
    """Whatever it is asked, each time with other words."""

    def select(self, call, state, budget):
        raise ZeroDivisionError(f"{call.capacity} tokens")


@dataclass(frozen=True, kw_only=True)
class OtherPageSize(Window):
    promise: ClassVar[str] = "is a selection of its pages"

    def select(self, call, state, budget):
        return replace(super().select(call, state, budget), page_size=self.page_size + 1)


@dataclass(frozen=True, kw_only=True)
class ReturnsATuple(Window):
    promise: ClassVar[str] = "is a selection of its pages"

    def select(self, call, state, budget):
        x = super().select(call, state, budget)
        return x.pages_BSK, x.counts_BS


@dataclass(frozen=True, kw_only=True)
class LongIds(Window):
    promise: ClassVar[str] = "lists are int32 of the right shape"

    def select(self, call, state, budget):
        x = super().select(call, state, budget)
        return replace(x, pages_BSK=x.pages_BSK.long())


@dataclass(frozen=True, kw_only=True)
class OneListForAllHeads(Window):
    promise: ClassVar[str] = "lists are int32 of the right shape"

    def select(self, call, state, budget):
        x = super().select(call, state, budget)
        return Selection(x.pages_BSK[:, :1], x.counts_BS[:, :1], x.page_size)


@dataclass(frozen=True, kw_only=True)
class CountsEverySlot(Window):
    promise: ClassVar[str] = "counts match and empty slots are minus one"

    def select(self, call, state, budget):
        x = super().select(call, state, budget)
        return replace(x, counts_BS=torch.full_like(x.counts_BS, x.pages_BSK.shape[-1]))


@dataclass(frozen=True, kw_only=True)
class EmptySlotsFirst(Window):
    promise: ClassVar[str] = "counts match and empty slots are minus one"

    def select(self, call, state, budget):
        x = super().select(call, state, budget)
        return replace(x, pages_BSK=x.pages_BSK.sort(-1).values)


@dataclass(frozen=True, kw_only=True)
class ReadsAPageTooFar(Window):
    promise: ClassVar[str] = "ids are live pages"

    def select(self, call, state, budget):
        x = super().select(call, state, budget)
        return replace(x, pages_BSK=torch.where(x.pages_BSK >= 0, x.pages_BSK + 1, x.pages_BSK))


@dataclass(frozen=True, kw_only=True)
class ReadsAPageTwice(Window):
    promise: ClassVar[str] = "ids ascend without duplicates"

    def select(self, call, state, budget):
        x = super().select(call, state, budget)
        pages = x.pages_BSK.clone()
        pages[..., 1:2] = torch.where(pages[..., 1:2] >= 0, pages[..., :1], -1)
        return replace(x, pages_BSK=pages)


@dataclass(frozen=True, kw_only=True)
class NewestFirst(Window):
    promise: ClassVar[str] = "ids ascend without duplicates"

    def select(self, call, state, budget):
        x = super().select(call, state, budget)
        return replace(x, pages_BSK=x.pages_BSK.sort(-1, descending=True).values)


@dataclass(frozen=True, kw_only=True)
class ForgetsTheCurrentPage(Window):
    promise: ClassVar[str] = "current page is read"

    def select(self, call, state, budget):
        mask = as_mask(super().select(call, state, budget), call, self.page_size)
        page = torch.arange(mask.shape[-1], device=call.device)
        return selection_from_mask(
            mask & (page != current_page_B(call, self.page_size)[:, None])[:, None], self.page_size
        )


@dataclass(frozen=True, kw_only=True)
class ForgetsTheSinks(Window):
    promise: ClassVar[str] = "sinks and local pages are read"

    def select(self, call, state, budget):
        return replace(self, sink_pages=0, local_pages=1).recent(call, state, budget)

    def recent(self, call, state, budget):
        return super().select(call, state, budget)


@dataclass(frozen=True, kw_only=True)
class ReadsOnePageMore(Window):
    promise: ClassVar[str] = "budget is kept"

    def select(self, call, state, budget):
        return super().select(call, state, self.checked(budget) + self.page_size)


@dataclass(frozen=True, kw_only=True)
class BudgetForEveryHead(Quest):
    """Each query head reads the whole budget, their union much more."""

    promise: ClassVar[str] = "budget is kept"

    def select(self, call, state, budget):
        per_head = self.score(call, state)
        each_its_own = replace(
            call,
            k_BGND=call.k_BGND.repeat_interleave(call.group_size, 1),
            v_BGNE=call.v_BGNE.repeat_interleave(call.group_size, 1),
        )
        return top_pages(per_head, each_its_own, self, budget)


@dataclass(frozen=True, kw_only=True)
class ReadsOnePageLess(Window):
    promise: ClassVar[str] = "budget is used"

    def select(self, call, state, budget):
        return super().select(
            call, state, max(self.checked(budget) - self.page_size, self.min_budget)
        )


@dataclass(frozen=True, kw_only=True)
class WholePagesOnly(Window):
    """Leaves a token out although the budget covers them all: half a page of it is not used."""

    promise: ClassVar[str] = "a budget that covers the row reads everything"

    def select(self, call, state, budget):
        whole = self.checked(budget) // self.page_size * self.page_size
        return super().select(call, state, whole)


@dataclass(frozen=True, kw_only=True)
class HasAList(Window):
    promise: ClassVar[str] = "is hashable and names its fields"
    layers: list = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class SilentFloor(Window):
    promise: ClassVar[str] = "a budget below the forced pages is refused"

    def checked(self, budget):
        return max(budget or 0, self.min_budget)


@dataclass(frozen=True, kw_only=True)
class LooksAtTheLongestRow(Window):
    promise: ClassVar[str] = "other rows do not matter"

    def select(self, call, state, budget):
        x = super().select(call, state, budget)
        second = as_mask(x, call, self.page_size)
        second[..., 2] |= call.lengths_B.amax() > 9 * self.page_size
        return selection_from_mask(second & forced_or_later(call, self), self.page_size)


def forced_or_later(call: Any, policy: Policy) -> torch.Tensor:
    num_pages = num_pages_of(call.capacity, policy.page_size)
    return visible_BP(call, policy.page_size, num_pages)[:, None]


@dataclass(frozen=True, kw_only=True)
class CountsPads(Quest):
    promise: ClassVar[str] = "left pads do not matter"

    def init(self, call, prompt_queries_BWHD=None):
        return super().init(replace(call, starts_B=None))


@dataclass(frozen=True, kw_only=True)
class ReadsBeyondTheEnd(Quest):
    """Centres keys on the mean of the whole cache, what is not live included."""

    promise: ClassVar[str] = "tokens beyond the end do not matter"

    def init(self, call, prompt_queries_BWHD=None):
        spread = call.k_BGND.std(2, keepdim=True)
        return super().init(replace(call, k_BGND=call.k_BGND / spread))


@dataclass(frozen=True, kw_only=True)
class Dice(Quest):
    promise: ClassVar[str] = "same input same pages"

    def score(self, call, state):
        return torch.rand_like(super().score(call, state))


@dataclass(frozen=True, kw_only=True)
class TiesToTheHighest(Quest):
    promise: ClassVar[str] = "ties go to the lowest page"

    def score(self, call, state):
        score = super().score(call, state)
        return score + 1e-4 * torch.arange(score.shape[-1], device=score.device)


@dataclass(frozen=True, kw_only=True)
class NeverExtends(Quest):
    promise: ClassVar[str] = "incremental state equals rebuilt state"

    def extend(self, state, call):
        pass


@dataclass(frozen=True, kw_only=True)
class LooksAhead(Quest):
    """Compares each page with one further on, which a replay has and a single step has not yet."""

    promise: ClassVar[str] = "replay equals single steps"

    def score(self, call, state):
        score = super().score(call, state)
        return score - score.roll(-3, -1)


@dataclass(frozen=True, kw_only=True)
class KeepsStateInTheClass(Quest):
    promise: ClassVar[str] = "sequences do not share state"
    states: ClassVar[dict[int, Any]] = {}

    def init(self, call, prompt_queries_BWHD=None):
        self.states[call.layer] = super().init(call)
        return State()

    def extend(self, state, call):
        super().extend(self.states[call.layer], call)

    def select(self, call, state, budget):
        return super().select(call, self.states[call.layer], budget)


@dataclass(frozen=True, kw_only=True)
class ScalesTheQueryInPlace(Quest):
    promise: ClassVar[str] = "inputs and policy stay unchanged"

    def score(self, call, state):
        call.q_BHD.mul_(call.scale)
        return super().score(replace(call, scale=1.0), state)


@dataclass(frozen=True, kw_only=True)
class KeepsStateOnItself(Quest):
    promise: ClassVar[str] = "inputs and policy stay unchanged"

    def init(self, call, prompt_queries_BWHD=None):
        object.__setattr__(self, "last", call.q_BHD)
        return super().init(call)


@dataclass(frozen=True, kw_only=True)
class SecretlyLooksAtKeys(Quest):
    promise: ClassVar[str] = "evidence is as declared"
    evidence: ClassVar[Any] = "position"


@dataclass(frozen=True, kw_only=True)
class SecretlyLooksAtTheQuery(SnapKV):
    promise: ClassVar[str] = "evidence is as declared"

    def select(self, call, state, budget):
        quest = Quest(
            page_size=self.page_size, sink_pages=self.sink_pages, local_pages=self.local_pages
        )
        return quest.select(call, quest.init(call), budget)


@dataclass(frozen=True, kw_only=True)
class WantsAllItsVotes(SnapKV):
    promise: ClassVar[str] = "short prompts give all their queries"

    def init(self, call, prompt_queries_BWHD=None):
        assert prompt_queries_BWHD.shape[1] >= self.window
        return super().init(call, prompt_queries_BWHD)


@dataclass(frozen=True, kw_only=True)
class BringsPagesBack(Quest):
    promise: ClassVar[str] = "evicted pages stay away"
    action: ClassVar[Literal["evict"]] = "evict"


@dataclass(frozen=True, kw_only=True)
class AsksTheHost(Window):
    promise: ClassVar[str] = "needs no value on the host"

    def select(self, call, state, budget):
        assert call.lengths_B.min().item() >= 0
        return super().select(call, state, budget)


@dataclass(frozen=True, kw_only=True)
class ListsAsLongAsTheText(Window):
    promise: ClassVar[str] = "shapes ignore live lengths"

    def select(self, call, state, budget):
        x = super().select(call, state, budget)
        return replace(x, pages_BSK=x.pages_BSK[..., : int(x.counts_BS.max())])


@dataclass(frozen=True, kw_only=True)
class NearTheBest(Quest):
    """Adaptive: every page whose bound is within delta of the best one, a group's union."""

    adaptive: ClassVar[bool] = True
    dense_at: ClassVar[dict[str, Any]] = {"delta": float("inf")}
    delta: float = 2.0

    def select(self, call, state, budget):
        logit = self.score(call, state)
        num_pages = logit.shape[-1]
        page = torch.arange(num_pages, device=call.device)
        full = (page + 1) * self.page_size <= call.lengths_B[:, None]
        logit = logit.masked_fill(~full[:, None], -torch.inf)
        near = (logit >= logit.amax(-1, keepdim=True) - self.delta) & full[:, None]
        keep = near.unflatten(1, (call.num_kv_heads, -1)).any(2)
        keep = keep | forced_BP(call, self, num_pages)[:, None]
        return selection_from_mask(keep, self.page_size)


@dataclass(frozen=True, kw_only=True)
class NeverEverything(NearTheBest):
    promise: ClassVar[str] = "adaptive reads everything at its limit"

    def score(self, call, state):
        score = super().score(call, state)
        return score.masked_fill(torch.arange(score.shape[-1]) == 4, torch.nan)


@dataclass(frozen=True, kw_only=True)
class ExceedsItsCap(NearTheBest):
    promise: ClassVar[str] = "budget is kept"
    max_tokens: int = 8


@dataclass
class MassState(State):
    """The softmax mass each page has received so far: [B, G, P] float32."""

    mass_BGP: torch.Tensor
    paged: ClassVar[tuple[str, ...]] = ("mass_BGP",)


@dataclass(frozen=True, kw_only=True)
class HeavyHitters(Policy[MassState]):
    """History: the pages that received the most mass when they were read (as in H2O, by page)."""

    evidence: ClassVar[Literal["history"]] = "history"

    def init(self, call, prompt_queries_BWHD=None):
        rows, heads = call.k_BGND.shape[:2]
        num_pages = num_pages_of(call.capacity, self.page_size)
        return MassState(torch.zeros(rows, heads, num_pages, device=call.device))

    def observe(self, state, call, result):
        mass = (result.page_lse_BHK - result.lse_BH[..., None]).exp()
        mass = mass.unflatten(1, (call.num_kv_heads, -1)).sum(2)
        state.mass_BGP.scatter_add_(2, result.selection.pages_BSK.long().clamp_min(0), mass)

    def select(self, call, state, budget):
        return top_pages(state.mass_BGP, call, self, budget)


@dataclass(frozen=True, kw_only=True)
class ForgetsHistoryAcrossRows(HeavyHitters):
    """Adds up what all rows received."""

    promise: ClassVar[str] = "other rows do not matter"

    def observe(self, state, call, result):
        super().observe(state, call, result)
        state.mass_BGP[:] = state.mass_BGP.sum(0)


def broken() -> list[Any]:
    return [c for c in globals().values() if isinstance(c, type) and "promise" in vars(c)]
