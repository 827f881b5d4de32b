"""A few documents of one task, prefilled once and answered under every policy and budget."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from sparse_eval.core import Row
from sparse_eval.lm.config import LmConfig
from sparse_eval.lm.decode import answer_text, generate, judge
from sparse_eval.lm.requests import Ask, Sample
from sparse_eval.lm.stack import Decoder, Stack, stack
from sparse_eval.lm.texts import TextSide
from sparse_eval.needle.cell import mean
from sparse_eval.prefill import Prefilled
from sparse_eval.prompts import hash_of
from sparse_eval.storage.cells import cell_key
from sparse_eval.tasks.live_task import Arm, LiveTask, read_columns

Place = tuple[int, int]
"""A request: which of the batch's documents, which of its requests."""
READ = ("tokens_read", "density", "model_read_fraction")


@dataclass(frozen=True)
class Group:
    """Requests decoded together: their rows are equally long where they must be."""

    places: tuple[Place, ...]
    asks: tuple[Ask, ...]


@dataclass
class Batch:
    """Documents measured together. lm_task: the task's name. chat: the chat format's name.
    with_stock: dense's rows also hold what the model's own attention answers."""

    task: LiveTask
    config: LmConfig
    side: TextSide
    lm_task: str
    samples: Sequence[Sample]
    chat: str
    with_stock: bool = False

    @cached_property
    def prefill_keys(self) -> dict[tuple[int, ...], str]:
        """By the tokens that are prefilled, and what their cache depends on."""
        cached = {ask.ids[: ask.num_cached] for s in self.samples for ask in s.asks}
        return {
            ids: self.task.prefill_key(hash_of(torch.tensor(ids)), len(ids))
            for ids in sorted(cached)
        }

    @cached_property
    def prefill_key(self) -> str:
        return cell_key({"prefills": list(self.prefill_keys.values())})

    @property
    def most_steps(self) -> int:
        """Decode steps under one arm, at most."""
        return self._choice_steps + self._longest_answer

    @property
    def fewest_steps(self) -> int:
        """Decode steps under one arm where every answer stops at its first token."""
        return self._choice_steps + min(1, self._longest_answer)

    @property
    def _choice_steps(self) -> int:
        return sum(len(ask.continuation or ()) for sample in self.samples for ask in sample.asks)

    @property
    def _longest_answer(self) -> int:
        asks = [ask for sample in self.samples for ask in sample.asks]
        return max((ask.max_new_tokens for ask in asks), default=0)

    def key(self, arm: Arm) -> str:
        """Of the whole batch's answers under an arm: rows that decode together may round alike."""
        parts = {
            "task": "lm_eval",
            "samples": [sample.hash for sample in self.samples],
            "batch_size": self.config.batch_size,
            "stock": self.with_stock and arm.policy.dense,
        }
        return self.task.key(self.prefill_key, arm, parts)

    @cached_property
    def end_ids(self) -> frozenset[int]:
        """Every EOS of the model's generation config, and the tokenizer's."""
        given = self.task.loaded.model.generation_config.eos_token_id
        ids = given if isinstance(given, list) else [given]
        return frozenset(i for i in (*ids, self.side.tokenizer.eos_token_id) if i is not None)

    @cached_property
    def groups(self) -> list[Group]:
        """Every request, in groups of at most batch_size rows."""
        together: dict[Any, list[Place]] = defaultdict(list)
        for i, sample in enumerate(self.samples):
            for j, ask in enumerate(sample.asks):
                together[self._shape(ask)].append((i, j))
        return [
            Group(tuple(part), tuple(self.samples[i].asks[j] for i, j in part))
            for places in together.values()
            for part in chunks(places, self.config.batch_size)
        ]

    def _shape(self, ask: Ask) -> Any:
        """What rows of one group must share, so that no row's result depends on a neighbour."""
        num_queries = self.task.settings.task["prompt_queries"] - 1
        config = self.task.loaded.model.config.get_text_config()
        slides = getattr(config, "sliding_window", None) is not None
        return (
            ask.ids if ask.is_choice else None,  # continuations of one prompt
            ask.tail,
            min(ask.num_cached, num_queries),
            ask.num_cached if slides else None,
        )

    @cached_property
    def prefills(self) -> dict[tuple[int, ...], Prefilled | None]:
        """Each distinct prompt's dense cache, made once for all arms; None: nothing to prefill."""
        return {ids: self._prefill(ids, key) for ids, key in self.prefill_keys.items()}

    def _prefill(self, ids: tuple[int, ...], key: str) -> Prefilled | None:
        if not ids:
            return None
        padded = torch.tensor([*ids, 0])  # the last id is not prefilled
        return self.task.prefill(padded, self.lm_task, key, is_one_of_many=True)

    @cached_property
    def stacks(self) -> list[Stack]:
        """One for each group; the prefills themselves are let go of."""
        model = self.task.loaded.model
        made = [
            stack([self.prefills[ask.ids[: ask.num_cached]] for ask in group.asks], model)
            for group in self.groups
        ]
        del self.prefills
        return made

    def cell(self, arm: Arm) -> list[Row]:
        """A row for each document: what was answered, what was read."""
        stacks = self.stacks  # prefilled before the clock starts
        started = time.perf_counter()
        answers: dict[Place, Any] = {}
        read: dict[Place, Row] = {}
        for group, whole in zip(self.groups, stacks, strict=True):
            tail = group.asks[0].tail if self.config.is_question else None
            with self.task.under(arm, whole, question_tokens=tail) as trace:
                found = self._answer(group, whole)
            columns = read_columns(trace)
            for place, answer in zip(group.places, found, strict=True):
                answers[place], read[place] = answer, columns
        seconds = (time.perf_counter() - started) / len(self.samples)
        rows = [
            self._row(arm, i, answers, read) | self.task.cost(seconds)
            for i in range(len(self.samples))
        ]
        if self.with_stock and arm.policy.dense:
            stock = self._stock()
            rows = [row | {"stock": stock[i]} for i, row in enumerate(rows)]
        return rows

    def _stock(self) -> list[list[Any]]:
        """Each document's answers from the model's own attention on the same caches."""
        answers: dict[Place, Any] = {}
        for group, rows in zip(self.groups, self.stacks, strict=True):
            found = self._answer(group, rows)
            answers |= dict(zip(group.places, found, strict=True))
        return [self._of_sample(i, answers) for i in range(len(self.samples))]

    def _answer(self, group: Group, rows: Stack) -> list[Any]:
        """As JSON keeps them: {"text", "ids", "is_over"} or [log-likelihood, is greedy]."""
        room = max(ask.most_fed for ask in group.asks)
        decoder = Decoder.of(self.task.loaded.model, rows, room)
        if group.asks[0].is_choice:
            return [[x.log_likelihood, x.is_greedy] for x in judge(decoder, group.asks)]
        written = generate(decoder, group.asks, self.side, self.end_ids)
        return [
            {"text": answer_text(row, ask, self.side), "ids": row.ids, "is_over": row.is_over}
            for row, ask in zip(written, group.asks, strict=True)
        ]

    def _of_sample(self, i: int, answers: dict[Place, Any]) -> list[Any]:
        return [answers[i, j] for j in range(len(self.samples[i].asks))]

    def _row(self, arm: Arm, i: int, answers: dict[Place, Any], read: dict[Place, Row]) -> Row:
        sample = self.samples[i]
        own = [columns for place, columns in read.items() if place[0] == i]
        return {
            **self.task.common(
                arm,
                context=self.task.settings.context,
                prompt_hash=sample.hash,
                prefill_key=self.prefill_key,
            ),
            "prompts": "lm_eval",
            "lm_task": self.lm_task,
            "sample": str(sample.doc_id),
            "chat": self.chat,
            "prompt_tokens": sample.prompt_tokens,
            "truncated": float(sample.is_truncated),
            "loglikelihood_mode": "token by token" if sample.asks[0].is_choice else None,
            "answers": self._of_sample(i, answers),
            **{name: mean([columns[name] for columns in own]) for name in READ},
            "kv_form": own[0]["kv_form"],
        }


def chunks(places: Sequence[Place], size: int) -> Iterator[Sequence[Place]]:
    for start in range(0, len(places), size):
        yield places[start : start + size]
