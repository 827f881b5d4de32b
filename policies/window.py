"""Window: the sinks and the most recent pages; at page_size 1 exactly StreamingLLM's visible set.

Source: Xiao et al. 2023, https://arxiv.org/abs/2309.17453 (4 sink tokens: sink_pages=4 at
page_size=1). Positions stay those of the text, since the cache is read, not rolled.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sparse_eval.core import AttentionCall
from sparse_eval.policies.base import Policy, Selection, State, current_page_B, fits_B, num_pages_of


@dataclass(frozen=True, kw_only=True)
class Window(Policy[State]):
    def select(self, call: AttentionCall, state: State, budget: int | None) -> Selection:
        budget = self.checked(budget)
        width = min(
            num_pages_of(budget, self.page_size), num_pages_of(call.capacity, self.page_size)
        )
        slot = torch.arange(width, device=call.device)
        current = current_page_B(call, self.page_size)[:, None]
        skipped = (current + 1 - budget // self.page_size).clamp_min(0)
        skipped = skipped.masked_fill(fits_B(call, budget)[:, None], 0)
        page = torch.where(slot < self.sink_pages, slot, slot + skipped)
        page = page.masked_fill(page > current, -1).int()[:, None].repeat(1, call.num_kv_heads, 1)
        return Selection(page, (page >= 0).sum(-1, dtype=torch.int32), self.page_size)
