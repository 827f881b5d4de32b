"""task=needle: plant, prefill once, ask under every policy and budget -> a cell for each."""

from __future__ import annotations

import itertools
import os
from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from sparse_eval.cli.config import Settings, token_budgets
from sparse_eval.cli.progress import Tick
from sparse_eval.core import Row
from sparse_eval.models import check_shapes
from sparse_eval.needle.cell import Measurement
from sparse_eval.needle.config import SPARE_TOKENS, NeedleConfig, needle_config
from sparse_eval.needle.gate import Gate, can_pass, judge, not_run_line
from sparse_eval.needle.haystack import CHARS_PER_TOKEN, Haystack, haystack_text
from sparse_eval.needle.kinds import KINDS
from sparse_eval.needle.plant import plant
from sparse_eval.needle.sentences import Spot
from sparse_eval.needle.template import Template, make_template
from sparse_eval.prompts import LOCAL_TEXTS
from sparse_eval.storage.cells import CellStore
from sparse_eval.tasks.live_task import Arm, LiveTask, Work, arms_of
from sparse_eval.tasks.shared import shared

TYPICAL_TOKENS = {"digits": 6, "word": 2, "uuid": 36}
"""Of a value, to predict an answer's cost before anything is tokenised."""


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
        with shared():
            return make_template(self.tokenizer, self.config.chat)

    @cached_property
    def haystack(self) -> Haystack:
        s, config = self.settings, self.config
        num_chars = CHARS_PER_TOKEN * max(config.contexts) * config.n
        with shared():
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
        if not can_pass(self.config.gate):
            self.progress.warn(not_run_line(self.config.gate))
        groups = self.spots()
        with self.progress.bar("needles", self._num_answers(groups), unit="answers") as tick:
            for spots in groups:
                gate = yield from self._gate(spots[0], store, tick)
                for spot in spots:
                    arms = arms_of(self.at(spot.context))
                    for rows in self._sample(spot, arms, store):
                        yield [row | {"gated": gate.gated} for row in rows]
                        tick(1)

    @property
    def _num_gate(self) -> int:
        """Samples of the dense gate at each context, kind and depth."""
        gate = self.config.gate
        return gate.n if can_pass(gate) else 0

    def _num_answers(self, groups: list[list[Spot]]) -> int:
        return sum(
            len(spots) * len(arms_of(self.at(spots[0].context))) + self._num_gate
            for spots in groups
        )

    def check_inputs(self) -> None:
        """Also a chat format that is not there, and contexts that its sentences do not fit in."""
        check_shapes(self.settings.model)
        is_here = self.settings.prompts["source"] in LOCAL_TEXTS
        if is_here:
            self.haystack  # noqa: B018
        if self.here is None:
            return
        self.template  # noqa: B018
        spots = [group[0] for group in self.spots()] if is_here else []
        for spot in {spot.context: spot for spot in spots}.values():
            self._measurement(spot)

    def work(self, store: CellStore) -> Work:
        prefills, steps, fewest, cells, known = list[int](), 0, 0, 0, 0
        for spots in self.spots():
            arms = arms_of(self.at(spots[0].context))
            gate = [replace(spots[0], sample=i, role="gate") for i in range(self._num_gate)]
            for spot in [*gate, *spots]:
                asked = arms[:1] if spot.role == "gate" else arms
                missing = len(asked) - self._num_known(spot, asked, store)
                cells, known = cells + len(asked), known + len(asked) - missing
                prefills += [spot.context] if missing else []
                most = self._steps_of(spot)
                steps += missing * most
                fewest += missing * min(most, TYPICAL_TOKENS[spot.kind.form.name])
        return Work(prefills, steps, fewest, cells, known)

    def _num_known(self, spot: Spot, arms: list[Arm], store: CellStore) -> int:
        if self.here is None or not os.path.isdir(store.folder):
            return 0
        measurement = self._measurement(spot)
        return sum(store.has(measurement.key(arm)) for arm in arms)

    def _steps_of(self, spot: Spot) -> int:
        return self.config.max_new_tokens or TYPICAL_TOKENS[spot.kind.form.name] + SPARE_TOKENS

    def _measurement(self, spot: Spot) -> Measurement:
        num = self.config.distractors if spot.kind.has_distractors else 0
        with shared():
            planted = plant(spot, self.haystack, self.tokenizer, self.template, num_distractors=num)
        source = self.haystack.source
        return Measurement(self, self.config, self.template.is_plain, planted, source)

    def _gate(self, spot: Spot, store: CellStore, tick: Tick) -> Generator[list[Row], None, Gate]:
        """Dense on the gate's own samples; their rows are kept apart by role."""
        config = self.config.gate
        dense = arms_of(self.at(spot.context))[:1]
        correct: list[bool] = []
        for sample in range(self._num_gate):
            for rows in self._sample(replace(spot, sample=sample, role="gate"), dense, store):
                correct += [row["outcome"] == "correct" for row in rows if is_answer(row)]
                yield [row | {"gated": True} for row in rows]
                tick(1)
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
        measurement = self._measurement(spot)
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


def is_answer(row: Row) -> bool:
    """A row of a whole answer, not of one layer or of recall."""
    return row["task"] == "needle" and "outcome" in row
