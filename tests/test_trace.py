"""What a patched model read: counted against selections and cache sizes worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest

from sparse_eval import patched
from sparse_eval.policies.full import Full
from sparse_eval.policies.oracle import Oracle
from sparse_eval.policies.quest import Quest
from sparse_eval.policies.window import Window
from sparse_eval.prefill import decode_step, prefill
from tests.broken_policies import ReadsOnePageMore, ReturnsATuple
from tests.test_live import NEW, build, padded
from tests.tiny import random_ids


def decode(model: Any, policy: Any, num_tokens: int, steps: int, **options: Any) -> Any:
    ids = random_ids(num_tokens)[0]
    filled = prefill(model, ids)
    cache, token = filled.fork(), int(ids[-1])
    with patched(model, policy, dense_layers=[0], **options) as trace:
        for _ in range(steps):
            token = int(decode_step(model, cache, token).argmax())
    return trace


def window_tokens(length: int, pages: int, size: int = 16) -> int:
    """Of `pages` pages of a window: all full but the current one."""
    return (pages - 1) * size + (length - 1) % size + 1


def test_a_windows_reads_by_hand(llama):
    trace = decode(llama, Window(), 150, 3, budget=64)
    read = [window_tokens(length, 4) for length in (150, 151, 152)]
    live = [150, 151, 152]
    layers = llama.config.num_hidden_layers
    assert trace.tokens_read == pytest.approx(sum(read) / 3)
    assert trace.density == pytest.approx(sum(read) / sum(live))
    expected = (sum(live) + (layers - 1) * sum(read)) / (layers * sum(live))
    assert trace.read_fraction == pytest.approx(expected)
    assert set(trace.own) == {0} and set(trace.layers) == set(range(1, layers))
    assert trace.left_out == trace.long_calls == trace.calls == 3 * (layers - 1)


def test_metadata_bytes_are_read_too(llama):
    window, quest = (decode(llama, p, 160, 1, budget=64) for p in (Window(), Quest()))
    layers = llama.config.num_hidden_layers
    # ten full pages, two vectors each, where a token has two as well
    metadata = (layers - 1) * 10 / (layers * 160)
    assert quest.read_fraction == pytest.approx(window.read_fraction + metadata)


def test_dense_reads_everything_and_an_oracle_has_no_bytes(llama):
    full = decode(llama, Full(), 100, 2)
    assert full.density == full.read_fraction == 1.0
    assert math.isnan(decode(llama, Oracle(), 100, 2, budget=64).read_fraction)


def test_counting_in_pieces_counts_the_same(llama, monkeypatch):
    whole = decode(llama, Quest(), 120, 9, budget=48)
    monkeypatch.setattr("sparse_eval.trace.FOLD_STEPS", 2)
    pieces = decode(llama, Quest(), 120, 9, budget=48)
    assert pieces.read_fraction == whole.read_fraction
    assert pieces.tokens_read == whole.tokens_read and pieces.left_out == whole.left_out


def test_padding_is_not_counted():
    model = build("llama")
    ids, mask = padded(random_ids(130, rows=2), pad=37)
    with patched(model, Quest(), budget=64, dense_layers=[0]) as both:
        model.generate(ids, attention_mask=mask, **NEW)
    alone = []
    for row, start in ((0, 37), (1, 0)):
        with patched(model, Quest(), budget=64, dense_layers=[0]) as trace:
            model.generate(ids[row : row + 1, start:], **NEW)
        alone.append(trace)
    assert both.tokens_read == pytest.approx(sum(t.tokens_read for t in alone) / 2)
    for number in ("bytes_read", "bytes_dense"):
        parts = [sum(getattr(x, number) for x in t.layers.values()) for t in alone]
        assert sum(getattr(x, number) for x in both.layers.values()) == pytest.approx(sum(parts))


def test_sliding_layers_read_their_window_only():
    model = build("gemma3")
    trace = decode(model, Window(), 150, 2, budget=64)
    assert trace.own[1].window == 32 and trace.own[1].kv_form == "expanded"
    sliding, lengths = 5, [150, 151]
    read = [window_tokens(n, 4) for n in lengths]
    expected = (sliding * 64 + sum(read)) / (sliding * 64 + sum(lengths))
    assert trace.read_fraction == pytest.approx(expected)


def test_latent_caches_are_counted_by_their_latents():
    model = build("deepseek_v3")
    ids = random_ids(120)[0]
    filled = prefill(model, ids)
    keys = filled.cache.layers[1].keys
    trace = decode(model, Window(), 120, 1, budget=64)
    if keys.shape[1] == 1:  # transformers that cache latents: one head of kv_lora_rank + rope
        assert trace.kv_form == "latent"
        assert trace.layers[1].cached.token_bytes == (16 + 8) * 4
        # every head reads the same window, so the latents of a token are read once
        read = window_tokens(120, 4)
        assert trace.layers[1].bytes_read == read * (16 + 8) * 4
    else:
        assert trace.kv_form == "expanded"


def test_selections_are_seen_as_they_are_made(llama):
    seen = []
    trace = decode(
        llama, Quest(), 120, 3, budget=64, on_select=lambda call, s: seen.append((call.layer, s))
    )
    assert len(seen) == trace.calls
    assert {layer for layer, _ in seen} == set(trace.layers)
    assert all(int(s.counts_BS.max()) <= 4 for _, s in seen)


def test_a_policy_that_reads_more_than_its_budget_ends_in_an_error(llama):
    line = r"ReadsOnePageMore read \d+ tokens in one KV head and step \(layer 1\), its budget is 64"
    with pytest.raises(ValueError, match=line):
        decode(llama, ReadsOnePageMore(), 150, 2, budget=64)


def test_a_policy_that_returns_no_selection_is_named(llama):
    with pytest.raises(ValueError, match="ReturnsATuple.select must return a Selection, got tuple"):
        decode(llama, ReturnsATuple(), 150, 1, budget=64)


@pytest.mark.parametrize(
    ("policy", "budget", "line"),
    [
        (Quest(), "x", "budget must be tokens here .* got 'x'"),
        (Quest(), 0.5, "budget must be tokens here .* got 0.5"),
        (Quest(), 32, "budget must be >= 48 tokens"),
        (Quest, 64, "got the class Quest"),
    ],
)
def test_patched_says_what_it_takes(llama, policy, budget, line):
    with pytest.raises((TypeError, ValueError), match=line), patched(llama, policy, budget=budget):
        pass
