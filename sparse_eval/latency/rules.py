"""Top-k, top-p and top-δ on the same scores at one keep ratio: what each rule costs by itself.

top-δ: two launches of ours (kernels/ffd/rules.py), lists ascending. top-k: torch.topk, unsorted.
top-p: torch.sort, softmax, cumsum. All leave a list and a count per query head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparse_eval.latency.clock import Step

RULES = ("top_delta", "top_k", "top_p")
QUANTILE_SAMPLE = 1 << 20


@dataclass(frozen=True)
class Matched:
    """Each rule's number for one keep ratio of the first scores: tokens, share of mass, logits."""

    k: int
    p: float
    delta: float


def matched(scores_BHN: Tensor, keep_ratio: float, num_sinks: int, num_local: int) -> Matched:
    k = max(1, int(keep_ratio * scores_BHN.shape[2]))
    forced = torch.cat([scores_BHN[..., :num_sinks], scores_BHN[..., -num_local:]], -1)
    gap = (forced.amax(-1, keepdim=True) - scores_BHN).flatten()
    if len(gap) > QUANTILE_SAMPLE:  # more than torch.quantile takes
        gap = gap[torch.randint(len(gap), (QUANTILE_SAMPLE,), device=gap.device)]
    delta = max(0.0, float(torch.quantile(gap, keep_ratio)))
    best = scores_BHN.sort(dim=-1, descending=True).values.softmax(-1)
    return Matched(k, float(best[..., :k].sum(-1).mean()), delta)


def top_p(scores_BHN: Tensor, p: float) -> tuple[Tensor, Tensor]:
    """ids [B, H, N] by falling score, and how many of them hold the share p of the mass."""
    best, ids = scores_BHN.sort(dim=-1, descending=True)
    return ids, (best.softmax(-1).cumsum(-1) < p).sum(-1) + 1


def rule_work(scores: list[Tensor], m: Matched, num_sinks: int, num_local: int) -> dict[str, Step]:
    """One application of each rule to scores number i."""
    from sparse_eval.kernels.ffd.rules import top_delta_triton

    forced = {"num_sinks": num_sinks, "num_local": num_local}
    return {
        "top_delta": lambda i: top_delta_triton(scores[i], delta=m.delta, **forced),
        "top_k": lambda i: scores[i].topk(m.k, dim=-1, sorted=False),
        "top_p": lambda i: top_p(scores[i], m.p),
    }


def kept(work: dict[str, Step], scores_BHN: Tensor) -> dict[str, float]:
    """The share of the tokens that each rule keeps of the first scores, mean over heads."""
    num_tokens = scores_BHN.shape[2]
    shares = {}
    for name, step in work.items():
        lists = step(0)
        assert isinstance(lists, tuple)
        count = lists[1] if name != "top_k" else torch.tensor(lists[1].shape[-1])
        shares[name] = float(count.float().mean()) / num_tokens
    return shares
