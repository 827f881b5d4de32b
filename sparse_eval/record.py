"""Decode from a prefilled prompt while attention is observed: prompt -> CapturedKV."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sparse_eval.attention import ObservedLayer, Observer, observe
from sparse_eval.capture import CapturedKV, LayerCapture
from sparse_eval.prefill import Prefilled, decode_step


def record(
    model: Any,
    prefilled: Prefilled,
    *,
    meta: dict[str, Any],
    num_steps: int = 32,
    continuation: Tensor | None = None,
    on_step: Callable[[], None] = lambda: None,
) -> CapturedKV:
    """Decode num_steps tokens after a prefill and keep what attention saw.

    continuation: int64 [>= num_steps - 1], the tokens to feed after the prompt's last (teacher
    forcing); None feeds the model's own greedy choice, EOS ignored. meta: identity of model and
    prompt, kept in the file; "capture_hash" is required.
    """
    if continuation is not None and len(continuation) < num_steps - 1:
        raise ValueError(
            f"the text goes on for {len(continuation)} tokens after the prompt, "
            f"queries=text needs {num_steps - 1}"
        )
    observer = Observer(num_prompt_queries=0)
    cache = prefilled.fork()
    generated: list[int] = []
    token = int(prefilled.ids[-1])
    with observe(model, observer), observer.decoding():
        for step in range(num_steps):
            logits = decode_step(model, cache, token)
            forced = continuation is not None and step < len(continuation)
            token = int(continuation[step]) if forced else int(logits.argmax())  # type: ignore[index]
            generated.append(token)
            on_step()
    prompt_length = len(prefilled.ids)
    lengths = torch.arange(prompt_length, prompt_length + num_steps, dtype=torch.int32)
    layers = {i: _layer_capture(seen, prefilled.prompt_queries[i]) for i, seen in observer.full()}
    details = {
        "prompt_length": prompt_length,
        "layer_kinds": observer.layer_kinds(),
        "dtype": str(model.dtype).removeprefix("torch."),
        "generated_ids": generated,
        "queries": "greedy" if continuation is None else "text",
        "repeated_4grams": repeated_ngram_share(generated),
    }
    return CapturedKV(layers, lengths.to(model.device), meta | details)


def _layer_capture(seen: ObservedLayer, prompt_queries: Tensor) -> LayerCapture:
    queries = torch.cat(seen.queries)
    return LayerCapture(
        keys_GND=seen.key,
        values_GNE=seen.value,
        queries_THD=queries,
        outputs_THE=torch.cat(seen.outputs),
        # the last prompt token is fed by the first decode step
        prompt_queries_WHD=torch.cat([prompt_queries, queries[:1]]),
        scale=seen.scale,
    )


def repeated_ngram_share(ids: list[int], n: int = 4) -> float:
    """The share of n-grams that occurred before: 0 for fresh text, near 1 for a loop."""
    grams = [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0
