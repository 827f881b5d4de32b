"""What every policy is: pages, a selection of them, and the four calls a policy answers.

A page is page_size consecutive live tokens: page p of row b is
[starts_b + p·page_size, starts_b + (p+1)·page_size). The page with the newest token is the current
page; it is always read. Only full pages carry metadata. Shapes: see sparse_eval.core.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Generic, Literal, TypeVar

import torch
from torch import Tensor

from sparse_eval.core import AttentionCall
from sparse_eval.kernels.sparse_decode.api import MAX_TRITON_HEAD_DIM


@dataclass(frozen=True)
class Selection:
    """The pages each row reads. pages_BSK: int32, ascending, valid ids first, then -1.
    counts_BS: int32, valid ids per row. S = G: a group shares its pages; S = H: one list a head.
    wanted_BH: where a group reads the union of what its query heads chose, the live tokens that
    each head chose for itself (int64); None where heads do not choose apart."""

    pages_BSK: Tensor
    counts_BS: Tensor
    page_size: int
    wanted_BH: Tensor | None = None


@dataclass(frozen=True)
class Attended:
    """What attention over a selection gave: all that a history policy learns from.

    out_BHE, lse_BH; page_lse_BHK: the log-sum-exp of each slot of selection.pages_BSK."""

    selection: Selection
    out_BHE: Tensor
    lse_BH: Tensor
    page_lse_BHK: Tensor


@dataclass
class State:
    """Tensors a policy keeps for one layer, owned by the caller and updated in place.

    Fields named in `paged` have shape [B, G, P, ...] with P sized for the call's capacity; B is the
    cache's batch, so 1 where all rows read one cache. New pages hold `blank`."""

    paged: ClassVar[tuple[str, ...]] = ()
    blank: ClassVar[float] = 0.0

    def tensors(self) -> dict[str, Tensor]:
        named = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: x for name, x in named.items() if isinstance(x, Tensor)}

    def grow(self, num_pages: int) -> None:
        """Make room for num_pages pages; what was there stays."""
        for name in self.paged:
            old = getattr(self, name)
            if old.shape[2] < num_pages:
                new = old.new_full((*old.shape[:2], num_pages, *old.shape[3:]), self.blank)
                new[:, :, : old.shape[2]] = old
                setattr(self, name, new)


StateT = TypeVar("StateT", bound=State)


@dataclass(frozen=True, kw_only=True)
class Policy(ABC, Generic[StateT]):
    """Which pages of the KV cache a decode query reads.

    action: select (everything is kept) or evict (what was dropped cannot come back).
    evidence: what the choice may look at. adaptive: reads as many pages as it needs, no budget;
    dense_at names the field values at which it reads everything, such as {"delta": inf}.
    dense: reads everything whatever the budget. realisable: could be built; an oracle could not.
    """

    page_size: int = 16  # tokens
    sink_pages: int = 1  # first pages, always read
    local_pages: int = 2  # newest pages, always read, the current one included

    action: ClassVar[Literal["select", "evict"]] = "select"
    evidence: ClassVar[Literal["position", "prompt", "query", "history"]] = "position"
    adaptive: ClassVar[bool] = False
    dense_at: ClassVar[dict[str, Any]] = {}
    dense: ClassVar[bool] = False
    realisable: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_at_least("page_size", self.page_size, 1)
        check_at_least("sink_pages", self.sink_pages, 0)
        check_at_least("local_pages", self.local_pages, 1)

    @property
    def forced_pages(self) -> int:
        return self.sink_pages + self.local_pages

    @property
    def min_budget(self) -> int:
        """Tokens the forced pages need."""
        return self.forced_pages * self.page_size

    def checked(self, budget: int | None) -> int:
        """The budget, in tokens; ValueError naming the minimum if the forced pages do not fit."""
        if budget is None or budget < self.min_budget:
            raise ValueError(
                f"budget must be >= {self.min_budget} tokens ({self.forced_pages} pages of "
                f"{self.page_size} that {type(self).__name__} always reads), got {budget}"
            )
        return budget

    def local_pages_at(self, budget: int | None) -> int:
        """Newest pages always read at a budget: local_pages, or more where a policy says so."""
        return self.local_pages

    def check_cache(self, head_dim: int | None, num_tokens: int) -> None:  # noqa: B027
        """ValueError in one line where select could not work on heads of this many channels (None:
        not known), or on a cache of this many tokens: asked before a model is loaded."""

    def config(self) -> dict[str, Any]:
        """Every field by name: what a row's policy_config records. Infinities are text: JSON has
        none."""
        return {f.name: finite_or_text(getattr(self, f.name)) for f in fields(self)}

    def init(self, call: AttentionCall, prompt_queries_BWHD: Tensor | None = None) -> StateT:
        """State for the cache as it stands: call.lengths_B live tokens per row, newest included.

        prompt_queries_BWHD: the queries of the last W tokens, the newest last; a row of fewer
        tokens holds garbage in front, and W is less where every row is short. Rows that share one
        cache are steps of one sequence, the first of which ends the prompt: one set of prompt
        queries for all."""
        return State()  # type: ignore[return-value]

    def extend(self, state: StateT, call: AttentionCall) -> None:  # noqa: B027
        """The cache grew by one token a row, call.lengths_B includes it: update state."""

    def observe(self, state: StateT, call: AttentionCall, result: Attended) -> None:  # noqa: B027
        """After attention: history policies learn from what it gave."""

    def attended_keys(self, call: AttentionCall, state: StateT) -> Tensor:
        """The keys that attention over the selection sees: the cache's own, unless the method
        attends with others. Like call.k_BGND; the batch may be B where the cache's is 1."""
        return call.k_BGND

    @abstractmethod
    def select(self, call: AttentionCall, state: StateT, budget: int | None) -> Selection:
        """The pages this step reads; leaves state and call as they are, waits for no value.

        budget: tokens a KV head may read in all, its query heads' union counted; None if adaptive.
        Shapes depend on shapes alone, never on live lengths."""


