"""task=needle: plant, prefill once, ask under every policy and budget -> a cell for each."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from sparse_eval.config import Settings, token_budgets
from sparse_eval.core import Row
from sparse_eval.needle.answer import Asked, Asker, ask
from sparse_eval.needle.config import SPARE_TOKENS, NeedleConfig, needle_config
from sparse_eval.needle.gate import can_pass, judge
from sparse_eval.needle.haystack import CHARS_PER_TOKEN, Haystack, haystack_text
from sparse_eval.needle.hits import HitRecorder, LayerHits
from sparse_eval.needle.kinds import KINDS
from sparse_eval.needle.plant import Planted, plant
from sparse_eval.needle.sentences import Spot
from sparse_eval.needle.template import Template, make_template
from sparse_eval.prefill import Prefilled
from sparse_eval.results import CellStore
from sparse_eval.tasks.live_task import NAN, Arm, LiveTask, arms_of, read_columns


@dataclass
class Needle(LiveTask):
    """One run of the planted-needle task."""

    @cached_property
    def config(self) -> NeedleConfig:
        s = self.settings
        return needle_config(
            s.task, context=s.context, n=s.prompts["n"], protocol=s.protocol["name"]
        )

    @cached_property
    def template(self) -> Template:
        return make_template(self.tokenizer, self.config.chat)

    @cached_property
    def haystack(self) -> Haystack:
        s, config = self.settings, self.config
        num_chars = CHARS_PER_TOKEN * max(config.contexts) * config.n
        text = haystack_text(s.prompts, s.model_cache, num_chars)
        return Haystack(text.text, text.source, max(config.n, config.gate.n))

    def at(self, context: int) -> Settings:
        """The settings at one prompt length: fractions of it become tokens."""
        s = self.settings
        budgets = token_budgets(s.budgets_asked, context, s.policies)
        return replace(s, context=context, budgets=budgets)

    def spots(self) -> list[list[Spot]]:
        """The measured spots, by (context, kind, depth)."""
        config, seed = self.config, self.settings.seed
        cells = itertools.product(config.contexts, config.kinds, config.depths)
        return [
            [Spot(KINDS[kind], context, depth, i, seed) for i in range(config.n)]
            for context, kind, depth in cells
        ]

    def run(self, store: CellStore) -> Iterator[list[Row]]:
        """Rows of one cell at a time; cells measured before come from the store."""
        config = self.config
        if not can_pass(config.gate):
            self.progress.warn(
                f"{config.gate.n} gate samples cannot show dense accuracy of "
                f"{config.gate.dense_min:g} even if all are right: the gate is not run and nothing "
                "is ranked"
            )
        groups = self.spots()
        with self.progress.bar("needles", sum(map(len, groups)), unit="prompts") as tick:
            for spots in groups:
                gate = yield from self._gate(spots[0], store)
                for spot in spots:
                    arms = arms_of(self.at(spot.context))
                    for rows in self._sample(spot, arms, store):
                        yield [row | {"gated": gate.gated} for row in rows]
                    tick(1)

    def _gate(self, spot: Spot, store: CellStore) -> Iterator[list[Row]]:
        """Dense on the gate's own samples; their rows are kept apart by role."""
        config = self.config.gate
        dense = arms_of(self.at(spot.context))[:1]
        correct: list[bool] = []
        for sample in range(config.n if can_pass(config) else 0):
            for rows in self._sample(replace(spot, sample=sample, role="gate"), dense, store):
                correct += [row["outcome"] == "correct" for row in rows if is_answer(row)]
                yield [row | {"gated": True} for row in rows]
        gate = judge(correct, config)
        if gate.passed is False:
            self.progress.warn(
                f"{spot.kind.name}, {spot.context:,} tokens, depth {spot.depth:g}: dense answers "
                f"{gate.correct} of {gate.n} gate samples (lower bound {gate.lower:.2f} < "
                f"{config.dense_min:g}): nothing is ranked there"
            )
        return gate

    def _sample(self, spot: Spot, arms: list[Arm], store: CellStore) -> Iterator[list[Row]]:
        """One planted prompt under every arm; prefilled only if some cell is missing."""
        distractors = self.config.distractors if spot.kind.has_distractors else 0
        planted = plant(
            spot, self.haystack, self.tokenizer, self.template, num_distractors=distractors
        )
        measurement = Measurement(self, planted)
        keys = [measurement.key(arm) for arm in arms]
        known = [store.get(key) for key in keys]
        dense_output = None
        for arm, key, rows in zip(arms, keys, known, strict=True):
            if rows is None:
                rows = [row | {"cell_key": key} for row in measurement.cell(arm)]
                store.put(key, rows)
            # dense is the first arm; the label is this run's, whoever measured the cell
            dense_output = dense_output or rows[0]["output"]
            extra = {"policy": arm.label, "dense_output": dense_output}
            yield [row | extra if is_answer(row) else row | {"policy": arm.label} for row in rows]


@dataclass
class Measurement:
    """One planted prompt: its dense cache, made when first needed, and the cells on it."""

    task: Needle
    planted: Planted

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
        return self.task.prefill(ids, self.planted.spot.name)

    @property
    def max_new_tokens(self) -> int:
        return self.task.config.max_new_tokens or len(self.planted.answer_ids) + SPARE_TOKENS

    def key(self, arm: Arm) -> str:
        planted, config = self.planted, self.task.config
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
            self.task.template.is_plain,
        )

    def cell(self, arm: Arm) -> list[Row]:
        """One row of the answer, one per layer with what its heads read of the value."""
        asker = self.asker  # prefilled before the clock starts
        started = time.perf_counter()
        asked_tokens = len(asker.tail) if self.is_question else None
        recorder = HitRecorder(arm.policy, self.planted.value_span)
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
        if self.task.config.measure_recall:
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
    def _evaluator(self) -> Any:
        from sparse_eval.evaluator import Evaluator
        from sparse_eval.record import record

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


def is_answer(row: Row) -> bool:
    """A row of a whole answer, not of one layer or of recall."""
    return row["task"] == "needle" and "outcome" in row


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
