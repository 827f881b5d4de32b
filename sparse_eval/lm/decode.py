"""Answers of several rows at once: greedy text up to a stop, likelihoods of given continuations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sparse_eval.lm.requests import Ask
from sparse_eval.lm.stack import Decoder
from sparse_eval.lm.texts import TextSide, until_stop


@dataclass
class Written:
    """ids: the answer's tokens, EOS left out. is_over: the model or a stop string ended it, not the
    limit of new tokens."""

    ids: list[int] = field(default_factory=list)
    is_over: bool = False


@dataclass(frozen=True)
class Likelihood:
    """log_likelihood: of the whole continuation, nats. is_greedy: each of its tokens is what greedy
    decoding would have chosen there."""

    log_likelihood: float
    is_greedy: bool


@torch.inference_mode()
def generate(
    decoder: Decoder, asks: Sequence[Ask], side: TextSide, end_ids: frozenset[int]
) -> list[Written]:
    """Greedy, every row until its own stop; a row that is over is fed on and not read. The asks'
    tails are equally long."""
    written = [Written() for _ in asks]
    fed_BT = tails(asks)
    while True:
        chosen = decoder.feed(fed_BT).argmax(-1).tolist()
        for row, ask, token in zip(written, asks, chosen, strict=True):
            write(row, ask, token, side, end_ids)
        if all(is_done(row, ask) for row, ask in zip(written, asks, strict=True)):
            return written
        fed_BT = torch.tensor(chosen)[:, None]


def write(row: Written, ask: Ask, token: int, side: TextSide, end_ids: frozenset[int]) -> None:
    if is_done(row, ask):
        return
    if token in end_ids:
        row.is_over = True
        return
    row.ids.append(token)
    text = side.raw_text(row.ids)
    row.is_over = any(stop in text for stop in filter(None, ask.stops))


def is_done(row: Written, ask: Ask) -> bool:
    return row.is_over or len(row.ids) >= ask.max_new_tokens


def answer_text(row: Written, ask: Ask, side: TextSide) -> str:
    return until_stop(side.text(row.ids), ask.stops)


@torch.inference_mode()
def judge(decoder: Decoder, asks: Sequence[Ask]) -> list[Likelihood]:
    """Each row's continuation, fed token by token; shorter ones are fed on and not read."""
    continuations = [ask.continuation or () for ask in asks]
    longest = max(map(len, continuations))
    true_BT = torch.zeros(len(asks), longest, dtype=torch.int64)
    for row, continuation in enumerate(continuations):
        true_BT[row, : len(continuation)] = torch.tensor(continuation)
    log_p, greedy = [], []
    fed_BT = tails(asks)
    for step in range(longest):
        logits_BV = decoder.feed(fed_BT)
        true_B = true_BT[:, step].to(logits_BV.device)
        log_p.append(logits_BV.log_softmax(-1).gather(1, true_B[:, None])[:, 0])
        greedy.append(logits_BV.argmax(-1) == true_B)
        fed_BT = true_BT[:, step : step + 1]
    log_p_BT, greedy_BT = torch.stack(log_p, 1).double().cpu(), torch.stack(greedy, 1).cpu()
    return [
        Likelihood(float(log_p_BT[row, :n].sum()), bool(greedy_BT[row, :n].all()))
        for row, n in enumerate(map(len, continuations))
    ]


def tails(asks: Sequence[Ask]) -> Tensor:
    """The prompts' tokens that are not prefilled, int64 [B, T]."""
    return torch.tensor([ask.ids[ask.num_cached :] for ask in asks])
