"""Ask a prefilled prompt under one policy: the greedy answer, and how likely the true one was.

The prompt is prefilled dense, once for all policies; each asks a fork of it, so that the same
question in the same cache gets another policy's attention and nothing else changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparse_eval.needle.plant import Planted
from sparse_eval.needle.score import Score, decided, score
from sparse_eval.prefill import Prefilled, feed


@dataclass(frozen=True)
class Generated:
    """ids: the answer's tokens, EOS left out. text: decoded. logits: [steps][vocab], float32; those
    of step t chose token t. ended: the model stopped by itself."""

    ids: tuple[int, ...]
    text: str
    logits: list[Tensor]
    ended: bool


@dataclass(frozen=True)
class TrueAnswer:
    """The true answer, fed token by token. nll: of the value's tokens, nats, summed.
    first_token_rank: of the value's first token among all, 1 = the likeliest. choices: the token
    that each step would have chosen."""

    nll: float
    first_token_rank: int
    choices: tuple[int, ...]


@dataclass
class Asker:
    """One planted prompt, prefilled up to its first sparse token, ready to be asked."""

    model: Any
    tokenizer: Any
    planted: Planted
    filled: Prefilled
    max_new_tokens: int
    is_plain: bool

    @property
    def tail(self) -> Tensor:
        """The prompt's tokens that are not in the prefilled cache: fed under the policy."""
        return self.planted.ids[len(self.filled.ids) - 1 :]

    @property
    def true_ids(self) -> Tensor:
        return torch.tensor(self.planted.answer_ids)

    @torch.inference_mode()
    def generate(self) -> Generated:
        """Greedy, until the outcome is settled, the model stops, or max_new_tokens are written."""
        cache, ids, logits, ended = self.filled.fork(), list[int](), list[Tensor](), False
        fed = self.tail
        while len(ids) < self.max_new_tokens:
            logits.append(feed(self.model, cache, fed).float())
            token = int(logits[-1].argmax())
            if token in self.end_ids:
                ended = True
                break
            ids.append(token)
            if self._is_over(self.text(ids)):
                ended = True
                break
            if self._decided(self.text(ids)) is not None:
                break
            fed = torch.tensor([token])
        return Generated(tuple(ids), self.text(ids), logits, ended)

    def true_logits(self, generated: Generated) -> list[Tensor] | None:
        """The logits along the true answer where the generated one did not leave it, else None."""
        true = self.planted.answer_ids
        steps = len(true) - 1
        follows = generated.ids[:steps] == true[:steps] and len(generated.logits) > steps
        return generated.logits[: len(true)] if follows else None

    @torch.inference_mode()
    def feed_true(self) -> list[Tensor]:
        """The logits along the true answer, fed token by token."""
        cache, true = self.filled.fork(), self.planted.answer_ids
        fed = [self.tail, *(torch.tensor([token]) for token in true[:-1])]
        return [feed(self.model, cache, ids).float() for ids in fed]

    def judge_true(self, logits: Sequence[Tensor]) -> TrueAnswer:
        planted = self.planted
        true = self.true_ids.to(logits[0].device)
        log_p = torch.stack(list(logits)).log_softmax(-1)
        of_true = log_p.gather(1, true[:, None])[:, 0]
        first = planted.value_start
        rank = 1 + int((log_p[first] > of_true[first]).sum())
        choices = log_p.argmax(-1).tolist()
        return TrueAnswer(-float(of_true[first:].double().sum()), rank, tuple(choices))

    def score(self, generated: Generated) -> Score:
        planted = self.planted
        return score(
            generated.text,
            planted.value,
            planted.distractors,
            planted.spot.kind.form,
            ended=generated.ended,
        )

    def answer_steps(self, generated: Generated, found: Score) -> int:
        """Steps until the token that completes the answer's value; all of them without a value."""
        if found.end is None:
            return len(generated.logits)
        for count in range(1, len(generated.ids) + 1):
            if len(self.text(generated.ids[:count])) >= found.end:
                return count
        return len(generated.ids)

    def text(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(
            list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )

    @property
    def end_ids(self) -> set[int]:
        given = self.model.generation_config.eos_token_id
        ids = given if isinstance(given, list) else [given]
        return {i for i in (*ids, self.tokenizer.eos_token_id) if i is not None}

    def _is_over(self, text: str) -> bool:
        """In plain text the next line would be another question: a line with a letter or digit in
        it is the whole answer."""
        line, newline, _ = text.lstrip().partition("\n")
        return self.is_plain and bool(newline) and any(map(str.isalnum, line))

    def _decided(self, text: str) -> Score | None:
        planted = self.planted
        return decided(text, planted.value, planted.distractors, planted.spot.kind.form)


@dataclass(frozen=True)
class Asked:
    """What one arm gave: the answer, its score, the true answer's likelihood."""

    generated: Generated
    score: Score
    true: TrueAnswer


def ask(asker: Asker, generated: Generated, again: AbstractContextManager[Any]) -> Asked:
    """Judge a generated answer. again: puts the same attention in place once more, entered only
    where the true answer's likelihood is not already known from the generation."""
    logits = asker.true_logits(generated)
    if logits is None:
        with again:
            logits = asker.feed_true()
    return Asked(generated, asker.score(generated), asker.judge_true(logits))
