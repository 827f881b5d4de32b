"""What every policy is: pages, a selection of them, and the four calls a policy answers.

A page is page_size consecutive live tokens: page p of row b is
[starts_b + p·page_size, starts_b + (p+1)·page_size). The page with the newest token is the current
page; it is always read. Only full pages carry metadata. Shapes: see sparse_eval.core.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from sparse_eval.core import AttentionCall

GROUP_RULES = ("max", "sum", "softmax_sum", "per_head")


@dataclass(frozen=True)
class Selection:
    """The pages each row reads. pages_BSK: int32, ascending, valid ids first, then -1.
    counts_BS: int32, valid ids per row. S = G: a group shares its pages; S = H: one list a head."""

    pages_BSK: Tensor
    counts_BS: Tensor
    page_size: int


@dataclass
class State:
    """Tensors a policy keeps for one layer, owned by the caller and updated in place.

    Fields named in `paged` have shape [B, G, P, ...] with P sized for the call's capacity."""

    paged: ClassVar[tuple[str, ...]] = ()

    def tensors(self) -> dict[str, Tensor]:
        named = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: x for name, x in named.items() if isinstance(x, Tensor)}

    def grow(self, num_pages: int) -> None:
        """Make room for num_pages pages; what was there stays, new pages are zero."""
        for name in self.paged:
            old = getattr(self, name)
            new = old.new_zeros(*old.shape[:2], num_pages, *old.shape[3:])
            new[:, :, : old.shape[2]] = old
            setattr(self, name, new)


