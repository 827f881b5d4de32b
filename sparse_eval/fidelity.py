"""How far next-token distributions are from dense ones: pure functions of logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparse_eval.core import Row

NAN = float("nan")


@dataclass(frozen=True)
class NextTokens:
    """logits_MV: float32, those of step m predict the text's token m. text_M: int64."""

    logits_MV: Tensor
    text_M: Tensor

    def where(self, keep_M: Tensor) -> NextTokens:
        return NextTokens(self.logits_MV[keep_M], self.text_M[keep_M])

    @property
    def choices(self) -> list[int]:
        """The likeliest token of each step."""
        return self.logits_MV.argmax(-1).tolist()


def nll_of(tokens: NextTokens) -> Tensor:
    """Of each of the text's tokens, nats: float32 [M]."""
    log_p = tokens.logits_MV.log_softmax(-1)
    return -log_p.gather(1, tokens.text_M[:, None])[:, 0]


def kl_of(own: NextTokens, dense: NextTokens) -> Tensor:
    """KL(dense || own) of each step, nats: float32 [M], never below zero but for rounding."""
    log_p, log_q = dense.logits_MV.log_softmax(-1), own.logits_MV.log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def compare(own: NextTokens, dense: NextTokens) -> Row:
    """Fidelity's columns over the given tokens; NaN where there are none."""
    if not len(own.text_M):
        names = ("kl_mean", "kl_p99", "top1_agreement", "nll_dense", "nll_sparse")
        return {"tokens": 0, **dict.fromkeys(names, NAN)}
    kl = kl_of(own, dense).double()
    same = own.logits_MV.argmax(-1) == dense.logits_MV.argmax(-1)
    return {
        "tokens": len(own.text_M),
        "kl_mean": float(kl.mean()),
        "kl_p99": float(torch.quantile(kl, 0.99)),
        "top1_agreement": float(same.double().mean()),
        "nll_dense": float(nll_of(dense).double().mean()),
        "nll_sparse": float(nll_of(own).double().mean()),
    }
