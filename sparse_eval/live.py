"""A policy in place of a live model's decode attention: `with patched(model, policy, budget=…)`.

prompt[:-1] is dense; from the last prompt token on, every query reads only what the policy selects,
through the shared kernel. Works under `model.generate` and under hand-written decode loops.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from sparse_eval import ledger
from sparse_eval.attention import check_plain, routed
from sparse_eval.budgets import check_budget
from sparse_eval.core import AttentionCall
from sparse_eval.device import resolve_backend
from sparse_eval.kernels.sparse_decode import sparse_decode
from sparse_eval.policies.base import (
    Attended,
    Policy,
    Selection,
    State,
    bound_of,
    check_policy,
    check_selection,
    num_pages_of,
)
from sparse_eval.trace import CachedLayer, LayerTrace, Trace, state_bytes

NUM_PROMPT_QUERIES = 64
HEADROOM_TOKENS = 256

OnSelect = Callable[[AttentionCall, Selection], None]
"""Sees what a policy was asked and what it chose. Keep nothing large, wait for nothing."""


@contextmanager
def patched(
    model: Any,
    policy: Policy,
    *,
    budget: int | None = None,
    dense_layers: Sequence[int] = (0, 1),
    protocol: str = "decode",
    question_tokens: int | None = None,
    prompt_queries: Mapping[int, Tensor] | None = None,
    backend: str = "auto",
    on_select: OnSelect | None = None,
) -> Iterator[Trace]:
    """Decode `model` (any Hugging Face causal model) through `policy`; restored on exit.

    budget: tokens a KV head may read per step; None for adaptive policies and `full`.
    protocol: "decode" makes the last prompt token and all after it sparse; "question" the last
    question_tokens prompt tokens too. In a hand-written loop every one-token forward is sparse, and
    a longer forward is a prefill whose last token is sparse: prefill in chunks before entering.
    prompt_queries: per layer [W - 1, H, D], or [B, W - 1, H, D] where rows have their own, where
    the prefill ran outside (Prefilled keeps them).
    on_select: called for each layer and sparse step, before attention.
    Sliding-window layers and dense_layers keep the model's own attention.
    Raises ValueError for what is not supported (nesting, beams, assisted decoding, cropped caches,
    attention that is not a plain softmax) and for a policy that read more than its budget, found
    when its reads are counted, RuntimeError on exit if the policy never acted.
    """
    check_policy(policy)
    check_budget(policy, budget)
    if getattr(model, "_sparse_eval_live", None) is not None:
        raise ValueError("patched contexts do not nest: this model is patched already")
    if protocol not in ("decode", "question"):
        raise ValueError(f"protocol must be decode or question, got {protocol!r}")
    if (protocol == "question") != (question_tokens is not None):
        raise ValueError(
            f"protocol={protocol} and question_tokens={question_tokens} do not go together: "
            "question needs the number of question tokens, decode has none"
        )
    if question_tokens is not None and question_tokens < 1:
        raise ValueError(f"question_tokens must be >= 1, got {question_tokens}")
    num_layers = model.config.get_text_config().num_hidden_layers
    if any(layer not in range(num_layers) for layer in dense_layers):
        raise ValueError(
            f"dense_layers must be indices below the model's {num_layers} layers, "
            f"got {list(dense_layers)}"
        )
    live = Live(
        policy=policy,
        budget=budget,
        dense_layers=frozenset(dense_layers),
        num_sparse_prompt=question_tokens or 1,
        backend=resolve_backend(backend, model.device.type),
        prompt_queries=prompt_queries,
        on_select=on_select,
        trace=Trace(realisable=policy.realisable),
    )
    hook = model.register_forward_pre_hook(live.before_forward, with_kwargs=True)
    model._sparse_eval_live = live
    generate = model.generate
    model.generate = functools.wraps(generate)(
        lambda *a, **kw: live.generate(model, generate, a, kw)
    )
    try:
        with routed(model, live):
            yield live.trace
        live.check_acted()
    finally:
        del model.generate
        del model._sparse_eval_live
        hook.remove()
        live.forget()


@dataclass
class Live:
    """The attention function while a model is patched, and the state of the running sequences."""

    policy: Policy
    budget: int | None
    dense_layers: frozenset[int]
    num_sparse_prompt: int
    backend: str
    prompt_queries: Mapping[int, Tensor] | None
    on_select: OnSelect | None = None
    trace: Trace = field(default_factory=Trace)
    states: dict[int, State] = field(default_factory=dict)
    tails: dict[int, Tensor] = field(default_factory=dict)
    prompt_length: int | None = None
    max_tokens: int = 0
    total: int | Tensor = 0
    expected: int | None = None
    num_sparse: int = 0
    rows: Rows | None = None
    cache: Any = None

    def forget(self) -> None:
        """A new sequence: nothing of the last one stays."""
        self.states.clear()
        self.tails.clear()
        self.expected, self.prompt_length, self.max_tokens = None, None, 0
        self.cache = None

    def generate(
        self, model: Any, generate: Callable[..., Any], args: Any, kwargs: dict[str, Any]
    ) -> Any:
        """model.generate, with the prompt's length known and unsupported modes refused."""
        given = kwargs.get("generation_config", args[1] if len(args) > 1 else None)
        configs = (given, model.generation_config)

        def asked(name: str) -> Any:
            values = (kwargs.get(name), *(getattr(config, name, None) for config in configs))
            return next((value for value in values if value is not None), None)

        if (asked("num_beams") or 1) > 1:
            raise ValueError(
                f"a patched model decodes without beams, got num_beams={asked('num_beams')}"
            )
        assisted = ("assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit")
        if any(asked(name) for name in assisted):
            raise ValueError("a patched model does not support assisted decoding")
        ids = kwargs.get("inputs", kwargs.get("input_ids", args[0] if args else None))
        if ids is None:
            raise ValueError("a patched model generates from input_ids, got none")
        if asked("cache_implementation") == "static":
            kwargs.setdefault("disable_compile", True)
        self.forget()
        self.prompt_length = ids.shape[1]
        self.max_tokens = ids.shape[1] + (asked("max_new_tokens") or HEADROOM_TOKENS)
        try:
            return generate(*args, **kwargs)
        finally:
            self.forget()

    def before_forward(self, model: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """Before each forward: how long the cache will be and which queries are sparse."""
        ids = kwargs.get("input_ids", kwargs.get("inputs_embeds", args[0] if args else None))
        assert ids is not None, "a causal model's forward needs input_ids or inputs_embeds"
        new = ids.shape[1]
        cache = kwargs.get("cache", kwargs.get("past_key_values"))
        cached = 0 if cache is None else cache.get_seq_length()
        was_exchanged = bool(self.states) and cache is not self.cache
        self.rows, self.cache = None, cache
        if isinstance(cached, Tensor):  # a static cache keeps its length on the device
            self.total = cached.clone() + new
            if new == 1 and self.states and not was_exchanged:
                self.num_sparse = 1
                return
            cached = int(cached)
        if self.expected is not None and (was_exchanged or cached != self.expected):
            if cached != 0:
                raise ValueError(
                    f"the cache holds {cached} tokens where the running sequence's "
                    f"{self.expected} were expected: cropped or exchanged caches are not supported "
                    "inside one patched context"
                )
            prompt_length, max_tokens = self.prompt_length, self.max_tokens
            self.forget()
            self.prompt_length, self.max_tokens, self.cache = prompt_length, max_tokens, cache
        if not isinstance(self.total, Tensor) or cached == 0:
            self.total = cached + new if not isinstance(self.total, Tensor) else self.total
        self.expected = cached + new
        prompt_length = self.prompt_length if self.prompt_length is not None else cached + new
        first_sparse = prompt_length - self.num_sparse_prompt
        self.num_sparse = max(0, min(new, cached + new - max(first_sparse, 0)))

    def __call__(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any
    ) -> tuple[Tensor, None]:
        check_plain(module, kwargs)
        layer = module.layer_idx
        own = layer in self.dense_layers or kwargs.get("sliding_window")
        all_sparse = query.shape[2] == self.num_sparse
        out = None
        if own or not all_sparse:
            out, _ = sdpa_attention_forward(module, query, key, value, mask, **kwargs)
        if own:
            if self.num_sparse and layer not in self.trace.own:
                window = kwargs.get("sliding_window")
                self.trace.own[layer] = CachedLayer.of(self._cached(layer), key, value, window)
            return out, None  # type: ignore[return-value]
        self._keep_tail(layer, query)
        if self.num_sparse:
            scale = kwargs.get("scaling") or query.shape[-1] ** -0.5
            steps = [
                self._step(layer, query[:, :, query.shape[2] - back], key, value, mask, scale, back)
                for back in range(self.num_sparse, 0, -1)
            ]
            sparse = steps[0][:, None] if len(steps) == 1 else torch.stack(steps, 1)
            out = sparse if out is None else torch.cat([out[:, : -self.num_sparse], sparse], 1)
        return out, None  # type: ignore[return-value]

    def _keep_tail(self, layer: int, query: Tensor) -> None:
        """The last dense prompt queries [B, W - 1, H, D], for policies that look at the prompt."""
        dense = query[:, :, : query.shape[2] - self.num_sparse]
        if self.policy.evidence == "prompt" and layer not in self.states and dense.shape[2]:
            seen = dense.transpose(1, 2)
            if layer in self.tails:
                seen = torch.cat([self.tails[layer], seen], 1)
            self.tails[layer] = seen[:, 1 - NUM_PROMPT_QUERIES :].clone()

    def _step(
        self,
        layer: int,
        q_BHD: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Any,
        scale: float,
        back: int,
    ) -> Tensor:
        """One decode query of every row: state, selection, attention. back: 1 = the newest."""
        if self.rows is None:
            self.rows = Rows.read(mask, self.total, q_BHD, is_first=not self.states)
        call = AttentionCall(
            q_BHD=q_BHD,
            k_BGND=key,
            v_BGNE=value,
            lengths_B=self.rows.lengths_B - (back - 1) if back > 1 else self.rows.lengths_B,
            starts_B=self.rows.starts_B,
            scale=scale,
            layer=layer,
            max_tokens=self.max_tokens,
        )
        if layer not in self.states:
            self.states[layer] = self.policy.init(call, self._queries(layer, q_BHD))
        else:
            self._make_room(layer, call)
            self.policy.extend(self.states[layer], call)
        state = self.states[layer]
        selection = self._select(call, state)
        wants_history = self.policy.evidence == "history"
        result = sparse_decode(
            q_BHD,
            self.policy.attended_keys(call, state),
            value,
            selection.pages_BSK,
            selection.counts_BS,
            call.starts_B,
            call.lengths_B,
            page_size=selection.page_size,
            scale=scale,
            backend=self.backend,
            page_lse=wants_history,
        )
        if wants_history:
            self.policy.observe(state, call, Attended(selection, *result))
        return result[0].to(q_BHD.dtype)

    def _make_room(self, layer: int, call: AttentionCall) -> None:
        state = self.states[layer]
        for name in state.paged:
            have = getattr(state, name).shape[2]
            need = num_pages_of(call.capacity, self.policy.page_size)
            if need > have:
                state.grow(max(need, have + num_pages_of(HEADROOM_TOKENS, self.policy.page_size)))

    def _queries(self, layer: int, q_BHD: Tensor) -> Tensor:
        """The last prompt queries, the current one included: [B, W, H, D]."""
        before = self.tails.get(layer)
        if before is None and self.prompt_queries is not None:
            given = self.prompt_queries[layer]
            before = given if given.ndim == 4 else given.expand(q_BHD.shape[0], -1, -1, -1)
        return q_BHD[:, None] if before is None else torch.cat([before, q_BHD[:, None]], 1)

    def _select(self, call: AttentionCall, state: State) -> Selection:
        """The policy's choice, noted; a layer's first also tells which state it costs to read."""
        layer = call.layer
        if layer in self.trace.layers:
            selection = check_selection(self.policy, self.policy.select(call, state, self.budget))
        else:
            recorder = ledger.ReadRecorder(state)
            chosen = self.policy.select(call, recorder, self.budget)  # type: ignore[arg-type]
            selection = check_selection(self.policy, chosen)
            self.trace.layers[layer] = LayerTrace(
                call.num_kv_heads,
                selection.page_size,
                CachedLayer.of(self._cached(layer), call.k_BGND, call.v_BGNE),
                state_bytes(call, state, recorder.touched),
                ledger.attended_token_bytes(self.policy, call, state),
                where=f"layer {layer}",
                policy=type(self.policy).__name__,
                bound=bound_of(self.policy, self.budget),
            )
        self.trace.note(self.trace.layers[layer], call, selection, self.budget)
        if self.on_select is not None:
            self.on_select(call, selection)
        return selection

    def _cached(self, layer: int) -> Any:
        """This layer of the cache: what is cached may differ from what attention is given."""
        layers = getattr(self.cache, "layers", ())
        return layers[layer] if layer < len(layers) else None

    def check_acted(self) -> None:
        self.trace.check_kept()
        if not self.trace.calls:
            raise RuntimeError(
                "the policy never selected: no decode step of a full-attention layer outside "
                "dense_layers ran inside the patched context"
            )


@dataclass(frozen=True)
class Rows:
    """Where each row's live tokens lie after this forward. starts_B None: no padding."""

    starts_B: Tensor | None
    lengths_B: Tensor

    @staticmethod
    def read(mask: Any, total: int | Tensor, q_BHD: Tensor, *, is_first: bool) -> Rows:
        """From the mask transformers made: None, bool or additive [B, 1, q, N]."""
        rows, device = q_BHD.shape[0], q_BHD.device
        length = torch.as_tensor(total, device=device, dtype=torch.int32).expand(rows)
        if mask is None:
            return Rows(None, length.contiguous())
        if mask.ndim != 4:
            raise ValueError(
                f"attention masks must be None or [B, 1, q, N], got shape {list(mask.shape)}"
            )
        live = mask[:, 0, -1] if mask.dtype == torch.bool else mask[:, 0, -1] == 0
        starts = live.int().argmax(-1).int()
        if is_first and not torch.equal(live.sum(-1), (length - starts).long()):
            raise ValueError("attention masks may only hide left padding, got one with other holes")
        return Rows(starts, length - starts)