@dataclass(frozen=True, kw_only=True)
class Policy(ABC):
    """Which pages of the KV cache a decode query reads.

    action: select (everything is kept) or evict (what was dropped cannot come back).
    evidence: what the choice may look at. adaptive: reads as many pages as it needs, no budget.
    """

    page_size: int = 16
    sink_pages: int = 1
    local_pages: int = 2

    action: ClassVar[Literal["select", "evict"]] = "select"
    evidence: ClassVar[Literal["position", "prompt", "query", "history"]] = "position"
    adaptive: ClassVar[bool] = False
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

    def config(self) -> dict[str, Any]:
        """Every field by name: what a row's policy_config records."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def init(self, call: AttentionCall, prompt_queries_BWHD: Tensor | None = None) -> State:
        """State for the cache as it stands: call.lengths_B live tokens per row, newest included."""
        return State()

    def extend(self, state: State, call: AttentionCall) -> None:  # noqa: B027
        """The cache grew by one token a row (call.lengths_B includes it): bring state up to date."""

    def observe(self, state: State, call: AttentionCall, result: Any) -> None:  # noqa: B027
        """After attention: history policies learn from `result` (out, lse, page LSE)."""

    @abstractmethod
    def select(self, call: AttentionCall, state: State, budget: int | None) -> Selection:
        """The pages this step reads. budget: tokens a KV head may read in all; None if adaptive."""


def check_at_least(name: str, value: int, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} must be an integer >= {least}, got {value!r}")


def check_one_of(name: str, value: Any, accepted: tuple[Any, ...]) -> None:
    if value not in accepted:
        raise ValueError(f"{name} must be one of {', '.join(map(str, accepted))}, got {value!r}")


def num_pages_of(tokens: int, page_size: int) -> int:
    """Pages that hold `tokens` tokens, a partial one counted."""
    return -(-tokens // page_size)


def current_page_B(call: AttentionCall, page_size: int) -> Tensor:
    """Index of the page that holds the newest token; -1 for an empty row."""
    return torch.div(call.lengths_B.long() + page_size - 1, page_size, rounding_mode="floor") - 1


def visible_BP(call: AttentionCall, page_size: int, num_pages: int) -> Tensor:
    """True for pages that hold a live token (the current page included)."""
    page = torch.arange(num_pages, device=call.device)
    return page[None] <= current_page_B(call, page_size)[:, None]


def forced_BP(call: AttentionCall, policy: Policy, num_pages: int) -> Tensor:
    """True for the sink and local pages (the current one is local) that hold a live token."""
    page = torch.arange(num_pages, device=call.device)[None]
    current = current_page_B(call, policy.page_size)[:, None]
    local = page > current - policy.local_pages
    return (local | (page < policy.sink_pages)) & (page <= current)


def top_pages(score_BSP: Tensor, call: AttentionCall, policy: Policy, budget: int) -> Selection:
    """The budget // page_size best pages, forced ones first, ties to the lowest id.

    score_BSP: higher is better; not NaN on visible pages. Raises ValueError if the budget cannot hold the forced pages."""
    if budget < policy.min_budget:
        raise ValueError(
            f"budget must be >= {policy.min_budget} tokens ({policy.sink_pages} sink + "
            f"{policy.local_pages} local pages of {policy.page_size}), got {budget}"
        )
    num_pages = score_BSP.shape[-1]
    forced = forced_BP(call, policy, num_pages)[:, None]
    visible = visible_BP(call, policy.page_size, num_pages)[:, None]
    ranked = score_BSP.masked_fill(forced, torch.inf).masked_fill(~visible, -torch.inf)
    best = ranked.sort(dim=-1, descending=True, stable=True).indices[..., : budget // policy.page_size]
    return selection_of(best, current_page_B(call, policy.page_size), policy.page_size)


def selection_of(page_BSK: Tensor, current_B: Tensor, page_size: int) -> Selection:
    """A Selection from unordered, unique page ids; ids beyond the current page become -1."""
    last = torch.iinfo(torch.int32).max
    dead = page_BSK > current_B[:, None, None]
    pages = page_BSK.masked_fill(dead, last).sort(-1).values
    pages = pages.masked_fill(pages == last, -1).int()
    return Selection(pages, (pages >= 0).sum(-1, dtype=torch.int32), page_size)


def selection_from_mask(mask_BSP: Tensor, page_size: int) -> Selection:
    """A Selection of every page that is True."""
    num_pages = mask_BSP.shape[-1]
    page = torch.arange(num_pages, device=mask_BSP.device, dtype=torch.int32)
    last = torch.iinfo(torch.int32).max
    pages = torch.where(mask_BSP, page, last).sort(-1).values
    pages = pages.masked_fill(pages == last, -1)
    return Selection(pages, mask_BSP.sum(-1, dtype=torch.int32), page_size)


def pages_of_keys(call: AttentionCall, page_size: int) -> Tensor:
    """Keys cut into the call's whole pages: [B or 1, G, N // page_size, page_size, D].

    A view where rows start at 0; a gathered copy where starts_B shifts them. Pages beyond a row's
    end hold garbage: mask them."""
    k = call.k_BGND
    num_full = k.shape[2] // page_size
    if call.starts_B is None:
        tokens = k[:, :, : num_full * page_size]
        return tokens.unflatten(2, (num_full, page_size))
    offset = torch.arange(num_full * page_size, device=k.device)
    index = (call.starts_B.long()[:, None] + offset).clamp_max(k.shape[2] - 1)
    k = k.expand(index.shape[0], -1, -1, -1)
    index = index[:, None, :, None].expand(-1, k.shape[1], -1, k.shape[3])
    return k.gather(2, index).unflatten(2, (num_full, page_size))


def newest_full_page(call: AttentionCall, page_size: int) -> tuple[Tensor, Tensor]:
    """Per row, the last full page: its index [B] (clamped to 0) and its keys [B, G, page_size, D].

    A row with no full page yields page 0's extent: writing metadata from it is harmless, since
    that page is rewritten when it fills and is forced until then."""
    k = call.k_BGND
    page = (torch.div(call.lengths_B.long(), page_size, rounding_mode="floor") - 1).clamp_min(0)
    first = page * page_size + (0 if call.starts_B is None else call.starts_B.long())
    index = first[:, None] + torch.arange(page_size, device=k.device)
    index = index.clamp_max(k.shape[2] - 1)[:, None, :, None]
    k = k.expand(index.shape[0], -1, -1, -1)
    return page, k.gather(2, index.expand(-1, k.shape[1], -1, k.shape[3]))


def query_page_scores(q_BHD: Tensor, x_BGPD: Tensor) -> Tensor:
    """q·x for each query head and page: [B, H, P] in float32 (float64 stays). x's batch may be 1."""
    dtype = torch.promote_types(q_BHD.dtype, torch.float32)
    num_rows, num_heads, head_dim = q_BHD.shape
    num_kv_heads, num_pages = x_BGPD.shape[1:3]
    q = q_BHD.to(dtype).reshape(num_rows, num_kv_heads, -1, head_dim)
    x_GDP = x_BGPD.to(dtype).transpose(-1, -2)
    if x_GDP.shape[0] == 1:
        flat = q.transpose(0, 1).reshape(num_kv_heads, -1, head_dim) @ x_GDP[0]
        return flat.unflatten(1, (num_rows, -1)).transpose(0, 1).reshape(num_rows, num_heads, -1)
    return (q @ x_GDP).reshape(num_rows, num_heads, num_pages)


def share_in_group(logit_BHP: Tensor, num_kv_heads: int, rule: str, visible_BP: Tensor) -> Tensor:
    """One score per list from per-head logits: [B, G, P], or [B, H, P] for per_head.

    max, sum: of the logits. softmax_sum: each head's softmax over its visible pages, summed."""
    if rule == "per_head":
        return logit_BHP
    if rule == "softmax_sum":
        logit_BHP = logit_BHP.masked_fill(~visible_BP[:, None], -torch.inf).softmax(-1)
    grouped = logit_BHP.unflatten(1, (num_kv_heads, -1))
    return grouped.amax(2) if rule == "max" else grouped.sum(2)


