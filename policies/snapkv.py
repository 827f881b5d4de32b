"""SnapKV: keep what the last prompt queries attended to, chosen once, then fixed.

Source: Li et al. 2024, https://arxiv.org/abs/2404.14469. Tokens are scored by the softmax mass the
last `window` prompt queries (all of them, where a prompt has fewer) gave them, pooled over
neighbours; a page by the sum of its tokens. At page_size 1 these are the published scores, except
that a GQA group shares its choice (the mass of its heads is added), that the observation window
itself competes like any other token, and that the average at the text's first tokens counts no
zeros before them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d, max_pool1d, pad

from sparse_eval.core import AttentionCall
from sparse_eval.policies.base import (
    Policy,
    Selection,
    State,
    check_at_least,
    check_one_of,
    current_page_B,
    live_keys,
    num_pages_of,
)
from sparse_eval.policies.topk import top_pages

POOLING: dict[str, Callable[..., Tensor]] = {
    "avg": partial(avg_pool1d, count_include_pad=False),
    "max": max_pool1d,
}


@dataclass
class SnapKVState(State):
    """score_BGP: float32. Pages that were local when it was made, and younger ones, have the
    lowest finite score: they leave for good when they leave the local window."""

    score_BGP: Tensor
    paged: ClassVar[tuple[str, ...]] = ("score_BGP",)
    blank: ClassVar[float] = torch.finfo(torch.float32).min


@dataclass(frozen=True, kw_only=True)
class SnapKV(Policy[SnapKVState]):
    window: int = 32  # prompt queries that vote, at most
    kernel_size: int = 5  # tokens pooled, odd; 1: no pooling
    pooling: str = "avg"
    action: ClassVar[Literal["evict"]] = "evict"
    evidence: ClassVar[Literal["prompt"]] = "prompt"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least("window", self.window, 1)
        check_at_least("kernel_size", self.kernel_size, 1)
        if self.kernel_size % 2 == 0:
            raise ValueError(f"kernel_size must be odd, got {self.kernel_size}")
        check_one_of("pooling", self.pooling, tuple(POOLING))

    def init(self, call: AttentionCall, prompt_queries_BWHD: Tensor | None = None) -> SnapKVState:
        call = prompt_call(call)
        votes_BWHD = self.voters(call, prompt_queries_BWHD)
        mass_BGN = self.pooled(voted_mass(call, votes_BWHD))
        mass_BGN = pad(mass_BGN, (0, -mass_BGN.shape[-1] % self.page_size))
        score_BGP = mass_BGN.unflatten(2, (-1, self.page_size)).sum(-1)
        page = torch.arange(score_BGP.shape[-1], device=call.device)
        oldest_local = current_page_B(call, self.page_size) - self.local_pages + 1
        unscored = page >= oldest_local[:, None]
        state = SnapKVState(score_BGP.masked_fill(unscored[:, None], SnapKVState.blank))
        state.grow(num_pages_of(call.capacity, self.page_size))
        return state

    def voters(self, call: AttentionCall, prompt_queries_BWHD: Tensor | None) -> Tensor:
        """The last `window` prompt queries; every one where the longest row has no more."""
        given = 0 if prompt_queries_BWHD is None else prompt_queries_BWHD.shape[1]
        if given < self.window:
            longest = int(call.lengths_B.max())
            if not given or given < longest:
                raise ValueError(
                    f"SnapKV needs the last {self.window} prompt queries (of a shorter prompt, "
                    f"all), got {given} for {longest} tokens"
                )
        assert prompt_queries_BWHD is not None
        return prompt_queries_BWHD[:, -self.window :]

    def pooled(self, mass_BGN: Tensor) -> Tensor:
        """Over the neighbours that exist: none before token 0, unwritten ones behind count as 0."""
        reach, pool = self.kernel_size // 2, POOLING[self.pooling]
        wider = pool(pad(mass_BGN, (0, reach)), self.kernel_size, stride=1, padding=reach)
        return wider[..., : mass_BGN.shape[-1]]

    def extend(self, state: SnapKVState, call: AttentionCall) -> None:
        state.grow(num_pages_of(call.capacity, self.page_size))

    def select(self, call: AttentionCall, state: SnapKVState, budget: int | None) -> Selection:
        score = state.score_BGP.expand(call.q_BHD.shape[0], -1, -1)
        return top_pages(score, call, self, budget)


def prompt_call(call: AttentionCall) -> AttentionCall:
    """One row per cache: of steps that share one, the first, where the prompt ends."""
    if call.k_BGND.shape[0] == call.q_BHD.shape[0]:
        return call
    starts = None if call.starts_B is None else call.starts_B[:1]
    return replace(call, lengths_B=call.lengths_B.amin(0, keepdim=True), starts_B=starts)


def voted_mass(call: AttentionCall, queries_BWHD: Tensor) -> Tensor:
    """The softmax mass that the queries of the last W live tokens give each live token, added over
    queries and the group's heads: [B, G, N] float32, token 0 being the row's first live one."""
    num_tokens, window = call.k_BGND.shape[2], queries_BWHD.shape[1]
    k = live_keys(call, num_tokens)
    position_BW = call.lengths_B[:, None] - window + torch.arange(window, device=k.device)
    token = torch.arange(num_tokens, device=k.device)
    seen = (token <= position_BW[..., None])[:, :, None]  # [B, W, 1, N], nothing where position < 0
    q = queries_BWHD.float().unflatten(2, (call.num_kv_heads, -1))  # [B, W, G, M, D]
    mass = []
    for g in range(call.num_kv_heads):  # one KV head at a time: [B, W, M, N] is the largest tensor
        s = call.scale * (q[:, :, g].flatten(1, 2) @ k[:, g].float().mT).unflatten(1, (window, -1))
        p = s.masked_fill(~seen, -torch.inf).softmax(-1)
        # exact in float64, so that equal masses stay equal whatever the order of the sum
        mass.append(p.masked_fill(~seen, 0).sum((1, 2), dtype=torch.float64).float())
    return torch.stack(mass, 1)
