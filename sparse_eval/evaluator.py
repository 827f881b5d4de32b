"""A captured cache + policies + budgets -> rows. No model, no Hydra: the library call underneath."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from sparse_eval import ledger, metrics
from sparse_eval.budgets import Budget, resolve_budget
from sparse_eval.capture import CapturedKV, load_capture
from sparse_eval.core import AttentionCall, Row
from sparse_eval.device import peak_memory_bytes, resolve_backend
from sparse_eval.kernels.sparse_decode import sparse_decode
from sparse_eval.policies.base import (
    Attended,
    Policy,
    Selection,
    State,
    current_page_B,
    forced_BP,
    selection_from_mask,
    visible_BP,
)

METRICS = (
    "mass_recall",
    "mass_recall_p10",
    "mass_forced",
    "recall_contested",
    "output_error",
    "lse_error",
    "page_overlap_oracle",
    "tokens_read",
)


@dataclass(frozen=True)
class Truth:
    """Dense attention of one layer's T decode queries, through the shared kernel, exact keys."""

    out_THE: Tensor
    lse_TH: Tensor
    page_mass_THP: Tensor


@dataclass
class Evaluator:
    """One capture, held on one device; dense results are computed once and shared by every cell."""

    capture: CapturedKV
    backend: str
    dense_layers: tuple[int, ...] = (0, 1)
    truths: dict[tuple[int, int], Truth] = field(default_factory=dict)
    states: dict[tuple[Policy, int], State] = field(default_factory=dict)
    state_seconds: float = 0.0

    @property
    def prompt_length(self) -> int:
        return self.capture.prompt_length

    @property
    def measured_layers(self) -> list[int]:
        return sorted(self.capture.layers)

    def attend(self, call: AttentionCall, selection: Selection | None, **options: Any) -> Any:
        return sparse_decode(
            call.q_BHD,
            call.k_BGND,
            call.v_BGNE,
            None if selection is None else selection.pages_BSK,
            None if selection is None else selection.counts_BS,
            call.starts_B,
            call.lengths_B,
            scale=call.scale,
            backend=self.backend,
            **options,
        )

    def truth(self, layer: int, page_size: int) -> Truth:
        if (layer, page_size) not in self.truths:
            call = self.capture.replay_call(layer)
            out, lse, page_lse = self.attend(call, None, page_size=page_size, page_lse=True)
            mass = (page_lse - lse[..., None]).exp()
            self.truths[layer, page_size] = Truth(out, lse, mass)
        return self.truths[layer, page_size]

    def replay_error(self) -> float:
        """Largest relative error, over layers, of dense attention replayed through the shared
        kernel against the outputs the model itself computed."""
        errors = []
        for layer in self.measured_layers:
            ours = self.truth(layer, 16).out_THE.double()
            model = self.capture.layers[layer].outputs_THE.double()
            errors.append((ours - model).norm() / model.norm())
        return float(torch.stack(errors).max())

    def state(self, policy: Policy, layer: int) -> State:
        """The policy's state after the last decode step, built as decoding builds it: from the
        prompt, then extended token by token. Full pages' metadata is final, so every query can
        read it; select masks what lies beyond each query."""
        if (policy, layer) not in self.states:
            started = time.perf_counter()
            state = self.prompt_state(policy, layer)
            for step in range(1, self.capture.num_queries):
                policy.extend(state, self.capture.step_call(layer, step))
            self.states[policy, layer] = state
            self.state_seconds += time.perf_counter() - started
        return self.states[policy, layer]

    def prompt_state(self, policy: Policy, layer: int) -> State:
        queries = self.capture.layers[layer].prompt_queries_WHD[None]
        return policy.init(self.capture.step_call(layer, 0), queries)

    def forget_states(self, policy: Policy) -> None:
        for key in [key for key in self.states if key[0] == policy]:
            del self.states[key]

    def cell(self, policy: Policy, budget: int | None) -> list[Row]:
        """Rows of one policy at one budget in tokens: one per layer and KV head."""
        started = time.perf_counter()
        measured = [self._layer(policy, budget, layer) for layer in self.measured_layers]
        values = torch.stack([m.values for m in measured]).cpu()  # [layers, metrics, G]
        rows = [
            row
            for layer, m, x in zip(self.measured_layers, measured, values, strict=True)
            for row in self._rows(policy, layer, m, x)
        ]
        seconds = time.perf_counter() - started
        for row in rows:
            row["seconds"] = seconds
            row["peak_memory"] = peak_memory_bytes(device=self.capture.lengths_T.device)
        check_recall(rows)
        return rows

    def _layer(self, policy: Policy, budget: int | None, layer: int) -> LayerValues:
        call = self.capture.replay_call(layer)
        truth = self.truth(layer, policy.page_size)
        if layer in self.dense_layers:
            num_pages = truth.page_mass_THP.shape[-1]
            visible = visible_BP(call, policy.page_size, num_pages)
            everything = visible[:, None].expand(-1, call.num_kv_heads, -1)
            chosen = Chosen(selection_from_mask(everything, policy.page_size), State(), set())
        elif policy.evidence == "history":
            chosen = self._select_by_step(policy, budget, layer)
        else:
            state = self.state(policy, layer)
            recorder = ledger.ReadRecorder(state)
            selection = policy.select(call, recorder, budget)  # type: ignore[arg-type]
            chosen = Chosen(selection, state, recorder.touched)
        out, lse = self.attend(call, chosen.selection, page_size=policy.page_size)
        return self._values(policy, call, truth, chosen, out, lse)

    def _select_by_step(self, policy: Policy, budget: int | None, layer: int) -> Chosen:
        """Policies that learn from past attention see the steps one at a time."""
        state = self.prompt_state(policy, layer)
        recorder = ledger.ReadRecorder(state)
        selections = []
        for step in range(self.capture.num_queries):
            call = self.capture.step_call(layer, step)
            if step:
                policy.extend(state, call)
            selection = policy.select(call, recorder, budget)  # type: ignore[arg-type]
            options = {"page_size": policy.page_size, "page_lse": True}
            attended = Attended(selection, *self.attend(call, selection, **options))
            policy.observe(state, call, attended)
            selections.append(selection)
        return Chosen(stack_selections(selections), state, recorder.touched)

    def _values(
        self,
        policy: Policy,
        call: AttentionCall,
        truth: Truth,
        chosen: Chosen,
        out_THE: Tensor,
        lse_TH: Tensor,
    ) -> LayerValues:
        heads, size = call.num_kv_heads, policy.page_size
        num_pages = truth.page_mass_THP.shape[-1]
        mask_TSP = ledger.page_mask(chosen.selection, num_pages)
        mask_TGP = ledger.union_of_group(mask_TSP, heads)
        recall = metrics.mass(lse_TH, truth.lse_TH)
        forced = (truth.page_mass_THP * forced_BP(call, policy, num_pages)[:, None]).sum(-1)
        recall_G = metrics.mean_per_kv_head(recall, heads)
        forced_G = metrics.mean_per_kv_head(forced.double(), heads)
        page = torch.arange(num_pages, device=call.device)
        lists = mask_TSP.shape[1]
        list_mass = truth.page_mass_THP.unflatten(1, (lists, -1)).mean(2)
        current = page == current_page_B(call, size)[:, None]
        overlap = metrics.page_overlap(mask_TSP, list_mass, current)
        tokens = ledger.tokens_read(mask_TGP, call.lengths_B, size).double().mean(0)
        lse_error = metrics.mean_per_kv_head((truth.lse_TH - lse_TH).double(), heads)
        values = torch.stack(
            [
                recall_G,
                metrics.p10_per_kv_head(recall, heads),
                forced_G,
                metrics.contested(recall_G, forced_G),
                metrics.output_error(out_THE, truth.out_THE, heads),
                lse_error,
                overlap.unflatten(0, (heads, -1)).mean(1),
                tokens,
            ]
        )
        return LayerValues(values, self._state_bytes(policy, chosen, heads))

    def _state_bytes(self, policy: Policy, chosen: Chosen, num_kv_heads: int) -> float:
        lengths = self._host_lengths()
        live_pages = sum(n // policy.page_size for n in lengths) / len(lengths)
        return ledger.state_bytes(chosen.state, chosen.touched, num_kv_heads, live_pages)

    def _host_lengths(self) -> list[int]:
        first = self.prompt_length
        return list(range(first, first + self.capture.num_queries))

    def _rows(
        self, policy: Policy, layer: int, measured: LayerValues, values: Tensor
    ) -> Iterator[Row]:
        x = self.capture.layers[layer]
        per_token = ledger.token_bytes(x.keys_GND, x.values_GNE)
        length = sum(self._host_lengths()) / self.capture.num_queries
        is_dense = layer in self.dense_layers
        for kv_head in range(values.shape[1]):
            row: Row = dict(zip(METRICS, values[:, kv_head].tolist(), strict=True))
            kept = row["tokens_read"] if policy.action == "evict" and not is_dense else length
            readable = is_dense or policy.realisable
            yield row | {
                "layer": layer,
                "layer_kind": "full",
                "kv_head": kv_head,
                "dense_layer": is_dense,
                "queries": self.capture.num_queries,
                "density": row["tokens_read"] / length,
                "bytes_kv": row["tokens_read"] * per_token,
                "bytes_metadata": measured.state_bytes if readable else float("nan"),
                "bytes_dense": length * per_token,
                "bytes_stored": kept * per_token + measured.state_bytes,
            }


@dataclass(frozen=True)
class Chosen:
    """A selection, the state it came from and the state tensors that choosing it touched."""

    selection: Selection
    state: State
    touched: set[str]


@dataclass(frozen=True)
class LayerValues:
    """values: [len(METRICS), G] on the device, float64. state_bytes: per step and KV head."""

    values: Tensor
    state_bytes: float


def stack_selections(selections: Sequence[Selection]) -> Selection:
    """Selections of single steps as the rows of one."""
    width = max(s.pages_BSK.shape[-1] for s in selections)
    pages = [
        torch.nn.functional.pad(s.pages_BSK, (0, width - s.pages_BSK.shape[-1]), value=-1)
        for s in selections
    ]
    counts = torch.cat([s.counts_BS for s in selections])
    return Selection(torch.cat(pages), counts, selections[0].page_size)


def check_recall(rows: Iterable[Row]) -> None:
    """A recall outside [0, 1] by more than rounding is a fault in a kernel: never clamped."""
    for row in rows:
        r = row["mass_recall"]
        if not -metrics.RECALL_TOLERANCE <= r <= 1 + metrics.RECALL_TOLERANCE:
            raise RuntimeError(
                f"mass_recall must lie in [0, 1], got {r} at layer {row['layer']}, "
                f"KV head {row['kv_head']}: the kernel's log-sum-exp is wrong"
            )


def measure(
    capture: CapturedKV | str | Path,
    policies: Sequence[Policy],
    budgets: Sequence[Budget],
    *,
    dense_layers: Sequence[int] = (0, 1),
    device: str = "auto",
    backend: str = "auto",
) -> pd.DataFrame:
    """Measure policies at budgets on a captured cache: one row per policy, budget, layer, KV head.

    budgets: tokens (int) or fractions of the prompt in (0, 1); adaptive policies run once, with
    none. dense_layers stay dense. Columns as in the README's recall table.
    """
    from sparse_eval.device import resolve_device

    device = resolve_device(device)
    if not isinstance(capture, CapturedKV):
        capture = load_capture(capture)
    capture = capture.to(device)
    evaluator = Evaluator(capture, resolve_backend(backend, device), tuple(dense_layers))
    rows: list[Row] = []
    for policy in policies:
        wanted = [None] if policy.adaptive else [resolve_budget(b, capture.prompt_length) for b in budgets]
        for budget in wanted:
            common = common_columns(evaluator, policy, budget)
            rows += [common | row for row in evaluator.cell(policy, budget)]
        evaluator.forget_states(policy)
    return pd.DataFrame(rows)


def common_columns(evaluator: Evaluator, policy: Policy, budget: int | None) -> Row:
    """The columns every row has that a capture and a policy determine."""
    meta = evaluator.capture.meta
    return {
        "task": "recall",
        "sample": meta.get("sample", 0),
        "prompt_hash": meta.get("prompt_hash", ""),
        "prompts": meta.get("prompt_source", ""),
        "model": meta.get("model", ""),
        "revision": meta.get("revision", ""),
        "weights": meta.get("weights", ""),
        "policy": type(policy).__name__.lower(),
        "policy_config": policy.config(),
        "adaptive": policy.adaptive,
        "budget_tokens": float("nan") if budget is None else budget,
        "page_size": policy.page_size,
        "sink_pages": policy.sink_pages,
        "local_pages": policy.local_pages,
        "context": evaluator.prompt_length,
        "protocol": "decode",
        "dense_layers": list(evaluator.dense_layers),
        "backend": evaluator.backend,
        "device": str(evaluator.capture.lengths_T.device.type),
        "dtype": meta.get("dtype", ""),
        "capture_hash": meta.get("capture_hash", ""),
    }
