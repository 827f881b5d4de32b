"""Replays a captured cache under policies and budgets: one row per layer and KV head."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from sparse_eval import ledger, metrics
from sparse_eval.attended import (
    AttendedLayer,
    OwnKeys,
    Truth,
    alike,
    own_keys_errors,
    row_of,
    stack_selections,
    wanted_tokens,
)
from sparse_eval.capture import CapturedKV
from sparse_eval.core import AttentionCall, Row
from sparse_eval.device import peak_memory_bytes
from sparse_eval.kernels.sparse_decode import sparse_decode
from sparse_eval.policies.base import (
    Attended,
    Policy,
    Selection,
    State,
    bound_of,
    check_kept,
    check_selection,
    current_page_B,
    forced_BP,
    num_pages_of,
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
    "density_head",
    "output_error_attend",
    "lse_error_attend",
)


@dataclass
class Evaluator:
    """One capture, held on one device; dense results are computed once and shared by every cell."""

    capture: CapturedKV
    backend: str
    dense_layers: tuple[int, ...] = (0, 1)
    truths: dict[tuple[int, int], Truth] = field(default_factory=dict)
    replayed: float | None = None
    stacked: dict[tuple[tuple[int, ...], int], Truth] = field(default_factory=dict)
    ranks: dict[tuple[int, int], Tensor] = field(default_factory=dict)
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
        kernel against the outputs the model itself computed; found once."""
        if self.replayed is not None:
            return self.replayed
        errors = []
        for layer in self.measured_layers:
            ours = self.truth(layer, 16).out_THE.double()
            model = self.capture.layers[layer].outputs_THE.double()
            errors.append((ours - model).norm() / model.norm())
        self.replayed = float(torch.stack(errors).max())
        return self.replayed

    def state(self, policy: Policy, layer: int) -> State:
        """The policy's state after the last decode step. Full pages' metadata is final, so every
        query can read it; select masks what lies beyond each query. What depends on the prompt is
        built at its end and extended token by token; the rest from the cache as it stands, which
        the policy contract says is the same."""
        if (policy, layer) not in self.states:
            started = time.perf_counter()
            if policy.evidence == "prompt":
                state = self.prompt_state(policy, layer)
                for step in range(1, self.capture.num_queries):
                    policy.extend(state, self.capture.step_call(layer, step))
            else:
                state = policy.init(self.capture.step_call(layer, self.capture.num_queries - 1))
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
        attended = [self._attend_layer(policy, budget, layer) for layer in self.measured_layers]
        by_layer: dict[int, list[Row]] = {}
        for layers in alike(attended):
            values = self._values(policy, layers).cpu()  # [layers, metrics and the most read, G]
            for x, of_layer in zip(layers, values, strict=True):
                layer = x.call.layer
                if layer not in self.dense_layers:
                    bound, most = bound_of(policy, budget), float(of_layer[-1].max())
                    check_kept(type(policy).__name__, bound, most, f"layer {layer}")
                by_layer[layer] = list(self._rows(policy, x, of_layer[:-1]))
        rows = [row for layer in self.measured_layers for row in by_layer[layer]]
        seconds = time.perf_counter() - started
        for row in rows:
            row["seconds"] = seconds
            row["peak_memory"] = peak_memory_bytes(device=self.capture.lengths_T.device)
        check_recall(rows)
        return rows

    def _attend_layer(self, policy: Policy, budget: int | None, layer: int) -> AttendedLayer:
        """Select and attend: all decode queries of a layer in one call each."""
        call = self.capture.replay_call(layer)
        state, touched = State(), set[str]()
        if layer in self.dense_layers:
            num_pages = num_pages_of(call.capacity, policy.page_size)
            visible = visible_BP(call, policy.page_size, num_pages)
            everything = visible[:, None].expand(-1, call.num_kv_heads, -1)
            selection = selection_from_mask(everything, policy.page_size)
        elif policy.evidence == "history":
            selection, state, touched = self._select_by_step(policy, budget, layer)
        else:
            state = self.state(policy, layer)
            recorder = ledger.ReadRecorder(state)
            selection = check_selection(policy, policy.select(call, recorder, budget))  # type: ignore[arg-type]
            touched = recorder.touched
        out, lse = self.attend(call, selection, page_size=policy.page_size)
        x = AttendedLayer(
            call, selection, out, lse, self._state_bytes(policy, call, state, touched)
        )
        is_dense = layer in self.dense_layers
        return x if is_dense else self._attend_as_the_method_does(policy, x, state)

    def _attend_as_the_method_does(
        self, policy: Policy, x: AttendedLayer, state: State
    ) -> AttendedLayer:
        """Beside exact keys: attention over the keys that the policy attends with, if it has its
        own, step by step, since a page changes them when it fills."""
        first = self.capture.step_call(x.call.layer, 0)
        per_token = ledger.attended_token_bytes(policy, first, state)
        if per_token is None:
            return x
        outs, lses = [], []
        for step in range(self.capture.num_queries):
            call = self.capture.step_call(x.call.layer, step)
            call = replace(call, k_BGND=policy.attended_keys(call, state))
            out, lse = self.attend(call, row_of(x.selection, step), page_size=policy.page_size)
            outs.append(out)
            lses.append(lse)
        own = OwnKeys(torch.cat(outs), torch.cat(lses), per_token)
        return replace(x, own_keys=own)

    def _select_by_step(
        self, policy: Policy, budget: int | None, layer: int
    ) -> tuple[Selection, State, set[str]]:
        """Policies that learn from past attention see the steps one at a time."""
        state = self.prompt_state(policy, layer)
        recorder = ledger.ReadRecorder(state)
        selections = []
        for step in range(self.capture.num_queries):
            call = self.capture.step_call(layer, step)
            if step:
                policy.extend(state, call)
            selection = check_selection(policy, policy.select(call, recorder, budget))  # type: ignore[arg-type]
            options = {"page_size": policy.page_size, "page_lse": True}
            attended = Attended(selection, *self.attend(call, selection, **options))
            policy.observe(state, call, attended)
            selections.append(selection)
        return stack_selections(selections), state, recorder.touched

    def _values(self, policy: Policy, layers: Sequence[AttendedLayer]) -> Tensor:
        """METRICS of layers of equal shapes, all at once, then the most tokens that a step read:
        [layers, METRICS + 1, G] float64."""
        call, size = layers[0].call, policy.page_size
        heads, num_lists = call.num_kv_heads, layers[0].selection.pages_BSK.shape[1]
        truth = self._stacked_truth(tuple(x.call.layer for x in layers), size)
        num_pages = truth.page_mass_THP.shape[-1]
        lse_TH = torch.stack([x.lse_TH for x in layers])
        out_THE = torch.stack([x.out_THE for x in layers])
        mask_TSP = ledger.page_mask(stack_selections([x.selection for x in layers]), num_pages)
        lengths = call.lengths_B.repeat(len(layers))
        tokens = ledger.tokens_read(ledger.union_of_group(mask_TSP, heads), lengths, size)
        tokens_LTG = tokens.unflatten(0, (len(layers), -1)).double()
        wanted_LTH = wanted_tokens(layers, mask_TSP, lengths, size)
        mask_TSP = mask_TSP.unflatten(0, (len(layers), -1))
        recall = metrics.mass(lse_TH, truth.lse_TH)
        forced = (truth.page_mass_THP * forced_BP(call, policy, num_pages)[:, None]).sum(-1)
        recall_G, forced_G = (metrics.mean_per_kv_head(x, heads) for x in (recall, forced))
        overlap = metrics.page_overlap(mask_TSP, self._oracle_ranks(truth, call, size, num_lists))
        values = [
            recall_G,
            metrics.p10_per_kv_head(recall, heads),
            forced_G,
            metrics.contested(recall_G, forced_G),
            metrics.output_error(out_THE, truth.out_THE, heads),
            metrics.mean_per_kv_head(truth.lse_TH - lse_TH, heads),
            overlap.unflatten(-1, (heads, -1)).mean(-1),
            tokens_LTG.mean(1),
            metrics.mean_per_kv_head(wanted_LTH, heads) / call.lengths_B.double().mean(),
            *own_keys_errors(layers, truth, heads),
            tokens_LTG.amax(1),
        ]
        return torch.stack(values, 1)

    def _stacked_truth(self, layers: tuple[int, ...], page_size: int) -> Truth:
        key = (layers, page_size)
        if key not in self.stacked:
            truths = [self.truth(layer, page_size) for layer in layers]
            names = ("out_THE", "lse_TH", "page_mass_THP")
            self.stacked[key] = Truth(
                *(torch.stack([getattr(t, n) for t in truths]) for n in names)
            )
        return self.stacked[key]

    def _oracle_ranks(
        self, truth: Truth, call: AttentionCall, page_size: int, num_lists: int
    ) -> Tensor:
        key = (id(truth), num_lists)
        if key not in self.ranks:
            mass = truth.page_mass_THP.unflatten(-2, (num_lists, -1)).mean(-2)
            page = torch.arange(mass.shape[-1], device=mass.device)
            current_TP = page == current_page_B(call, page_size)[:, None]
            self.ranks[key] = metrics.page_ranks(mass, current_TP)
        return self.ranks[key]

    def _state_bytes(
        self, policy: Policy, call: AttentionCall, state: State, touched: set[str]
    ) -> float:
        lengths = self._host_lengths()
        live_pages = sum(n // policy.page_size for n in lengths) / len(lengths)
        return ledger.state_bytes(state, touched, call.num_kv_heads, live_pages)

    def _host_lengths(self) -> list[int]:
        first = self.prompt_length
        return list(range(first, first + self.capture.num_queries))

    def _rows(self, policy: Policy, x: AttendedLayer, values: Tensor) -> Iterator[Row]:
        layer = x.call.layer
        per_token = ledger.token_bytes(x.call.k_BGND, x.call.v_BGNE)
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
                "bytes_kv_attend": self._bytes_as_attended(policy, x, row["tokens_read"]),
                "bytes_metadata": x.state_bytes if readable else float("nan"),
                "bytes_dense": length * per_token,
                "bytes_stored": kept * per_token + x.state_bytes,
            }

    def _bytes_as_attended(self, policy: Policy, x: AttendedLayer, tokens_read: float) -> float:
        """Of keys that the policy made itself, and of V; NaN where it reads the cache's. The page
        that still fills is read as it is cached."""
        if x.own_keys is None:
            return float("nan")
        lengths = self._host_lengths()
        partial = sum(n % policy.page_size for n in lengths) / len(lengths)
        per_token = ledger.token_bytes(x.call.k_BGND, x.call.v_BGNE)
        return (tokens_read - partial) * x.own_keys.token_bytes + partial * per_token


def check_recall(rows: Iterable[Row]) -> None:
    """A recall outside [0, 1] by more than rounding is a fault in a kernel: never clamped."""
    for row in rows:
        r = row["mass_recall"]
        if not -metrics.RECALL_TOLERANCE <= r <= 1 + metrics.RECALL_TOLERANCE:
            raise RuntimeError(
                f"mass_recall must lie in [0, 1], got {r} at layer {row['layer']}, "
                f"KV head {row['kv_head']}: the kernel's log-sum-exp is wrong"
            )