def check_policy(policy: Any) -> Policy:
    """The policy, if it is one; TypeError in one line if not."""
    if isinstance(policy, Policy):
        return policy
    if isinstance(policy, type) and issubclass(policy, Policy):
        name = policy.__name__
        raise TypeError(f"a policy must be an instance such as {name}(), got the class {name}")
    raise TypeError(f"a policy must be an instance of Policy, such as Quest(), got {policy!r}")


def check_selection(policy: Policy, selection: Any) -> Selection:
    """What select gave; ValueError where it is no Selection of the policy's own pages."""
    name = type(policy).__name__
    if not isinstance(selection, Selection):
        raise ValueError(f"{name}.select must return a Selection, got {type(selection).__name__}")
    if selection.page_size != policy.page_size:
        raise ValueError(
            f"{name}.select must select pages of {policy.page_size} tokens (its page_size), got "
            f"page_size={selection.page_size}"
        )
    return selection


def bound_of(policy: Policy, budget: int | None) -> int | None:
    """Tokens that no KV head may exceed in a step; None for policies that need keep no budget."""
    return None if policy.adaptive or policy.dense else budget


def check_kept(policy: str, bound: int | None, most_read: float, where: str) -> None:
    """ValueError where some KV head read more in one step than its budget. most_read: tokens."""
    if bound is not None and most_read > bound:
        raise ValueError(
            f"{policy} read {most_read:.0f} tokens in one KV head and step ({where}), its budget "
            f"is {bound}: not measured, since it would be compared with policies that keep theirs"
        )


def check_at_least(name: str, value: Any, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} must be an integer >= {least}, got {value!r}")


def check_one_of(name: str, value: Any, accepted: tuple[Any, ...]) -> None:
    if not any(value == one and type(value) is type(one) for one in accepted):  # 2.0 is not 2
        raise ValueError(f"{name} must be one of {', '.join(map(str, accepted))}, got {value!r}")


def check_triton_heads(head_dim: int | None) -> None:
    if head_dim is not None and head_dim > MAX_TRITON_HEAD_DIM:
        raise ValueError(
            f"select_backend triton takes head dims up to {MAX_TRITON_HEAD_DIM}, got {head_dim}"
        )


def check_flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, got {value!r}")


