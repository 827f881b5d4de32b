"""task=lm_eval: lm-eval's tasks, each prompt prefilled once and answered under every arm.

Documents are measured a few at a time, under all policies and budgets before the next few; a task's
answers go back to lm-eval, arm by arm, for its own metrics.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from sparse_eval.cli.progress import Tick
from sparse_eval.core import Row
from sparse_eval.lm.config import LmConfig, lm_config
from sparse_eval.lm.part import Part
from sparse_eval.models import check_shapes, model_info
from sparse_eval.storage.cells import CellStore
from sparse_eval.tasks.live_task import Arm, LiveTask, Work, arms_of
from sparse_eval.tasks.shared import shared

if TYPE_CHECKING:
    from sparse_eval.lm.cell import Batch
    from sparse_eval.lm.requests import Sample
    from sparse_eval.lm.results import Answered
    from sparse_eval.lm.suite import Suite
    from sparse_eval.lm.texts import TextSide

BUNDLED = "se_"
"""What the names of the tasks that are made by seed begin with."""

MOST_NAMED = 8
"""Tasks that a line of progress names."""


@dataclass
class LmEval(LiveTask):
    """One run of lm-eval tasks."""

    @cached_property
    def config(self) -> LmConfig:
        from sparse_eval.lm.globs import expanded

        s = self.settings
        return expanded(lm_config(s.task, s.protocol, s.seed))

    @cached_property
    def side(self) -> TextSide:
        from sparse_eval.lm.texts import TextSide

        return TextSide(self.tokenizer, self.config.is_question, self.config.question_tokens)

    @cached_property
    def chat(self) -> str:
        return self.side.chat_name(self.config.chat)

    @cached_property
    def max_length(self) -> int:
        """Tokens of prompt and answer: the model's context, or less if asked."""
        most = model_info(self.settings.model).max_context or self.loaded.info.max_context
        return min(most or 2**31, self.config.max_length or most or 2**31)

    @cached_property
    def suite(self) -> Suite:
        return self._load(self.config.tasks, {})

    def _load(self, tasks: Sequence[str], metadata: Mapping[str, Any]) -> Suite:
        from sparse_eval.lm.suite import load_suite

        with tempfile.TemporaryDirectory(prefix="sparse_eval_") as folder:
            self.tokenizer.save_pretrained(folder)  # tasks of a given length name a tokenizer
            c = self.config
            given = {"tokenizer": folder} | c.all_metadata | dict(metadata)
            return load_suite(tasks, c.include_path, given, c.seed, c.num_fewshot)

    @cached_property
    def parts(self) -> list[Part]:
        """Every task with its prompts. Needs the tokenizer, not the weights."""
        tasks = self.config.tasks
        named = ", ".join(tasks) if len(tasks) <= MOST_NAMED else f"{len(tasks)} tasks"
        what = f"building the prompts of {named}"
        with shared(), self.progress.stage(what):
            return list(self._parts())

    def _parts(self) -> Iterator[Part]:
        from sparse_eval.lm.gate import chance_of, is_higher_better, is_possible

        config = self.config
        for name, task in self.suite.tasks.items():
            available = len(task.eval_docs)
            count = config.num_documents(name, available)
            own = range(count, count + config.gate.n)
            has_own = own.stop <= available
            samples = self._samples(name, task, range(count))
            chance = chance_of(task, samples)
            better = is_higher_better(task)
            possible = is_possible(name, chance, config.gate, higher_is_better=better)
            on = ("own" if has_own else "measured") if possible else "none"
            gate = self._samples(name, task, own) if on == "own" else []
            yield Part(name, task, samples, gate, on, chance)

    def _samples(self, name: str, task: Any, doc_ids: Sequence[int]) -> list[Sample]:
        from sparse_eval.lm.requests import samples_of

        return samples_of(name, task, doc_ids, self.config, self.side, self.max_length)

    def check_inputs(self) -> None:
        """A chat format that is not there, and a context that the bundled tasks do not fit in."""
        check_shapes(self.settings.model)
        if self.here is None:
            return
        with shared():
            self.chat  # noqa: B018
            bundled = [name for name in self.config.tasks if name.startswith(BUNDLED)]
            if bundled:
                self._load(bundled, {"num_samples": 1})

    def work(self, store: CellStore) -> Work:
        arms = arms_of(self.settings)
        if self.here is None:
            return self._most_work(len(arms))
        prefills, steps, fewest, cells, known = list[int](), 0, 0, 0, 0
        for part in self._parts():
            for samples, asked in ((part.samples, arms), (part.gate, arms[:1])):
                for batch in self._batches(part, samples):
                    missing = [arm for arm in asked if not store.has(batch.key(arm))]
                    cells += len(asked) * len(batch.samples)
                    known += (len(asked) - len(missing)) * len(batch.samples)
                    prefills += list(map(len, batch.prefill_keys)) if missing else []
                    steps += len(missing) * batch.most_steps
                    fewest += len(missing) * batch.fewest_steps
        return Work(prefills, steps, fewest, cells, known)

    def _most_work(self, num_arms: int) -> Work:
        """Where the prompts cannot be made yet: every task named, its limit, the run's context."""
        limit = self.config.limit
        each = int(limit) if isinstance(limit, int | float) and limit >= 1 else 0
        count = each * len(self.config.tasks)
        gate = self.config.gate.n * len(self.config.tasks)
        answers = count * num_arms + gate
        steps = answers * (self.config.max_new_tokens or 128)
        prefills = [self.settings.context] * (count + gate)
        return Work(prefills, steps, answers, answers, 0)

    def run(self, store: CellStore) -> Iterator[list[Row]]:
        """Rows of a task's documents as each task is finished, rows of the tasks at the end."""
        from sparse_eval.lm.results import Answered, rows_of_samples, rows_of_tasks

        arms, done = arms_of(self.settings), list[Answered]()
        total = sum(part.num_cells(len(arms)) for part in self.parts)
        with self.progress.bar("answering", total, unit="answers") as tick:
            for part in self.parts:
                self._warn_of(part)
                gate = self._answers(part, part.gate, arms[:1], store, tick)
                rows = self._answers(part, part.samples, arms, store, tick)
                with shared():  # lm-eval's own metrics, whatever the policy
                    answered = Answered.of(part, arms, rows, gate, self.config, self.side)
                if answered.gate.gated:
                    self.progress.warn(f"{part.name} is not ranked: {answered.gate.line}")
                done.append(answered)
                yield from rows_of_samples(answered)
        for line in suspicions(done, self.settings.context):
            self.progress.warn(line)
        yield from rows_of_tasks(done, self.suite.groups)

    def _answers(
        self,
        part: Part,
        samples: Sequence[Sample],
        arms: Sequence[Arm],
        store: CellStore,
        tick: Tick,
    ) -> list[list[Row]]:
        """For each arm the rows of all samples; a few samples under all arms before the next."""
        found: list[list[Row]] = [[] for _ in arms]
        for batch in self._batches(part, samples):
            for rows, arm in zip(found, arms, strict=True):
                rows += self._cell(batch, arm, store)
                tick(len(batch.samples))
        return found

    def _batches(self, part: Part, samples: Sequence[Sample]) -> Iterator[Batch]:
        from sparse_eval.lm.cell import Batch
        from sparse_eval.lm.requests import batches

        for together in batches(samples, self.config.batch_size):
            is_first = together[0] is part.samples[0]
            yield Batch(self, self.config, self.side, part.name, together, self.chat, is_first)

    def _cell(self, batch: Batch, arm: Arm, store: CellStore) -> list[Row]:
        key = batch.key(arm)
        rows = store.get(key)
        if rows is None:
            rows = [row | {"cell_key": key} for row in batch.cell(arm)]
            store.put(key, rows)
        # labels are this run's: tasks and runs that ask the same share their cells
        s = self.settings
        labels: Row = {"context": s.context, "seed": s.seed, "policy": arm.label}
        labels |= {"lm_task": batch.lm_task, "chat": batch.chat}
        return [
            row | labels | {"sample": str(sample.doc_id)}
            for row, sample in zip(rows, batch.samples, strict=True)
        ]

    def _warn_of(self, part: Part) -> None:
        kwargs = part.task.get_config("generation_kwargs") or {}
        if part.task.OUTPUT_TYPE == "generate_until" and kwargs.get("do_sample"):
            self.progress.warn(f"{part.name} asks for sampling: it is decoded greedily here")
        if self.config.num_fewshot and part.task.get_config("num_fewshot") == 0:
            self.progress.warn(f"{part.name} is asked without examples: its own num_fewshot is 0")
        count = sum(sample.is_truncated for sample in part.samples)
        if count:
            self.progress.warn(
                f"{part.name}: {count} of {len(part.samples)} prompts do not fit into "
                f"{self.max_length:,} tokens with their answer and are cut from the left"
            )


def suspicions(done: Sequence[Answered], context: int) -> Iterator[str]:
    """Arms that look as if their policy had done nothing."""
    for i, arm in enumerate(done[0].arms if done else []):
        same = [of for answered in done for of in answered.identical[i]]
        if arm.budget is not None and arm.budget <= context / 4 and len(same) >= 5 and all(same):
            yield (
                f"{arm.label} at {arm.budget} tokens: all {len(same)} answers are dense's own; at "
                "a budget this small that is suspicious"
            )
