"""A policy patched into live generation: parity with stock, padding, families, guards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from sparse_eval import patched
from sparse_eval.policies.full import Full
from sparse_eval.policies.quest import Quest
from sparse_eval.policies.random import Random
from sparse_eval.policies.snapkv import SnapKV
from sparse_eval.policies.window import Window
from sparse_eval.prefill import decode_step, prefill
from tests.tiny import random_ids

SHAPE: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", {}),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", {}),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {"head_dim": 32}),
    "mistral": ("MistralForCausalLM", "MistralConfig", {"sliding_window": None}),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", {}),
    "gemma3": (
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {"num_hidden_layers": 6, "head_dim": 32, "sliding_window": 32},
    ),
    "deepseek_v2": ("DeepseekV2ForCausalLM", "DeepseekV2Config", LATENT),
    "deepseek_v3": ("DeepseekV3ForCausalLM", "DeepseekV3Config", LATENT),
}
NEW = {"max_new_tokens": 16, "min_new_tokens": 16, "do_sample": False}


def build(family: str) -> Any:
    model, config, extra = FAMILIES[family]
    torch.manual_seed(0)
    net = getattr(transformers, model)(getattr(transformers, config)(**{**SHAPE, **extra})).eval()
    for weight in net.parameters():
        if weight.ndim > 1:
            weight.data.normal_(0, 0.15)
    return net


def padded(ids: torch.Tensor, pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The first row left-padded by `pad` tokens."""
    ids, mask = ids.clone(), torch.ones_like(ids)
    ids[0, :pad], mask[0, :pad] = 0, 0
    return ids, mask


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_full_equals_stock_generation_in_a_padded_batch(family, cache):
    model = build(family)
    ids, mask = padded(random_ids(90, rows=2), pad=33)
    options = {"cache_implementation": "static"} if cache == "static" else {}
    stock = model.generate(ids, attention_mask=mask, **NEW, **options)
    with patched(model, Full(), dense_layers=[0]) as trace:
        ours = model.generate(ids, attention_mask=mask, **NEW, **options)
    assert torch.equal(stock, ours)
    assert trace.density == 1.0


@pytest.mark.parametrize("family", ["llama", "qwen3", "deepseek_v3"])
@pytest.mark.parametrize("policy", [Quest(), Window(), Random(), SnapKV()], ids=repr)
def test_a_row_answers_the_same_alone_and_in_a_padded_batch(family, policy):
    model = build(family)
    ids, mask = padded(random_ids(130, rows=2), pad=37)
    with patched(model, policy, budget=64, dense_layers=[0]):
        batch = model.generate(ids, attention_mask=mask, **NEW)
    with patched(model, policy, budget=64, dense_layers=[0]) as trace:
        alone = model.generate(ids[:1, 37:], attention_mask=mask[:1, 37:], **NEW)
    assert torch.equal(batch[0, 130:], alone[0, 93:])
    assert 0.3 < trace.density < 0.8


def test_generate_and_a_hand_written_loop_after_prefill_agree(llama):
    ids = random_ids(120)[0]
    with patched(llama, Quest(), budget=48, dense_layers=[0]):
        generated = llama.generate(ids[None], **NEW)[0, 120:].tolist()
    filled = prefill(llama, ids)
    cache, token, tokens = filled.fork(), int(ids[-1]), []
    with patched(llama, Quest(), budget=48, dense_layers=[0]) as trace:
        for _ in range(16):
            token = int(decode_step(llama, cache, token).argmax())
            tokens.append(token)
    assert tokens == generated
    assert trace.calls == 16 * (llama.config.num_hidden_layers - 1)


