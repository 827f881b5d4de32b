"""Exact scores: the logits of every cached key. No policy can afford them; they bound those that
choose without looking."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from sparse_eval.core import AttentionCall
from sparse_eval.kernels.sparse_decode import sparse_decode
from sparse_eval.policies.base import State, live_keys, visible_BP
from sparse_eval.policies.metadata import query_page_products
from sparse_eval.policies.score import Score


@dataclass(frozen=True, kw_only=True)
class ExactScore(Score[State]):
    """max and log_mass of the true logits, of every page with a live token."""

    name: ClassVar[str] = "exact"
    realisable: ClassVar[bool] = False

    def init(self, call: AttentionCall, page_size: int) -> State:
        return State()

    def extend(self, state: State, call: AttentionCall, page_size: int) -> None:
        """Keeps nothing."""

    def max(self, call: AttentionCall, state: State, page_size: int) -> Tensor:
        num_tokens = call.k_BGND.shape[2]
        logit_BHN = call.scale * query_page_products(call.q_BHD, live_keys(call, num_tokens))
        live_BN = torch.arange(num_tokens, device=call.device) < call.lengths_B[:, None]
        logit_BHN = logit_BHN.masked_fill(~live_BN[:, None], -torch.inf)
        logit_BHN = pad(logit_BHN, (0, -num_tokens % page_size), value=-torch.inf)
        return logit_BHN.unflatten(2, (-1, page_size)).amax(-1)

    def log_mass(self, call: AttentionCall, state: State, page_size: int) -> Tensor:
        return page_masses(call, page_size)[0]

    def known(self, call: AttentionCall, page_size: int, num_pages: int) -> Tensor:
        return visible_BP(call, page_size, num_pages)


def page_masses(call: AttentionCall, page_size: int) -> tuple[Tensor, Tensor]:
    """The log-sum-exp of each page's logits, [B, H, P] (-inf without a live token), and that of the
    row, [B, H]: dense attention through the shared kernel."""
    _, lse_BH, page_lse_BHP = sparse_decode(
        *(call.q_BHD, call.k_BGND, call.v_BGNE, None, None, call.starts_B, call.lengths_B),
        page_size=page_size,
        scale=call.scale,
        backend="triton" if call.q_BHD.is_cuda else "torch",
        page_lse=True,
    )
    return page_lse_BHP, lse_BH
