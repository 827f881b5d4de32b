"""Oracle: the pages with the most of the dense softmax's mass, averaged over the group's heads.

No policy can look at every key to choose what to read; this one does, and bounds those that cannot.
With one list a group it holds at least the mass that any other choice of as many pages holds, a
union of per-head lists included.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from sparse_eval.core import AttentionCall
from sparse_eval.policies.base import Policy, Selection, State, check_flag
from sparse_eval.policies.exact import page_masses
from sparse_eval.policies.topk import top_pages


@dataclass(frozen=True, kw_only=True)
class Oracle(Policy[State]):
    """Only the current page is forced; sink_pages and local_pages are the run's, and bind others.

    per_head: each query head reads the pages where its own mass is, the union within the budget."""

    per_head: bool = False
    evidence: ClassVar[Literal["query"]] = "query"
    realisable: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_flag("per_head", self.per_head)

    @property
    def forced_pages(self) -> int:
        return 1

    def select(self, call: AttentionCall, state: State, budget: int | None) -> Selection:
        page_lse_BHP, lse_BH = page_masses(call, self.page_size)
        mass = (page_lse_BHP - lse_BH[..., None]).exp()
        if not self.per_head:
            mass = mass.unflatten(1, (call.num_kv_heads, -1)).mean(2)
        unforced = replace(self, sink_pages=0, local_pages=1)
        return top_pages(mass, call, unforced, budget)