def test_prompt_queries_from_outside_are_those_seen_inside(llama):
    ids = random_ids(120)[0]
    with patched(llama, SnapKV(), budget=64, dense_layers=[0]):
        generated = llama.generate(ids[None], **NEW)[0, 120:].tolist()
    filled = prefill(llama, ids)
    cache, token, tokens = filled.fork(), int(ids[-1]), []
    queries = filled.prompt_queries
    with patched(llama, SnapKV(), budget=64, dense_layers=[0], prompt_queries=queries):
        for _ in range(16):
            token = int(decode_step(llama, cache, token).argmax())
            tokens.append(token)
    assert tokens == generated


@pytest.mark.parametrize("length", [1, 2, 20])
def test_of_a_prompt_shorter_than_its_window_a_policy_sees_all(llama, length):
    ids, new = random_ids(length), {**NEW, "max_new_tokens": 40, "min_new_tokens": 40}
    answers = []
    for window in (32, length):
        policy = SnapKV(page_size=4, window=window)
        with patched(llama, policy, budget=20, dense_layers=[0]) as trace:
            answers.append(llama.generate(ids, **new).tolist())
    assert answers[0] == answers[1] and trace.density < 0.9


def test_prompt_queries_that_were_dropped_are_no_short_prompt(llama):
    ids = random_ids(50)[0]
    filled = prefill(llama, ids, num_prompt_queries=10)
    for given, num in ((filled.prompt_queries, 10), (None, 1)):
        with (
            pytest.raises(ValueError, match=f"got {num} for 50 tokens"),
            patched(llama, SnapKV(), budget=64, dense_layers=[0], prompt_queries=given),
        ):
            decode_step(llama, filled.fork(), int(ids[-1]))


def test_question_protocol_makes_the_questions_tokens_sparse(llama):
    ids = random_ids(120)
    seen = {}
    for count in (1, 12):
        name = "decode" if count == 1 else "question"
        asked = None if count == 1 else count
        with patched(
            llama, Window(), budget=48, dense_layers=[0], protocol=name, question_tokens=asked
        ) as trace:
            llama.generate(ids, **NEW)
        seen[count] = trace.calls
    layers = llama.config.num_hidden_layers - 1
    assert seen == {1: 16 * layers, 12: 27 * layers}


def test_a_tight_budget_changes_the_logits(llama):
    ids = random_ids(200)[0]
    filled = prefill(llama, ids)
    dense = decode_step(llama, filled.fork(), int(ids[-1]))
    with patched(llama, Random(), budget=48, dense_layers=[]):
        sparse = decode_step(llama, filled.fork(), int(ids[-1]))
    assert (dense - sparse).abs().max() > 1e-3


def test_model_is_restored_after_an_exception(llama):
    before = llama.config._attn_implementation
    with pytest.raises(KeyError), patched(llama, Quest(), budget=64):
        raise KeyError("inside")
    assert llama.config._attn_implementation == before
    assert "generate" not in vars(llama) and not hasattr(llama, "_sparse_eval_live")
    assert not llama._forward_pre_hooks


def test_a_policy_that_never_selects_is_an_error(llama):
    every = range(llama.config.num_hidden_layers)
    with (
        pytest.raises(RuntimeError, match="never selected"),
        patched(llama, Quest(), budget=64, dense_layers=list(every)),
    ):
        llama.generate(random_ids(80), **NEW)


def test_a_policy_that_leaves_nothing_out_is_an_error(llama):
    class Greedy(Quest):
        def select(self, call, state, budget):
            return super().select(call, state, call.capacity)

    with (
        pytest.raises(ValueError, match="Greedy read 1.. tokens .* its budget is 64"),
        patched(llama, Greedy(), budget=64, dense_layers=[0]),
    ):
        llama.generate(random_ids(120), **NEW)


