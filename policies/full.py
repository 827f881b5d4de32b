"""Full: every page, whatever the budget. The yardstick that selection is measured against."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from sparse_eval.core import AttentionCall
from sparse_eval.policies.base import (
    Policy,
    Selection,
    State,
    num_pages_of,
    selection_from_mask,
    visible_BP,
)


@dataclass(frozen=True, kw_only=True)
class Full(Policy[State]):
    dense: ClassVar[bool] = True

    def select(self, call: AttentionCall, state: State, budget: int | None) -> Selection:
        num_pages = num_pages_of(call.capacity, self.page_size)
        visible = visible_BP(call, self.page_size, num_pages)
        return selection_from_mask(
            visible[:, None].expand(-1, call.num_kv_heads, -1), self.page_size
        )
