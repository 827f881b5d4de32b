"""Observing attention changes nothing, sees the truth, and leaves no trace."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface

from sparse_eval.attention import Observer, observe
from sparse_eval.prefill import cache_keyword, decode_step, prefill
from sparse_eval.record import record
from tests.tiny import random_ids, tiny_model


def registries() -> tuple[set[str], set[str]]:
    return set(AttentionInterface._global_mapping), set(AttentionMaskInterface._global_mapping)


def test_import_patches_nothing_and_loads_neither_transformers_nor_triton():
    code = (
        "import sys, sparse_eval; bad = {'transformers', 'triton'} & set(sys.modules); "
        "assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_registries_and_model_are_restored_after_an_exception(llama):
    before, implementation = registries(), llama.config._attn_implementation
    with pytest.raises(KeyError, match="inside"), observe(llama, Observer(4)):
        assert registries() != before
        raise KeyError("inside")
    assert registries() == before
    assert llama.config._attn_implementation == implementation


def test_observed_prefill_stays_causal(llama):
    ids = random_ids(40)
    changed = ids.clone()
    changed[0, 30:] = (changed[0, 30:] + 1) % 100 + 3
    with torch.inference_mode(), observe(llama, Observer(4)):
        logits, other = llama(ids).logits, llama(changed).logits
    with torch.inference_mode():
        stock = llama(ids).logits
    assert torch.equal(logits[:, :30], other[:, :30])
    assert not torch.equal(logits[:, 30:], other[:, 30:])
    torch.testing.assert_close(logits, stock, rtol=0, atol=0)


@pytest.mark.parametrize("chunk_tokens", [7, 11, 64])
def test_chunked_prefill_gives_the_same_cache_and_token(llama, chunk_tokens):
    ids = random_ids(46)[0]
    chunked, whole = (prefill(llama, ids, chunk_tokens=c) for c in (chunk_tokens, 1000))
    for a, b in zip(chunked.cache.layers, whole.cache.layers, strict=True):
        torch.testing.assert_close(a.keys, b.keys, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(a.values, b.values, rtol=1e-5, atol=1e-5)
    for layer, queries in whole.prompt_queries.items():
        torch.testing.assert_close(chunked.prompt_queries[layer], queries, rtol=1e-5, atol=1e-5)
    last = int(ids[-1])
    tokens = [int(decode_step(llama, p.fork(), last).argmax()) for p in (chunked, whole)]
    with torch.inference_mode():
        stock = int(llama(ids[None]).logits[0, -1].argmax())
    assert tokens == [stock, stock]


def test_prefill_computes_logits_of_one_position_only(llama):
    seen: list[int] = []
    hook = llama.lm_head.register_forward_hook(lambda m, a, out: seen.append(out.shape[1]))
    prefill(llama, random_ids(50)[0], chunk_tokens=16)
    hook.remove()
    assert set(seen) == {1} and len(seen) == 4


def test_a_fork_is_decoded_from_without_touching_the_prefill(llama):
    ids = random_ids(46)[0]
    filled = prefill(llama, ids)
    a = record(llama, filled, meta={"capture_hash": "a"}, num_steps=5)
    record(llama, filled, meta={"capture_hash": "b"}, num_steps=9)
    again = record(llama, filled, meta={"capture_hash": "a"}, num_steps=5)
    assert filled.cache.get_seq_length() == len(ids) - 1
    assert again.meta == a.meta
    for layer in a.layers:
        assert torch.equal(a.layers[layer].keys_GND, again.layers[layer].keys_GND)


def test_capture_with_an_all_ones_mask_is_the_same(llama):
    ids = random_ids(30)
    seen = []
    for extra in ({}, {"attention_mask": torch.ones_like(ids)}):
        observer = Observer(30)
        with torch.inference_mode(), observe(llama, observer):
            llama(ids, **extra)
        seen.append(observer.prompt_queries())
    for layer in seen[0]:
        torch.testing.assert_close(seen[0][layer], seen[1][layer], rtol=1e-5, atol=1e-5)


def test_greedy_tokens_of_a_capture_are_stock_generation(llama):
    ids = random_ids(60)[0]
    captured = record(llama, prefill(llama, ids), meta={"capture_hash": "x"}, num_steps=12)
    out = llama.generate(
        ids[None], max_new_tokens=12, min_new_tokens=12, do_sample=False, use_cache=True
    )
    assert captured.meta["generated_ids"] == out[0, 60:].tolist()


def test_sliding_layers_are_listed_and_not_captured():
    model = tiny_model("tiny_gemma3")
    captured = record(model, prefill(model, random_ids(60)[0]), meta={"capture_hash": "x"})
    kinds = captured.meta["layer_kinds"]
    assert "sliding" in kinds and "full" in kinds
    assert sorted(captured.layers) == [i for i, kind in enumerate(kinds) if kind == "full"]


def test_models_that_change_the_softmax_are_refused():
    model = tiny_model("tiny_llama")
    model.config.attn_logit_softcapping = 50.0
    try:
        with pytest.raises(ValueError, match="soft-capped"), observe(model, Observer(4)):
            pass
    finally:
        del model.config.attn_logit_softcapping


def test_an_empty_prompt_is_refused(llama):
    with pytest.raises(ValueError, match="at least 2 tokens"):
        prefill(llama, torch.tensor([5]))


def test_the_cache_argument_is_named_as_this_version_names_it(llama):
    assert cache_keyword(llama) in ("cache", "past_key_values")
    filled = prefill(llama, random_ids(20)[0])
    assert filled.cache.get_seq_length() == 19  # a misnamed cache is swallowed and stays empty
