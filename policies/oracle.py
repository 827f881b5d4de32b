"""Oracle: the pages with the most of the dense softmax's mass, averaged over the group's heads.

No policy can look at every key to choose what to read; this one does, and bounds those that cannot.
With one list a group it holds at least the mass that any other choice of as many pages holds, a
union of per-head lists included.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from sparse_eval.core import AttentionCall
from sparse_eval.kernels.sparse_decode import sparse_decode
from sparse_eval.policies.base import Policy, Selection, State, check_flag
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
        _, lse_BH, page_lse_BHP = sparse_decode(
            *(call.q_BHD, call.k_BGND, call.v_BGNE, None, None, call.starts_B, call.lengths_B),
            page_size=self.page_size,
            scale=call.scale,
            backend="triton" if call.q_BHD.is_cuda else "torch",
            page_lse=True,
        )
        mass = (page_lse_BHP - lse_BH[..., None]).exp()
        if not self.per_head:
            mass = mass.unflatten(1, (call.num_kv_heads, -1)).mean(2)
        unforced = replace(self, sink_pages=0, local_pages=1)
        return top_pages(mass, call, unforced, budget)
