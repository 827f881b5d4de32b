"""What each shipped policy reads, on cases whose answer a human can see."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from sparse_eval.contract.cases import batch_call, first_step, lists_of, prompt_queries, random_text
from sparse_eval.core import AttentionCall
from sparse_eval.kernels.sparse_decode import sparse_decode
from sparse_eval.policies.base import State
from sparse_eval.policies.full import Full
from sparse_eval.policies.mean_std import MeanStd
from sparse_eval.policies.oracle import Oracle
from sparse_eval.policies.page_score import share_in_group
from sparse_eval.policies.quest import Quest, key_box, scales_of
from sparse_eval.policies.random import Random
from sparse_eval.policies.snapkv import SnapKV, voted_mass
from sparse_eval.policies.topk import top_pages
from sparse_eval.policies.window import Window

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def call_of(k_ND: torch.Tensor, q_HD: torch.Tensor, length: int | None = None) -> AttentionCall:
    """One row and one KV head."""
    return AttentionCall(
        q_BHD=q_HD[None],
        k_BGND=k_ND[None, None],
        v_BGNE=k_ND[None, None],
        lengths_B=torch.tensor([len(k_ND) if length is None else length], dtype=torch.int32),
        scale=1.0,
        layer=2,
    )


def pages_of(policy, call: AttentionCall, budget: int | None, queries=None) -> list[int]:
    """The first list of the first row."""
    return lists_of(policy.select(call, policy.init(call, queries), budget))[0][0]


def recall(policy, text, length: int, budget: int) -> float:
    """Mean share of the dense softmax's mass over heads."""
    call = batch_call([text], [length])
    state = policy.init(call, prompt_queries([text], [length]))
    x = policy.select(call, state, budget)
    lse = [
        sparse_decode(
            *(call.q_BHD, call.k_BGND, call.v_BGNE, *lists, None, call.lengths_B),
            page_size=policy.page_size,
            scale=call.scale,
            backend="torch",
        )[1]
        for lists in ((x.pages_BSK, x.counts_BS), (None, None))
    ]
    return float((lse[0] - lse[1]).exp().mean())


# The rule


def naive_top(scores: list[float], num_selected: int, current: int, forced: set[int]) -> list[int]:
    others = sorted((p for p in range(current + 1) if p not in forced), key=lambda p: -scores[p])
    return sorted([*forced, *others[: num_selected - len(forced)]])