def test_unsupported_modes_are_refused_in_one_line(llama):
    ids = random_ids(80)
    with pytest.raises(ValueError, match="num_beams=2"), patched(llama, Quest(), budget=64):
        llama.generate(ids, num_beams=2, **NEW)
    with pytest.raises(ValueError, match="assisted"), patched(llama, Quest(), budget=64):
        llama.generate(ids, prompt_lookup_num_tokens=3, **NEW)
    with (
        pytest.raises(ValueError, match="do not nest"),
        patched(llama, Quest(), budget=64),
        patched(llama, Quest(), budget=64),
    ):
        pass
    with pytest.raises(ValueError, match="needs a budget"), patched(llama, Quest()):
        pass
    with (
        pytest.raises(ValueError, match="go together"),
        patched(llama, Full(), protocol="question"),
    ):
        pass
    with (
        pytest.raises(ValueError, match="question_tokens must be >= 1"),
        patched(llama, Full(), protocol="question", question_tokens=0),
    ):
        pass
    for layers in ([3], [-1]):
        with (
            pytest.raises(ValueError, match="below the model's 3 layers"),
            patched(llama, Full(), dense_layers=layers),
        ):
            pass


def test_ways_to_decode_that_the_models_own_settings_ask_for_are_refused_too(llama, monkeypatch):
    ids = random_ids(80)
    config = transformers.GenerationConfig(num_beams=3, max_new_tokens=4)
    with pytest.raises(ValueError, match="num_beams=3"), patched(llama, Quest(), budget=64):
        llama.generate(ids, config)
    monkeypatch.setattr(llama.generation_config, "num_beams", 2)
    with pytest.raises(ValueError, match="num_beams=2"), patched(llama, Quest(), budget=64):
        llama.generate(ids, **NEW)
    monkeypatch.undo()
    monkeypatch.setattr(llama.generation_config, "prompt_lookup_num_tokens", 3)
    with pytest.raises(ValueError, match="assisted"), patched(llama, Quest(), budget=64):
        llama.generate(ids, **NEW)


def test_a_cropped_or_exchanged_cache_is_refused(llama):
    ids = random_ids(80)[0]
    cache, shorter = (prefill(llama, x).fork() for x in (ids, ids[:60]))
    with (
        pytest.raises(ValueError, match="cropped"),
        patched(llama, Quest(), budget=64, dense_layers=[0]),
    ):
        decode_step(llama, cache, 5)
        decode_step(llama, shorter, 5)
    longer = prefill(llama, random_ids(81)[0]).fork()  # as long as the first one is by then
    with (
        pytest.raises(ValueError, match="exchanged"),
        patched(llama, Quest(), budget=64, dense_layers=[0]),
    ):
        decode_step(llama, prefill(llama, ids).fork(), 5)
        decode_step(llama, longer, 5)


def test_masks_of_any_form_mean_the_same(llama):
    from sparse_eval.live import Rows

    live = torch.ones(2, 1, 1, 20, dtype=torch.bool)
    live[0, ..., :7] = False
    additive = torch.zeros(2, 1, 1, 20).masked_fill(~live, torch.finfo(torch.float32).min)
    q = torch.zeros(2, 4, 8)
    for mask in (live, additive):
        rows = Rows.read(mask, 20, q, is_first=True)
        assert rows.starts_B is not None
        assert rows.starts_B.tolist() == [7, 0] and rows.lengths_B.tolist() == [13, 20]
    with pytest.raises(ValueError, match="shape"):
        Rows.read(torch.ones(2, 20), 20, q, is_first=True)
    holes = live.clone()
    holes[1, ..., 5] = False
    with pytest.raises(ValueError, match="left padding"):
        Rows.read(holes, 20, q, is_first=True)


def test_nothing_of_one_sample_reaches_the_next(llama):
    prompts = [random_ids(100, seed=s) for s in range(3)]
    answers: dict[int, list[list[int]]] = {}
    for order in ([0, 1, 2], [2, 0, 1]):
        with patched(llama, SnapKV(), budget=64, dense_layers=[0]):
            for i in order:
                answers.setdefault(i, []).append(llama.generate(prompts[i], **NEW).tolist())
    assert all(first == second for first, second in answers.values())