def check_number(name: str, value: Any, least: float, most: float = math.inf) -> None:
    """A number in [least, most]; infinity only where most is."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not least <= value <= most:
        accepted = f">= {least:g}" if most == math.inf else f"from {least:g} to {most:g}"
        raise ValueError(f"{name} must be a number {accepted}, got {value!r}")


def finite_or_text(value: Any) -> Any:
    return str(value) if isinstance(value, float) and math.isinf(value) else value


def num_pages_of(tokens: int, page_size: int) -> int:
    """Pages that hold `tokens` tokens, a partial one counted."""
    return -(-tokens // page_size)


def current_page_B(call: AttentionCall, page_size: int) -> Tensor:
    """Index of the page that holds the newest token; -1 for an empty row."""
    return torch.div(call.lengths_B.long() + page_size - 1, page_size, rounding_mode="floor") - 1


def visible_BP(call: AttentionCall, page_size: int, num_pages: int) -> Tensor:
    """True for pages that hold a live token (the current page included)."""
    page = torch.arange(num_pages, device=call.device)
    return page <= current_page_B(call, page_size)[:, None]


def full_BP(call: AttentionCall, page_size: int, num_pages: int) -> Tensor:
    """True for pages whose every token is live: those with metadata."""
    last_token = torch.arange(1, num_pages + 1, device=call.device) * page_size
    return last_token <= call.lengths_B[:, None]


def held_BP(call: AttentionCall, page_size: int, num_pages: int) -> Tensor:
    """Live tokens in each page."""
    first = torch.arange(num_pages, device=call.device) * page_size
    return (call.lengths_B.long()[:, None] - first).clamp(0, page_size)


def fits_B(call: AttentionCall, budget: int) -> Tensor:
    """True for rows whose every live token fits the budget."""
    return call.lengths_B <= budget


def forced_BP(call: AttentionCall, policy: Policy, num_pages: int) -> Tensor:
    """True for the sink and local pages (the current one is local) that hold a live token."""
    page = torch.arange(num_pages, device=call.device)
    current = current_page_B(call, policy.page_size)[:, None]
    local = page > current - policy.local_pages
    return (local | (page < policy.sink_pages)) & (page <= current)


def selection_from_mask(mask_BSP: Tensor, page_size: int, width: int | None = None) -> Selection:
    """A Selection of every page that is True, in lists of `width` slots (None: one per page)."""
    num_pages = mask_BSP.shape[-1]
    width = num_pages if width is None else min(width, num_pages)
    slot = torch.where(mask_BSP, mask_BSP.cumsum(-1) - 1, width)
    page = torch.arange(num_pages, device=mask_BSP.device, dtype=torch.int32)
    pages = page.new_full((*mask_BSP.shape[:2], width + 1), -1)
    pages.scatter_(-1, slot, page.expand_as(slot))
    counts = mask_BSP.sum(-1, dtype=torch.int32)
    return Selection(pages[..., :width].contiguous(), counts, page_size)


def live_keys(call: AttentionCall, num_tokens: int) -> Tensor:
    """Each row's first num_tokens keys from its start: [B or 1, G, num_tokens, D].

    A view where rows start at 0, a gathered copy where starts_B shifts them. What lies beyond a
    row's end is garbage: mask it."""
    k = call.k_BGND
    if call.starts_B is None:
        return k[:, :, :num_tokens]
    return gather_tokens(k, call.starts_B.long()[:, None], num_tokens)


def pages_of_keys(call: AttentionCall, page_size: int) -> Tensor:
    """Keys cut into the extent's whole pages: [B or 1, G, N // page_size, page_size, D]."""
    num_full = call.k_BGND.shape[2] // page_size
    return live_keys(call, num_full * page_size).unflatten(2, (num_full, page_size))


def newest_full_page(call: AttentionCall, page_size: int) -> tuple[Tensor, Tensor]:
    """Per row, the last full page: its index [B] (clamped to 0) and its keys [B, G, page_size, D].

    A row with no full page yields page 0's extent: writing metadata from it is harmless, since
    that page is rewritten when it fills and is forced until then."""
    page = (torch.div(call.lengths_B.long(), page_size, rounding_mode="floor") - 1).clamp_min(0)
    start = 0 if call.starts_B is None else call.starts_B.long()
    return page, gather_tokens(call.k_BGND, (start + page * page_size)[:, None], page_size)


def gather_tokens(k_BGND: Tensor, first_B1: Tensor, num_tokens: int) -> Tensor:
    """Tokens [first, first + num_tokens) of each row, the last one repeated beyond the extent."""
    index = first_B1 + torch.arange(num_tokens, device=k_BGND.device)
    index = index.clamp_max(k_BGND.shape[2] - 1)[:, None, :, None]
    k = k_BGND.expand(index.shape[0], -1, -1, -1)
    return k.gather(2, index.expand(-1, k.shape[1], -1, k.shape[3]))
