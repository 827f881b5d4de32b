"""One cell: a planted prompt asked under one policy at one budget -> its rows."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import cached_property

from sparse_eval.core import Row
from sparse_eval.evaluator import Evaluator
from sparse_eval.needle.answer import Asked, Asker, ask
from sparse_eval.needle.config import SPARE_TOKENS, NeedleConfig
from sparse_eval.needle.hits import HitRecorder, LayerHits
from sparse_eval.needle.plant import Planted
from sparse_eval.policies.base import Policy
from sparse_eval.prefill import Prefilled
from sparse_eval.record import record
from sparse_eval.tasks.live_task import NAN, Arm, LiveTask, read_columns


@dataclass
class Measurement:
    """One planted prompt: its dense cache, made when first needed, and the cells on it. source:
    where its text is from."""

    task: LiveTask
    config: NeedleConfig
    is_plain: bool
    planted: Planted
    source: str

    @property
    def is_question(self) -> bool:
        return self.task.settings.protocol["name"] == "question"

    @property
    def num_cached(self) -> int:
        """Prompt tokens whose K and V the dense prefill leaves behind."""
        return self.planted.question_start if self.is_question else len(self.planted.ids) - 1

    @cached_property
    def prefill_key(self) -> str:
        return self.task.prefill_key(self.planted.hash, self.num_cached)

    @cached_property
    def filled(self) -> Prefilled:
        ids = self.planted.ids[: self.num_cached + 1]
        return self.task.prefill(ids, self.planted.spot.name, self.prefill_key)

    @property
    def max_new_tokens(self) -> int:
        return self.config.max_new_tokens or len(self.planted.answer_ids) + SPARE_TOKENS

    def key(self, arm: Arm) -> str:
        planted, config = self.planted, self.config
        parts = {
            "task": "needle",
            "sample": planted.spot.name,
            "value": planted.value,
            "distractors": list(planted.distractors),
            "max_new_tokens": self.max_new_tokens,
            "measure_recall": config.measure_recall,
        }
        return self.task.key(self.prefill_key, arm, parts)

    @cached_property
    def asker(self) -> Asker:
        return Asker(
            self.task.loaded.model,
            self.task.tokenizer,
            self.planted,
            self.filled,
            self.max_new_tokens,
            self.is_plain,
        )

    def cell(self, arm: Arm) -> list[Row]:
        """One row of the answer, one per layer with what its heads read of the value."""
        asker = self.asker  # prefilled before the clock starts
        started = time.perf_counter()
        asked_tokens = len(asker.tail) if self.is_question else None
        recorder = HitRecorder(certain(arm), self.planted.value_span)
        under = self.task.under(arm, self.filled, question_tokens=asked_tokens, on_select=recorder)
        again = self.task.under(arm, self.filled, question_tokens=asked_tokens)
        with under as trace:
            generated = asker.generate()
        asked = ask(asker, generated, again)
        first = (asked_tokens or 1) - 1
        steps = asker.answer_steps(generated, asked.score)
        hits = recorder.hits(first, first + steps)
        columns = self._answer_columns(arm, asked) | read_columns(trace)
        if arm.policy.dense:
            columns |= self._noise_floor(asked)
        cost = self.task.cost(time.perf_counter() - started)
        common = self._common(arm) | cost
        rows = [common | columns | summary_of_hits(hits) | {"answer_steps": steps}]
        rows += [
            common | {"layer": layer} | columns_of_layer(found) for layer, found in hits.items()
        ]
        if self.config.measure_recall:
            rows += self._recall(arm)
        return rows

    def _common(self, arm: Arm) -> Row:
        planted = self.planted
        common = self.task.common(
            arm,
            context=planted.spot.context,
            prompt_hash=planted.hash,
            prefill_key=self.prefill_key,
        )
        return common | {
            "prompts": self.source,
            "sample": planted.spot.name,
            "role": planted.spot.role,
            "needle_kind": planted.spot.kind.name,
            "depth": planted.spot.depth,
            "depth_realised": planted.depth_realised,
            "wording": planted.wording,
            "chat": planted.chat,
        }

    def _answer_columns(self, arm: Arm, asked: Asked) -> Row:
        planted = self.planted
        return {
            "outcome": asked.score.outcome,
            "answer_nll": asked.true.nll,
            "first_token_rank": asked.true.first_token_rank,
            "expected": planted.value,
            "output": asked.generated.text,
            "output_ids": list(asked.generated.ids),
            "needle": planted.needle,
            "value_span": list(planted.value_span),
        }

    def _noise_floor(self, asked: Asked) -> Row:
        """How far stock SDPA is from the same dense attention through the shared kernel."""
        stock = self.asker.judge_true(self.asker.feed_true())
        same = [a == b for a, b in zip(stock.choices, asked.true.choices, strict=True)]
        return {
            "stock_nll": stock.nll,
            "stock_agreement": sum(same) / len(same),
        }

    @cached_property
    def _evaluator(self) -> Evaluator:
        planted, task = self.planted, self.task
        meta = {"capture_hash": self.prefill_key}
        captured = record(
            task.loaded.model,
            self.filled,
            meta=meta,
            num_steps=len(planted.answer_ids),
            continuation=self.asker.true_ids,
        )
        return Evaluator(captured, task.settings.backend, task.settings.dense_layers)

    def _recall(self, arm: Arm) -> list[Row]:
        """Recall rows of the steps that the true answer's tokens come from."""
        budget = self.planted.spot.context if arm.budget is None else arm.budget
        common = self._common(arm) | {"task": "recall"}
        return [common | row for row in self._evaluator.cell(arm.policy, budget)]


def columns_of_layer(hits: LayerHits) -> Row:
    return {
        "page_hit": mean(hits.hit_G),
        "page_hit_chance": mean(hits.chance_G),
        "page_hit_heads": hits.hit_G,
        "page_hit_any": hits.any_hit,
        "page_hit_any_chance": hits.any_chance,
    }


def summary_of_hits(hits: dict[int, LayerHits]) -> Row:
    """Means over the policy's layers; how many KV heads read the value in over half the steps."""
    heads = [hit for found in hits.values() for hit in found.hit_G]
    return {
        "page_hit": mean(heads),
        "page_hit_chance": mean([c for found in hits.values() for c in found.chance_G]),
        "page_hit_any": mean([found.any_hit for found in hits.values()]),
        "page_hit_any_chance": mean([found.any_chance for found in hits.values()]),
        "heads_above_half": sum(hit > 0.5 for hit in heads),
        "heads": len(heads),
    }


def mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else NAN


def certain(arm: Arm) -> Policy:
    """The arm's policy with as many local pages as it always reads at its budget: what chance
    counts as read for certain."""
    policy: Policy = arm.policy
    local_pages = policy.local_pages_at(arm.budget)
    is_usual = local_pages == policy.local_pages
    return policy if is_usual else replace(policy, local_pages=local_pages)
