"""What tasks with a policy in the loop share: the model, dense prefills, arms, keys, columns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from torch import Tensor

from sparse_eval.cli.config import NamedPolicy, Settings
from sparse_eval.cli.progress import Progress
from sparse_eval.core import Row
from sparse_eval.device import peak_memory_bytes
from sparse_eval.live import OnSelect, patched
from sparse_eval.models import LoadedModel, local_tokenizer, model_info
from sparse_eval.policies.full import Full
from sparse_eval.prefill import Prefilled, prefill
from sparse_eval.prefill_store import load_prefill, save_prefill
from sparse_eval.provenance import code_hash, version_of
from sparse_eval.results import SCHEMA, CellStore, cell_key
from sparse_eval.storage.keep import shared_model
from sparse_eval.trace import Trace

NAN = float("nan")
NUMERIC_PACKAGES = ("torch", "triton", "transformers", "numpy", "tokenizers")


@dataclass(frozen=True)
class Arm:
    """A policy at one budget in tokens; None: it has none, or reads everything."""

    label: str
    policy: Any
    budget: int | None


@dataclass(frozen=True)
class Work:
    """What a run would still have to do. prefills: the length of each prompt to prefill, tokens.
    steps: decode steps at most. cells: in all, and those that are known."""

    prefills: list[int]
    steps: int
    cells: int
    cells_known: int


def arms_of(settings: Settings) -> list[Arm]:
    """Dense first, through the same path as the others and once whatever the budgets; it is what
    every other arm is compared with."""
    main = settings.policies[0].policy
    shared = {k: getattr(main, k) for k in ("page_size", "sink_pages", "local_pages")}
    given = [named for named in settings.policies if named.policy.dense]
    dense = given[0] if given else NamedPolicy("full", Full(**shared))
    sparse = [(named, budget) for named, budget in settings.cells() if not named.policy.dense]
    return [
        Arm(dense.label, dense.policy, None),
        *(Arm(named.label, named.policy, budget) for named, budget in sparse),
    ]


class HasPromptQueries(Protocol):
    """A dense prefill, of one prompt or of several."""

    @property
    def prompt_queries(self) -> dict[int, Tensor] | None: ...


@dataclass
class LiveTask(ABC):
    """settings: the run's. The model is loaded only if some cell was never measured."""

    settings: Settings
    progress: Progress

    @cached_property
    def loaded(self) -> LoadedModel:
        s = self.settings
        with self.progress.stage(f"loading {model_info(s.model).title}"):
            return shared_model(s)

    @cached_property
    def here(self) -> Any | None:
        """The tokenizer, if it is here already."""
        return local_tokenizer(self.settings.model, model_cache=self.settings.model_cache)

    @cached_property
    def tokenizer(self) -> Any:
        return self.loaded.tokenizer if self.here is None else self.here

    @abstractmethod
    def work(self, store: CellStore) -> Work:
        """Without loading weights: cells count as known only where the tokenizer is here."""

    def facts(self) -> dict[str, Any]:
        """Further keys of summary.json."""
        return {}

    def prefill(
        self, ids: Tensor, what: str, key: str, *, is_one_of_many: bool = False
    ) -> Prefilled:
        """Of ids[:-1], dense; with cache_prefill=true kept on disk under its content's key."""
        s, model = self.settings, self.loaded.model
        path = s.cache_dir / "prefills" / f"{key}.safetensors"
        if s.cache_prefill and path.is_file():
            try:
                return load_prefill(path, model, ids)
            except ValueError as error:
                self.progress.warn(f"{error}; prefilling again")
        bar = self.progress.bar(f"prefill, {what}", len(ids) - 1, is_one_of_many=is_one_of_many)
        with bar as tick:
            num_queries = s.task["prompt_queries"]
            filled = prefill(model, ids, num_prompt_queries=num_queries, on_tokens=tick)
        if s.cache_prefill:
            try:
                save_prefill(filled, path)
            except OSError as error:
                self.progress.warn(f"prefill not kept on disk ({error}); the run goes on")
        return filled

    def under(
        self,
        arm: Arm,
        filled: HasPromptQueries,
        *,
        question_tokens: int | None = None,
        on_select: OnSelect | None = None,
    ) -> AbstractContextManager[Trace]:
        """The model with an arm's attention in place of its own."""
        return patched(
            self.loaded.model,
            arm.policy,
            budget=arm.budget,
            dense_layers=self.settings.dense_layers,
            protocol="decode" if question_tokens is None else "question",
            question_tokens=question_tokens,
            prompt_queries=filled.prompt_queries,
            backend=self.settings.backend,
            on_select=on_select,
        )

    def prefill_key(self, prompt_hash: str, num_cached: int) -> str:
        """Of everything that the dense cache of a prompt's first tokens depends on."""
        s, info = self.settings, model_info(self.settings.model)
        return cell_key(
            {
                "model": info.name,
                "revision": info.revision,
                "weights": info.weights,
                "identity": s.model.get("sha256") or s.model.get("path"),
                "dtype": s.dtype,
                "device": s.device.split(":")[0],
                "prompt": prompt_hash,
                "cached": num_cached,
                "prompt_queries": s.task["prompt_queries"],
                "versions": {name: version_of(name) for name in NUMERIC_PACKAGES},
                "code": code_hash(),
            }
        )

    def key(self, prefill_key: str, arm: Arm, parts: dict[str, Any]) -> str:
        """Of one cell. parts: what else the task's measurement depends on."""
        s = self.settings
        return cell_key(
            {
                "prefill": prefill_key,
                "policy": f"{type(arm.policy).__module__}.{type(arm.policy).__qualname__}",
                "config": arm.policy.config(),
                "policy_code": code_hash(type(arm.policy)),
                "budget": arm.budget,
                "dense_layers": list(s.dense_layers),
                "backend": s.backend,
                "protocol": s.protocol["name"],
                **parts,
            }
        )

    def common(self, arm: Arm, *, context: int, prompt_hash: str, prefill_key: str) -> Row:
        """The columns that every row has, less the sample, cell_key and seconds."""
        s, info = self.settings, model_info(self.settings.model)
        return {
            "schema": SCHEMA,
            "task": s.task["name"],
            "prompt_hash": prompt_hash,
            "prompts": s.prompts["source"],
            "model": info.label,
            "revision": info.revision,
            "weights": info.weights,
            "policy": arm.label,
            "policy_config": arm.policy.config(),
            "adaptive": arm.policy.adaptive,
            "budget_tokens": NAN if arm.budget is None else arm.budget,
            "page_size": arm.policy.page_size,
            "sink_pages": arm.policy.sink_pages,
            "local_pages": arm.policy.local_pages,
            "context": context,
            "protocol": s.protocol["name"],
            "dense_layers": list(s.dense_layers),
            "backend": s.backend,
            "device": s.device.split(":")[0],
            "dtype": s.dtype,
            "seed": s.seed,
            "capture_hash": prefill_key,
        }

    def cost(self, seconds: float) -> Row:
        return {"seconds": seconds, "peak_memory": peak_memory_bytes(self.settings.device)}


def read_columns(trace: Trace) -> Row:
    """What a patched model read."""
    return {
        "tokens_read": trace.tokens_read,
        "density": trace.density,
        "model_read_fraction": trace.read_fraction,
        "kv_form": trace.kv_form,
    }