def scored_call(num_rows: int, num_heads: int, num_kv_heads: int, num_tokens: int) -> AttentionCall:
    k = torch.zeros(num_rows, num_kv_heads, num_tokens, 4)
    lengths = torch.randint(num_tokens // 2, num_tokens + 1, (num_rows,), dtype=torch.int32)
    q = torch.zeros(num_rows, num_heads, 4)
    return AttentionCall(q_BHD=q, k_BGND=k, v_BGNE=k, lengths_B=lengths, scale=1.0, layer=0)


def test_top_pages_equals_sorting_ties_to_the_lowest_id():
    torch.manual_seed(0)
    call, policy = scored_call(20, 4, 2, 80), Window(page_size=4)
    score = torch.randint(0, 6, (20, 2, 20)).float()
    got = lists_of(top_pages(score, call, policy, 7 * 4))
    for b, g in itertools.product(range(20), range(2)):
        current = -(-int(call.lengths_B[b]) // 4) - 1
        forced = {0, current - 1, current}
        assert got[b][g] == naive_top(score[b, g].tolist(), 7, current, forced)


def test_per_head_lists_are_the_longest_equal_ones_whose_union_fits():
    torch.manual_seed(1)
    call, policy = scored_call(20, 6, 2, 80), Window(page_size=4)
    score = torch.randint(0, 9, (20, 6, 20)).float()
    got = lists_of(top_pages(score, call, policy, 8 * 4))
    for b, g in itertools.product(range(20), range(2)):
        current = -(-int(call.lengths_B[b]) // 4) - 1
        forced, heads = {0, current - 1, current}, range(3 * g, 3 * g + 3)
        for k in range(8, 2, -1):
            lists = [naive_top(score[b, h].tolist(), k, current, forced) for h in heads]
            if len({p for pages in lists for p in pages}) <= 8:
                break
        assert [got[b][h] for h in heads] == lists


def test_heads_that_agree_read_the_whole_budget_and_strangers_a_share():
    call, policy = scored_call(1, 2, 1, 80), Window(page_size=4)
    call.lengths_B[:] = 80
    up = torch.arange(20.0)
    agree = lists_of(top_pages(torch.stack([up, up])[None], call, policy, 7 * 4))[0]
    assert agree == [[0, 14, 15, 16, 17, 18, 19]] * 2
    apart = lists_of(top_pages(torch.stack([up, -up])[None], call, policy, 7 * 4))[0]
    assert apart == [[0, 16, 17, 18, 19], [0, 1, 2, 18, 19]]


def test_no_score_displaces_a_forced_page():
    call, policy = scored_call(1, 1, 1, 40), Window(page_size=4)
    call.lengths_B[:] = 38
    for value in (torch.inf, torch.nan, -torch.inf):
        score = torch.full((1, 1, 10), value)
        assert lists_of(top_pages(score, call, policy, 16)) == [[[0, 1, 8, 9]]]
    score = torch.tensor([[[0.0, torch.nan, -5.0, -torch.inf, 1.0, 0, 0, 0, 0, 0]]])
    assert lists_of(top_pages(score, call, policy, 32)) == [[[0, 2, 4, 5, 6, 7, 8, 9]]]


def test_a_budget_that_holds_every_token_leaves_no_partial_page_out():
    text = random_text(45)
    for policy in (Window(), Quest(), Quest(group="per_head"), Random()):
        assert first_step(policy, [text], [45], 45 + 3)[0][0] == [0, 1, 2]
    assert first_step(Window(page_size=4), [text], [45], 45)[0][0] == list(range(12))
    assert len(first_step(Window(page_size=4), [text], [45], 44)[0][0]) == 11


@pytest.mark.parametrize("policy", [Window(), Random(), Quest(), MeanStd(), SnapKV(window=8)])
def test_a_budget_below_the_forced_pages_names_the_minimum(policy):
    with pytest.raises(ValueError, match=r"budget must be >= 48 tokens \(3 pages of 16 .*got 47"):
        first_step(policy, [random_text(90)], [90], 47)


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (lambda: Window(page_size=0), "page_size must be an integer >= 1, got 0"),
        (lambda: Window(local_pages=0), "local_pages must be an integer >= 1, got 0"),
        (lambda: Window(sink_pages=True), "sink_pages must be an integer >= 0, got True"),
        (lambda: Random(seed=-1), "seed must be an integer >= 0, got -1"),
        (lambda: Quest(group="avg"), "group must be one of max, sum, softmax_sum, per_head"),
        (lambda: Quest(metadata_dtype="fp8"), "metadata_dtype must be one of auto, float32, int8"),
        (lambda: Oracle(per_head="no"), "per_head must be true or false, got 'no'"),  # type: ignore[arg-type]
        (lambda: SnapKV(kernel_size=4), "kernel_size must be odd, got 4"),
        (lambda: SnapKV(pooling="min"), "pooling must be one of avg, max, got 'min'"),
        (lambda: SnapKV(window=0), "window must be an integer >= 1, got 0"),
    ],
)
def test_a_bad_field_is_one_line(make, line):
    with pytest.raises(ValueError, match=line):
        make()


def test_state_that_grows_keeps_what_was_there():
    call = batch_call([random_text(16)], [16])
    state = Quest(page_size=4).init(call)
    before = state.center_BGPD.clone()
    state.grow(9)
    assert torch.equal(state.center_BGPD[:, :, :4], before)
    assert state.spread_BGPD.shape[2] == 9 and not state.spread_BGPD[:, :, 4:].any()


# Full, window, random


def test_full_reads_everything_with_or_without_a_budget():
    text = random_text(21)
    for budget in (None, 1, 512):
        assert first_step(Full(page_size=4), [text], [21], budget) == [[list(range(6))] * 2]


def test_window_at_page_size_1_is_streaming_llms_visible_set():
    policy = Window(page_size=1, sink_pages=4, local_pages=1)
    assert first_step(policy, [random_text(20)], [20], 8)[0][0] == [0, 1, 2, 3, 16, 17, 18, 19]
    assert first_step(policy, [random_text(20)], [7], 8)[0][0] == list(range(7))


def test_window_fills_its_budget_with_the_most_recent_pages():
    policy = Window(page_size=4, sink_pages=1, local_pages=2)
    assert first_step(policy, [random_text(41)], [41], 19)[0][0] == [0, 8, 9, 10]


def random_pages(layer=3, length=160, seed=0, rows=1):
    text = random_text(length)
    policy = Random(page_size=4, seed=seed)
    call = batch_call([text] * rows, [length] * rows, layer=layer)
    return lists_of(policy.select(call, State(), 48))


def test_random_differs_by_layer_step_head_and_seed_and_by_nothing_else():
    first = random_pages()
    assert first == random_pages() and random_pages(rows=3) == first * 3
    others = [random_pages(layer=4), random_pages(length=159), random_pages(seed=1)]
    assert all(other != first for other in others)
    assert first[0][0] != first[0][1]


def test_random_draws_every_free_page_equally_often():
    policy, text = Random(page_size=1, sink_pages=0, local_pages=1), random_text(41)
    drawn = torch.zeros(41)
    for layer in range(500):
        call = batch_call([text], [41], layer=layer)
        for pages in lists_of(policy.select(call, State(), 11))[0]:
            drawn[pages] += 1
    # 1000 draws of 10 out of 40: mean 250, standard deviation 13.7
    assert drawn[40] == 1000 and (drawn[:40] - 250).abs().max() < 4 * 13.7


@pytest.mark.gpu
def test_random_and_ties_are_the_same_on_a_gpu():
    texts = [random_text(200, seed=b) for b in range(3)]
    for policy in (Random(page_size=4), Quest(page_size=4), Quest(page_size=4, group="per_head")):
        on_cpu = first_step(policy, texts, [200, 77, 150], 64)
        moved = [random_text(200, seed=b, device="cuda") for b in range(3)]
        assert first_step(policy, moved, [200, 77, 150], 64) == on_cpu


# Quest, mean + std


def test_quest_reads_the_page_that_holds_the_best_key():
    k = torch.zeros(40, 2)
    k[21] = torch.tensor([3.0, -3.0])
    call = call_of(k, torch.tensor([[1.0, -1.0]]))
    assert pages_of(Quest(page_size=4), call, 16) == [0, 5, 8, 9]


def test_the_score_is_the_published_sum_of_corner_products():
    torch.manual_seed(0)
    k, q = torch.randn(64, 8).double(), torch.randn(3, 8).double()
    call = call_of(k, q)
    policy = Quest(page_size=8)
    lo, hi = k.unflatten(0, (8, 8)).aminmax(dim=1)
    published = torch.maximum(q[:, None] * lo, q[:, None] * hi).sum(-1)
    assert torch.allclose(policy.score(call, policy.init(call))[0], published, atol=1e-12)


def adversarial_pages(dtype: torch.dtype, page_size: int) -> torch.Tensor:
    """300 pages [300, page_size, 8]: plain, offset, wide-ranged, tiny, constant, near overflow."""
    rng = torch.Generator().manual_seed(page_size)
    shape = (50, page_size, 8)
    x = torch.randn(shape, generator=rng).double()
    sign = torch.where(torch.rand(shape, generator=rng) < 0.5, -1.0, 1.0).double()
    exponent = 12 * (2 * torch.rand(shape, generator=rng).double() - 1)
    largest = torch.finfo(dtype).max
    pages = [
        x,
        x + 100 * torch.randn(1, 1, 8, generator=rng).double(),
        sign * 2**exponent,
        x * torch.finfo(dtype).smallest_normal,
        x[:, :1].expand(shape),
        (sign * largest * (1 - 2 ** exponent.clamp(max=-1))).clamp(-largest, largest),
    ]
    return torch.cat(pages).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page_size", [1, 2, 16])
def test_the_stored_box_covers_every_key(dtype, page_size):
    keys = adversarial_pages(dtype, page_size)
    mid, half = (x.double() for x in key_box(keys, dtype))
    assert mid.isfinite().all() and half.isfinite().all()
    assert ((mid - half)[:, None] <= keys.double()).all()
    assert ((mid + half)[:, None] >= keys.double()).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page_size", [1, 2, 16])
def test_the_bound_is_at_least_every_logit_of_its_page(dtype, page_size):
    keys = adversarial_pages(dtype, page_size)[:250]
    q = torch.randn(4, 8, generator=torch.Generator().manual_seed(1)).to(dtype).double()
    mid, half = (x.double() for x in key_box(keys, dtype))
    bound = mid @ q.T + half @ q.abs().T
    true = (keys.double() @ q.T).amax(1)
    assert (bound >= true - 1e-15 * bound.abs()).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_box_is_tight_to_a_rounding_step(dtype):
    keys = adversarial_pages(dtype, 16)[:100]
    mid, half = key_box(keys, dtype)
    exact = (keys.double().amax(1) - keys.double().amin(1)) / 2
    step = torch.finfo(dtype).eps * (mid.double().abs() + half.double())
    assert (half.double() <= exact + step).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_constant_page_has_no_width(dtype):
    keys = torch.full((4, 16, 8), 0.3).to(dtype)
    mid, half = key_box(keys, dtype)
    assert torch.equal(mid, keys[:, 0]) and not half.any()


@pytest.mark.parametrize("policy", [Quest, MeanStd])
def test_half_precision_is_scored_in_float32(policy):
    text = random_text(64, seed=3)
    noise = torch.randn(text.k_GND.shape, generator=torch.Generator().manual_seed(0))
    text = replace(text, k_GND=text.k_GND + noise).cast(torch.bfloat16)
    call = batch_call([text], [64])
    policy = policy(page_size=8)
    state = policy.init(call)
    assert state.center_BGPD.dtype == torch.bfloat16
    score = policy.score(call, state)
    q, center, spread = (
        x.double() for x in (call.q_BHD, state.center_BGPD, state.spread_BGPD.double())
    )
    q = q.unflatten(1, (2, 2))
    exact = call.scale * (q @ center.mT + q.abs() @ spread.mT).flatten(1, 2)
    assert score.dtype == torch.float32
    assert torch.allclose(score.double(), exact, rtol=1e-5, atol=1e-5)


def test_metadata_may_be_float32():
    call = batch_call([random_text(64).cast(torch.bfloat16)], [64])
    state = Quest(metadata_dtype="float32").init(call)
    assert state.center_BGPD.dtype == state.spread_BGPD.dtype == torch.float32


def test_metadata_in_8_bits_covers_every_key_in_half_the_bytes():
    text = random_text(96)
    wild = text.k_GND * torch.tensor(10.0) ** torch.randint(-3, 4, text.k_GND.shape)
    wild[:, 16:32] = 0  # a page of equal keys
    call = batch_call([replace(text, k_GND=wild).cast(torch.bfloat16)], [96])
    quest = Quest(page_size=16, metadata_dtype="int8")
    state = quest.init(call)
    scales = scales_of(state)
    assert scales is not None
    keys = call.k_BGND.double().unflatten(2, (6, 16))
    mid_scale, half_scale = scales.double().unsqueeze(-2).unbind(-1)
    mid, half = (x.double() for x in (state.center_BGPD, state.spread_BGPD))
    mid, half = mid * mid_scale, half * half_scale
    assert ((keys - mid[:, :, :, None]).abs() <= half[:, :, :, None]).all()
    logit = call.q_BHD.double().unflatten(1, (2, -1)) @ call.k_BGND.double().mT
    best = (call.scale * logit).unflatten(-1, (6, 16)).amax(-1).flatten(1, 2)
    assert (quest.score(call, state) >= best - 1e-3 * best.abs()).all()
    assert state.center_BGPD.element_size() == state.spread_BGPD.element_size() == 1


def test_garbage_beyond_the_end_touches_no_full_page():
    text = random_text(30)
    clean = Quest(page_size=8).init(batch_call([text], [30]))
    dirty = Quest(page_size=8).init(batch_call([text], [30], extent=64, garbage=torch.nan))
    assert torch.equal(dirty.center_BGPD[:, :, :3], clean.center_BGPD[:, :, :3])
    assert torch.equal(dirty.spread_BGPD[:, :, :3], clean.spread_BGPD[:, :, :3])


def test_mean_std_by_hand():
    k = torch.tensor([[1.0], [5.0], [-2.0], [-2.0]])
    call = call_of(k, torch.tensor([[2.0], [-2.0]]))
    policy = MeanStd(page_size=2)
    assert policy.score(call, policy.init(call))[0].tolist() == [[10.0, -4.0], [-2.0, 4.0]]


@pytest.mark.parametrize("policy", [Quest, MeanStd])
def test_at_page_size_1_the_score_is_the_logit(policy):
    text = random_text(20)
    call = batch_call([text], [20])
    policy = policy(page_size=1)
    logits = call.scale * call.q_BHD.unflatten(1, (2, 2)) @ call.k_BGND.mT
    assert torch.equal(policy.score(call, policy.init(call)), logits.flatten(1, 2))


def test_group_rules_by_hand():
    logit = torch.tensor([[[0.0, 4.0, 3.0, 99.0], [0.0, -4.0, 3.0, 99.0]]])
    full = torch.tensor([[True, True, True, False]])

    def shared(rule: str) -> list[float]:
        return share_in_group(logit, 1, rule, full)[0, 0, :3].tolist()

    assert shared("max") == [0, 4, 3]
    assert shared("sum") == [0, 0, 6]
    by_hand = torch.softmax(logit[0, :, :3], -1).sum(0).tolist()
    assert shared("softmax_sum") == pytest.approx(by_hand)
    assert share_in_group(logit, 1, "per_head", full) is logit


# Oracle


@pytest.mark.parametrize("seed", range(8))
def test_no_choice_of_as_many_pages_holds_more_mass_than_the_oracle(seed):
    text = random_text(30, num_kv_heads=1, group_size=3, seed=seed)
    call = batch_call([text], [30])
    logits = call.scale * call.q_BHD[0] @ call.k_BGND[0, 0].T
    mass = torch.nn.functional.pad(logits.softmax(-1), (0, 2)).unflatten(1, (8, 4)).sum(-1).mean(0)
    best = max(itertools.combinations(range(7), 3), key=lambda c: float(mass[list(c)].sum()))
    assert pages_of(Oracle(page_size=4), call, 16) == [*best, 7]


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_the_oracle_bounds_every_policy_per_head_ones_included(page_size):
    others = [Window, Random, Quest, MeanStd, SnapKV]
    for seed in range(3):
        text = random_text(150, group_size=3, seed=seed)
        for budget in (3 * page_size, 6 * page_size):
            best = recall(Oracle(page_size=page_size), text, 150, budget)
            made = [policy(page_size=page_size) for policy in others]
            made += [
                Quest(page_size=page_size, group=g) for g in ("sum", "softmax_sum", "per_head")
            ]
            made.append(Oracle(page_size=page_size, per_head=True))
            assert all(recall(p, text, 150, budget) <= best + 1e-5 for p in made)


def test_only_the_current_page_is_forced_on_the_oracle():
    k = torch.zeros(40, 2)
    k[21] = 20.0
    call = call_of(k, torch.ones(1, 2))
    assert pages_of(Oracle(page_size=4), call, 8) == [5, 9]
    with pytest.raises(ValueError, match="budget must be >= 4 tokens"):
        pages_of(Oracle(page_size=4), call, 3)


def test_per_head_oracle_gives_each_head_its_own_pages():
    k = torch.zeros(40, 2)
    k[9, 0], k[21, 1] = 20.0, 20.0
    call = call_of(k, torch.eye(2))
    assert lists_of(Oracle(page_size=4).select(call, State(), 12))[0] == [[2, 5, 9]]
    policy = Oracle(page_size=4, per_head=True)
    assert lists_of(policy.select(call, State(), 12))[0] == [[2, 9], [5, 9]]


# SnapKV


def published_snapkv(text, length: int, window: int, kernel_size: int) -> torch.Tensor:
    """Scores of the prefix as published, heads of a group added: [G, length - window]."""
    heads = []
    for h in range(text.q_NHD.shape[1]):
        q = text.q_NHD[length - window : length, h]
        logits = 0.25 * q @ text.k_GND[h // 2, :length].T
        for w in range(window):
            logits[w, length - window + w + 1 :] = -torch.inf
        votes = logits.softmax(-1)[:, : length - window].sum(0)
        pooled = torch.nn.functional.avg_pool1d(
            votes[None], kernel_size, stride=1, padding=kernel_size // 2
        )
        heads.append(pooled[0])
    return torch.stack(heads).unflatten(0, (-1, 2)).sum(1)


def test_snapkv_at_page_size_1_scores_as_published():
    text = random_text(90, seed=4)
    policy = SnapKV(page_size=1, window=16, kernel_size=5)
    state = policy.init(batch_call([text], [90]), prompt_queries([text], [90]))
    ours = state.score_BGP[0, :, 2 : 90 - 16 - 2]
    assert torch.allclose(ours, published_snapkv(text, 90, 16, 5)[:, 2:-2], rtol=1e-5)


def test_snapkv_pools_a_page_by_the_maximum():
    text = random_text(90, seed=4)
    call, queries = batch_call([text], [90]), prompt_queries([text], [90])
    votes = voted_mass(call, queries[:, -16:])
    policy = SnapKV(page_size=1, window=16, kernel_size=3, pooling="max")
    score = policy.init(call, queries).score_BGP
    assert torch.equal(score[..., 10], votes[..., 9:12].amax(-1))


def test_snapkv_votes_sum_to_one_for_each_query():
    text = random_text(90)
    for length in (90, 40, 7):
        call = batch_call([text], [length], extent=90)
        votes = voted_mass(call, prompt_queries([text], [length])[:, -16:])
        assert votes.sum(-1).tolist() == [pytest.approx([2.0 * min(16, length)] * 2, rel=1e-5)]
        assert not votes[..., length:].any()


def test_snapkv_keeps_what_the_prompt_looked_at_and_drops_what_came_later():
    """The prompt wants pages 3, 4 and the local page 8; the answer wants page 10, written later."""
    text = random_text(80, num_kv_heads=1)
    q, k = torch.zeros_like(text.q_NHD), torch.zeros_like(text.k_GND)
    q[..., 0], k[0, 12:20, 0], k[0, 32:36, 0] = 8.0, 8.0, 9.0
    k[0, 40:44, 0] = 50.0
    text = replace(text, q_NHD=q, k_GND=k)
    policy = SnapKV(page_size=4, window=8, kernel_size=1)
    state = policy.init(batch_call([text], [40], max_tokens=80), prompt_queries([text], [40]))
    read = []
    for length in range(40, 60):
        call = batch_call([text], [length], max_tokens=80)
        if length > 40:
            policy.extend(state, call)
        read.append(lists_of(policy.select(call, state, 20))[0][0])
    assert read[0] == [0, 3, 4, 8, 9]
    assert read[-1] == [0, 3, 4, 13, 14]
    assert [10 in pages for pages in read] == [40 < n <= 48 for n in range(40, 60)]


def test_snapkv_without_enough_prompt_queries_is_refused():
    call = batch_call([random_text(50)], [50])
    for queries, given in ((None, 0), (prompt_queries([random_text(50)], [50])[:, -20:], 20)):
        with pytest.raises(
            ValueError, match=f"last 32 prompt queries .*, got {given} for 50 tokens"
        ):
            SnapKV().init(call, queries)


@pytest.mark.parametrize("length", [1, 7, 31])
def test_of_a_prompt_shorter_than_the_window_every_query_votes(length):
    text = random_text(31)
    call, queries = batch_call([text], [length]), prompt_queries([text], [length])
    all_given = SnapKV(page_size=4, window=length).init(call, queries)
    few_given = SnapKV(page_size=4).init(call, queries[:, -length:])
    assert torch.equal(few_given.score_BGP, all_given.score_BGP)
