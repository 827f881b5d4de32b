"""What tasks with a policy in the loop share: arms, the model under one, keys, columns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from sparse_eval.cli.config import NamedPolicy, Settings
from sparse_eval.core import Row
from sparse_eval.device import peak_memory_bytes
from sparse_eval.models import model_info
from sparse_eval.policies.full import Full
from sparse_eval.provenance import code_hash, version_of
from sparse_eval.storage.cells import CellStore, cell_key
from sparse_eval.storage.columns import SCHEMA
from sparse_eval.tasks.prompted import NUMERIC_PACKAGES, PromptedTask

if TYPE_CHECKING:
    from torch import Tensor

    from sparse_eval.live import OnSelect
    from sparse_eval.trace import Trace

NAN = float("nan")


@dataclass(frozen=True)
class Arm:
    """A policy at one budget in tokens; None: it has none, or reads everything."""

    label: str
    policy: Any
    budget: int | None


@dataclass(frozen=True)
class Work:
    """What a run would still have to do. prefills: the length of each prompt to prefill, tokens.
    steps: decode steps at most; fewest_steps: where every answer ends as soon as it may. cells: in
    all, and those that are known."""

    prefills: list[int]
    steps: int
    fewest_steps: int
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
class LiveTask(PromptedTask, ABC):
    """A task that answers under each arm."""

    @abstractmethod
    def work(self, store: CellStore) -> Work:
        """Without loading weights: cells count as known only where the tokenizer is here."""

    def facts(self) -> dict[str, Any]:
        """Further keys of summary.json."""
        return {}

    def under(
        self,
        arm: Arm,
        filled: HasPromptQueries,
        *,
        question_tokens: int | None = None,
        on_select: OnSelect | None = None,
    ) -> AbstractContextManager[Trace]:
        """The model with an arm's attention in place of its own."""
        from sparse_eval.live import patched

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
