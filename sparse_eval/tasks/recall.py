"""task=recall: prompt -> prefill -> T observed decode steps -> a cell per policy and budget."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from sparse_eval.cache import make_room, making, touch
from sparse_eval.capture import CapturedKV, load_capture
from sparse_eval.cli.config import NamedPolicy
from sparse_eval.core import Row
from sparse_eval.evaluator import Evaluator
from sparse_eval.measuring import common_columns
from sparse_eval.models import model_info
from sparse_eval.prompts import Prompt
from sparse_eval.provenance import code_hash, version_of
from sparse_eval.storage.cells import CellStore, cell_key
from sparse_eval.storage.columns import SCHEMA
from sparse_eval.storage.keep import shared_capture
from sparse_eval.tasks.prompted import NUMERIC_PACKAGES, PromptedTask
from sparse_eval.tasks.shared import shared


@dataclass
class Recall(PromptedTask):
    """One run's recall measurement. The model is loaded only if something must be captured."""

    def capture_parts(self, prompt: Prompt) -> dict[str, Any]:
        """Everything a capture's content depends on."""
        s, info = self.settings, model_info(self.settings.model)
        return {
            "model": info.name,
            "revision": info.revision,
            "weights": info.weights,
            "identity": s.model.get("sha256") or s.model.get("path"),
            "dtype": s.dtype,
            "device": s.device.split(":")[0],
            "prompt": prompt.hash,
            "queries": s.queries,
            "task": {key: s.task[key] for key in ("steps", "prompt_queries")},
            "versions": {name: version_of(name) for name in NUMERIC_PACKAGES},
            "code": code_hash(),
        }

    def capture_path(self, prompt: Prompt) -> Path:
        key = cell_key(self.capture_parts(prompt))
        return self.settings.cache_dir / "captures" / f"{key}.safetensors"

    def capture(self, prompt: Prompt) -> CapturedKV:
        """The prompt's capture: this process's, from disk, or made now (by one process of those
        that want it)."""
        key, path = cell_key(self.capture_parts(prompt)), self.capture_path(prompt)

        def make() -> CapturedKV:
            with shared(), making(path, f"capturing prompt {prompt.sample}"):
                return self._from_disk(path) or self._keep(self._record(prompt, key), path)

        return shared_capture(key, self.settings.device, make)

    def _from_disk(self, path: Path) -> CapturedKV | None:
        if not os.path.isfile(path):
            return None
        try:
            captured = load_capture(path, self.settings.device)
        except ValueError as error:
            self.progress.warn(f"{error}; capturing again")
            return None
        touch(path)
        return captured

    def _keep(self, captured: CapturedKV, path: Path) -> CapturedKV:
        try:
            captured.save(path)
            make_room(self.settings.cache_dir, self.settings.cache_gb, keep=path)
        except (OSError, SafetensorError) as error:
            line = f"capture not kept on disk ({error}); the run goes on"
            self.progress.warn(line, once="captures")
        return captured

    def _record(self, prompt: Prompt, key: str) -> CapturedKV:
        from sparse_eval.record import record

        s, info, model = self.settings, self.loaded.info, self.loaded.model
        filled = self.prefill(prompt.ids, f"prompt {prompt.sample}", key)
        meta = {
            "capture_hash": key,
            "model": info.label,
            "revision": info.revision,
            "weights": info.weights,
            "prompt_hash": prompt.hash,
            "prompt_source": prompt.source,
            "sample": prompt.sample,
        }
        with self.progress.bar(f"decode, prompt {prompt.sample}", s.task["steps"]) as tick:
            return record(
                model,
                filled,
                meta=meta,
                num_steps=s.task["steps"],
                continuation=prompt.continuation if s.queries == "text" else None,
                on_step=lambda: tick(1),
            )

    def key(self, prompt: Prompt, named: NamedPolicy, budget: int | None) -> str:
        s = self.settings
        return cell_key(
            {
                "capture": cell_key(self.capture_parts(prompt)),
                "policy": f"{type(named.policy).__module__}.{type(named.policy).__qualname__}",
                "config": named.policy.config(),
                "policy_code": code_hash(type(named.policy)),
                "budget": budget,
                "dense_layers": list(s.dense_layers),
                "backend": s.backend,
                "device": s.device,
            }
        )

    def run(self, store: CellStore) -> Iterator[list[Row]]:
        """Rows of one cell at a time; cells measured before come from the store."""
        s = self.settings
        cells = s.cells()
        total = len(cells) * s.prompts["n"]
        with self.progress.bar("measuring", total, unit="cells") as tick:
            for prompt in self.prompts:
                keys = [self.key(prompt, *cell) for cell in cells]
                known = [store.get(key) for key in keys]
                evaluator = None
                for (named, budget), key, rows in zip(cells, keys, known, strict=True):
                    if rows is None:
                        evaluator = evaluator or self._evaluator(prompt)
                        rows = self._measure(evaluator, prompt, named, budget, key)
                        store.put(key, rows)
                    self.replay_errors[prompt.sample] = rows[0].get("replay_error", float("nan"))
                    # the label and the sample are this run's, whoever measured the cell
                    yield [row | {"policy": named.label, "sample": prompt.sample} for row in rows]
                    tick(1)

    def _evaluator(self, prompt: Prompt) -> Evaluator:
        s = self.settings
        evaluator = Evaluator(self.capture(prompt), s.backend, s.dense_layers)
        repeated = evaluator.capture.meta["repeated_4grams"]
        if repeated > 0.3:
            self.progress.warn(loop_warning(prompt.sample, repeated, s.queries))
        return evaluator

    def facts(self) -> dict[str, Any]:
        """Further keys of summary.json."""
        return {"replay_error": {str(k): error for k, error in self.replay_errors.items()}}

    @cached_property
    def replay_errors(self) -> dict[int, float]:
        return {}

    def _measure(
        self, evaluator: Evaluator, prompt: Prompt, named: NamedPolicy, budget: int | None, key: str
    ) -> list[Row]:
        s = self.settings
        common = common_columns(evaluator, named.policy, budget) | {
            "schema": SCHEMA,
            "policy": named.label,
            "sample": prompt.sample,
            "seed": s.seed,
            "cell_key": key,
            "replay_error": evaluator.replay_error(),
        }
        return [common | row for row in evaluator.cell(named.policy, budget)]


def loop_warning(sample: int, repeated: float, queries: str) -> str:
    """repeated: the share of the continuation's 4-grams that occurred before. queries: whose
    tokens were fed."""
    cure = (
        "its queries are a loop's; queries=text feeds the text's own tokens"
        if queries == "greedy"
        else "the text repeats itself there; prompts from another text would tell more"
    )
    return f"prompt {sample}: {repeated:.0%} of the continuation's 4-grams repeat: {cure}"
