"""Scores and rules: what each score says is so, and what each rule promises of any score."""

from __future__ import annotations

import itertools
import math
import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sparse_eval.contract.cases import batch_call, lists_of, random_text
from sparse_eval.core import AttentionCall
from sparse_eval.kernels.ffd import ffd_select
from sparse_eval.ledger import page_mask
from sparse_eval.policies.base import Selection, full_BP
from sparse_eval.policies.channel_scores import BoundScore, MeanScore
from sparse_eval.policies.exact import ExactScore
from sparse_eval.policies.ffd import FFD
from sparse_eval.policies.oracle import Oracle
from sparse_eval.policies.quest import Quest
from sparse_eval.policies.rules import nucleus_BHP
from sparse_eval.policies.scored import SCORES, ScoredPolicy, TopDelta, TopK, TopP
from sparse_eval.policies.thumbnail import ThumbnailScore
from sparse_eval.policies.window import Window

SIZE = 4
PAGES: dict[str, Any] = {"page_size": SIZE, "sink_pages": 1, "local_pages": 2}


def noisy_call(
    num_tokens: int = 83, *, rows: int = 2, group_size: int = 3, seed: int = 0, spread: float = 1.0
) -> AttentionCall:
    """Rows of unequal lengths and starts, over real-valued keys."""
    rng = torch.Generator().manual_seed(seed)
    texts = [random_text(num_tokens, group_size=group_size, seed=seed + b) for b in range(rows)]
    texts = [
        replace(t, k_GND=spread * torch.randn(t.k_GND.shape, generator=rng), q_NHD=t.q_NHD / 2)
        for t in texts
    ]
    lengths = [num_tokens - 5 * b for b in range(rows)]
    return batch_call(texts, lengths, starts=[2 * b for b in range(rows)])


def logits_of(call: AttentionCall) -> Tensor:
    """True logits of each row's live tokens, -inf elsewhere, in pages: [B, H, P, SIZE] float64."""
    num_rows, num_heads = call.q_BHD.shape[:2]
    num_pages = -(-call.k_BGND.shape[2] // SIZE)
    out = torch.full((num_rows, num_heads, num_pages * SIZE), -torch.inf).double()
    assert call.starts_B is not None
    for b, h in itertools.product(range(num_rows), range(num_heads)):
        first, n = int(call.starts_B[b]), int(call.lengths_B[b])
        k = call.k_BGND[b, h // call.group_size, first : first + n].double()
        out[b, h, :n] = call.scale * k @ call.q_BHD[b, h].double()
    return out.unflatten(2, (-1, SIZE))


def said(score, call: AttentionCall, quantity: str) -> Tensor:
    """A score's word, -inf on pages it does not know."""
    x = score.of(quantity, call, score.init(call, SIZE), SIZE).double()
    return x.masked_fill(~score.known(call, SIZE, x.shape[-1])[:, None], -torch.inf)


def select(policy: Any, call: AttentionCall, budget: int | None = None) -> Selection:
    return policy.select(call, policy.init(call), budget)


# Scores


@pytest.mark.parametrize("quantity", ["max", "log_mass"])
def test_exact_scores_are_the_true_ones(quantity):
    call = noisy_call()
    logits = logits_of(call)
    true = logits.amax(-1) if quantity == "max" else logits.logsumexp(-1)
    assert torch.allclose(said(ExactScore(), call, quantity), true, atol=1e-5)


def test_bounds_are_above_and_means_below_the_truth():
    call = noisy_call(seed=3)
    full = full_BP(call, SIZE, 21)[:, None]
    logits = logits_of(call)[:, :, :21]
    for true, quantity in ((logits.amax(-1), "max"), (logits.logsumexp(-1), "log_mass")):
        true = true.masked_fill(~full, -torch.inf)
        assert (said(BoundScore(), call, quantity) >= true - 1e-5).all()
        assert (said(MeanScore(), call, quantity) <= true + 1e-5).all()


def test_the_mean_score_is_the_mean_logit():
    call = noisy_call(seed=4)
    full = full_BP(call, SIZE, 21)[:, None]
    true = logits_of(call)[:, :, :21].mean(-1).masked_fill(~full, -torch.inf)
    assert torch.allclose(said(MeanScore(), call, "max"), true, atol=1e-5)


@pytest.mark.parametrize("scales", ["token", "channel"])
@pytest.mark.parametrize("bits", [2, 4])
def test_thumbnail_logits_are_off_by_no_more_than_they_say(bits, scales):
    score, call = ThumbnailScore(bits=bits, scales=scales), noisy_call(seed=5)
    state = score.init(call, SIZE)
    full = full_BP(call, SIZE, 21)[:, None, :, None]
    off = (score.token_logits(call, state).double() - logits_of(call)[:, :, :21]).abs()
    error = score.token_errors(call, state).double()
    assert (off <= error * (1 + 1e-5) + 1e-6)[full.expand_as(off)].all()
    assert off[full.expand_as(off)].max() > error[full.expand_as(off)].max() / 20


def test_more_bits_are_nearer_the_truth():
    call = noisy_call(seed=6)
    true = logits_of(call)[:, :, :19]

    def off(bits: int) -> float:
        score = ThumbnailScore(bits=bits)
        logit = score.token_logits(call, score.init(call, SIZE))[:, :, :19]
        return float((logit - true)[true.isfinite()].abs().mean())

    assert off(4) < off(2) / 2


def test_thumbnails_of_one_cache_serve_many_rows():
    text = random_text(64, group_size=3)
    call = batch_call([text], [64])
    call = replace(call, q_BHD=text.q_NHD[[9, 63, 20]], lengths_B=call.lengths_B.expand(3))
    score = ThumbnailScore()
    state = score.init(call, SIZE)
    together = score.token_logits(call, state)
    for row in range(3):
        one = replace(call, q_BHD=call.q_BHD[row : row + 1], lengths_B=call.lengths_B[:1])
        assert torch.equal(score.token_logits(one, state)[0], together[row])


# Rules


def naive_nucleus(share: list[float], first: set[int], p: float) -> set[int]:
    kept = {i for i in range(len(share)) if i in first}
    for i in sorted(set(range(len(share))) - kept, key=lambda i: (-share[i], i)):
        if sum(share[j] for j in kept) >= p:
            break
        kept.add(i)
    return kept


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=12),
    st.floats(0.05, 0.99),
    st.sets(st.integers(0, 11), max_size=3),
)
def test_the_nucleus_is_the_shortest_list_that_reaches_p(weights, p, first):
    share = torch.tensor(weights).double() / sum(weights)
    known = torch.ones(1, len(weights), dtype=torch.bool)
    is_first = torch.tensor([[i in first for i in range(len(weights))]])
    kept = nucleus_BHP(share.log()[None, None], known, is_first, p)[0, 0]
    wanted = naive_nucleus(share.tolist(), first, p - 1e-12)
    longer = naive_nucleus(share.tolist(), first, p + 1e-12)
    got = set(kept.nonzero().flatten().tolist())
    assert got in (wanted, longer)  # p may stand on a sum of shares, to rounding


@settings(max_examples=15, deadline=None)
@given(
    st.integers(0, 10_000),
    st.floats(0, 12),
    st.integers(0, 2),
    st.integers(1, 3),
    st.sampled_from([0.5, 2.0, 6.0]),
)
def test_a_pseudo_maximum_only_adds_pages(seed, delta, sinks, local, spread):
    call = noisy_call(61, seed=seed, group_size=2, spread=spread)
    for score in ("exact", "bound", "thumbnail"):
        fields: dict[str, Any] = {
            "page_size": SIZE,
            "sink_pages": sinks,
            "local_pages": local,
            "delta": delta,
        }
        read = []
        for peak in ("forced", "all"):
            policy = TopDelta(score=score, peak=peak, **fields)
            selection = select(policy, call)
            read.append(page_mask(selection, 16))
        assert (read[0] | ~read[1]).all()


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10_000), st.floats(0, 12), st.sampled_from([0.5, 2.0, 6.0]))
def test_top_delta_on_exact_scores_reads_what_is_within_delta_and_drops_little(seed, delta, spread):
    call = noisy_call(61, seed=seed, spread=spread)
    policy = TopDelta(score="exact", peak="forced", delta=delta, **PAGES)
    logits = logits_of(call)
    read_BGP = page_mask(select(policy, call), logits.shape[2])
    read = read_BGP.repeat_interleave(call.group_size, 1)[..., None].expand_as(logits)
    peak = logits.flatten(2).amax(-1)[..., None, None]
    near = logits > peak - delta + 1e-5
    assert read[near].all()
    dropped = ~read & logits.isfinite()
    mass = (logits - peak).exp().masked_fill(~dropped, 0).sum((2, 3))
    assert (mass <= dropped.sum((2, 3)) * math.exp(-delta) * (1 + 1e-4)).all()


@settings(max_examples=12, deadline=None)
@given(
    st.integers(0, 10_000),
    st.floats(0, 8),
    st.sampled_from(["token", "channel"]),
    st.sampled_from([0.5, 2.0, 6.0]),
)
def test_ffd_against_an_exact_maximum_misses_nothing_within_delta(seed, delta, scales, spread):
    call = noisy_call(61, seed=seed, spread=spread)
    policy = FFD(delta=delta, scales=scales, pseudo_max="exact", **PAGES)
    logits = logits_of(call)
    read_BGP = page_mask(select(policy, call), logits.shape[2])
    read = read_BGP.repeat_interleave(call.group_size, 1)[..., None].expand_as(logits)
    near = logits > logits.flatten(2).amax(-1)[..., None, None] - delta + 1e-4
    assert read[near].all()


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 10_000), st.floats(0, 1))
def test_exact_top_p_holds_p_of_every_heads_mass(seed, p):
    call = noisy_call(61, seed=seed, spread=3.0)
    policy = TopP(score="exact", p=p, **PAGES)
    logits = logits_of(call)
    read_BGP = page_mask(select(policy, call), logits.shape[2])
    share = logits.flatten(2).softmax(-1).unflatten(2, (-1, SIZE)).sum(-1)
    held = share.masked_fill(~read_BGP.repeat_interleave(call.group_size, 1), 0).sum(-1)
    assert (held >= p - 1e-5).all()


@pytest.mark.parametrize("score", SCORES)
def test_no_limit_reads_everything(score):
    call = noisy_call()
    everything = [[list(range(21))] * 2, [list(range(20))] * 2]
    made: list[ScoredPolicy] = [TopDelta(score=score, delta=math.inf, **PAGES)]
    made += [TopP(score=score, p=1, **PAGES)] if "log_mass" in SCORES[score].gives else []
    for policy in made:
        assert lists_of(select(policy, call)) == everything


def test_each_head_chooses_and_the_group_reads_the_union():
    """Two heads: one looks at channel 0, held by page 3, the other at channel 1, held by page 6."""
    text = random_text(40, num_kv_heads=1)
    q, k = torch.zeros_like(text.q_NHD), torch.zeros_like(text.k_GND)
    q[:, 0, 0], q[:, 1, 1] = 1.0, 1.0
    k[0, 13, 0], k[0, 25, 1], k[0, 18, 1] = 40.0, 40.0, 36.0
    call = batch_call([replace(text, q_NHD=q, k_GND=k)], [40])
    policy = TopDelta(score="bound", delta=2.0, **PAGES)
    selection = select(policy, call)
    assert lists_of(selection) == [[[0, 3, 4, 6, 8, 9]]]
    assert selection.wanted_BH is not None
    assert selection.wanted_BH.tolist() == [
        [16, 20]
    ]  # tokens: 3 forced pages and 1 or 2 of its own
    capped = replace(policy, max_tokens=20)
    assert lists_of(select(capped, call)) == [[[0, 3, 6, 8, 9]]]
    wanted = select(capped, call).wanted_BH
    assert wanted is not None and torch.equal(wanted, selection.wanted_BH)


@pytest.mark.parametrize("kind", [FFD, TopDelta])
def test_a_cap_without_a_pseudo_maximum_keeps_the_best_pages(kind):
    k = 0.1 * torch.randn(1, 1, 66, 8, generator=torch.Generator().manual_seed(0))
    k[0, 0, 48:52] = 5  # page 6; the one local page has no score
    call = AttentionCall(
        q_BHD=torch.ones(1, 1, 8),
        k_BGND=k,
        v_BGNE=k,
        layer=0,
        starts_B=None,
        lengths_B=torch.tensor([66], dtype=torch.int32),
        scale=1.0,
    )
    shared: dict[str, Any] = {"page_size": 8, "sink_pages": 0, "local_pages": 1, "max_tokens": 32}
    if kind is TopDelta:
        shared |= {"peak": "forced", "score": "thumbnail"}
    assert 6 in lists_of(select(kind(**shared), call))[0][0]


def test_a_tie_at_the_cap_goes_to_the_lowest_page():
    text = random_text(40)
    call = batch_call([replace(text, k_GND=torch.ones_like(text.k_GND))], [40])
    for policy in (
        TopDelta(max_tokens=20, **PAGES),
        TopP(p=1, max_tokens=20, **PAGES),
        FFD(max_tokens=20, **PAGES),
    ):
        assert lists_of(select(policy, call)) == [[[0, 1, 2, 8, 9]] * 2]


# The same thing said twice


@pytest.mark.parametrize("group", ["max", "sum", "softmax_sum", "per_head"])
def test_top_k_of_bounds_is_quest(group):
    call = noisy_call(seed=8)
    quest, ours = Quest(group=group, **PAGES), TopK(score="bound", group=group, **PAGES)
    for budget in (12, 31, 48):
        x, y = (select(p, call, budget) for p in (quest, ours))
        assert torch.equal(x.pages_BSK, y.pages_BSK)


def test_top_k_of_exact_mass_is_the_oracle():
    call = noisy_call(seed=9)
    oracle = Oracle(page_size=SIZE)
    ours = TopK(score="exact", rank="log_mass", group="softmax_sum", page_size=SIZE)
    for budget in (4, 12, 31):
        assert lists_of(select(oracle, call, budget)) == lists_of(select(ours, call, budget))


def test_a_hybrid_goes_from_quest_to_a_window():
    call = noisy_call(seed=10)
    for share, same in ((0.0, Quest(**PAGES)), (1.0, Window(**PAGES))):
        hybrid = TopK(score="bound", local_share=share, **PAGES)
        assert lists_of(select(hybrid, call, 40)) == lists_of(select(same, call, 40))
    half = TopK(score="bound", local_share=0.5, **PAGES)
    pages = lists_of(select(half, call, 40))[0][0]
    assert pages[-5:] == [16, 17, 18, 19, 20] and len(pages) == 10


def test_ffd_is_top_delta_of_thumbnails_against_a_pseudo_maximum():
    call = noisy_call(seed=11, group_size=1)
    ffd = FFD(delta=0.5, **PAGES)
    ours = TopDelta(score="thumbnail", peak="forced", delta=0.5, **PAGES)
    x, y = (select(p, call) for p in (ffd, ours))
    assert torch.equal(x.pages_BSK, y.pages_BSK)
    assert 3 < int(x.counts_BS.float().mean()) < 18


@pytest.mark.parametrize("pseudo_max", ["thumbnail", "exact"])
@pytest.mark.parametrize("scales", ["token", "channel"])
def test_ffd_reads_what_the_kernels_reference_reads(scales, pseudo_max):
    call = noisy_call(seed=13, group_size=2)
    policy = FFD(delta=0.7, scales=scales, pseudo_max=pseudo_max, **PAGES)
    state = policy.init(call)
    selection = policy.select(call, state, None)
    pages, counts = ffd_select(
        *(call.q_BHD, call.k_BGND, policy.thumbnails.packed(state)),
        *(call.starts_B, call.lengths_B),
        delta=policy.delta,
        sink_pages=policy.sink_pages,
        local_pages=policy.local_pages,
        scale=call.scale,
        backend="torch",
        pseudo_max=pseudo_max,
    )
    assert torch.equal(selection.counts_BS, counts)
    assert torch.equal(selection.pages_BSK, pages)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs the interpreter")
def test_ffd_by_its_kernel_reads_the_same():
    fields: dict[str, Any] = {"page_size": 16, "sink_pages": 1, "local_pages": 2, "delta": 0.7}
    call = noisy_call(100, seed=14, group_size=2)
    read = []
    for backend in ("torch", "triton"):
        policy = FFD(select_backend=backend, **fields)
        read.append(lists_of(select(policy, call)))
    assert read[0] == read[1]
    assert any(len(pages) < 7 for row in read[0] for pages in row)


# FFD's residual


@pytest.mark.parametrize("scales", ["token", "channel"])
@pytest.mark.parametrize("bits", [2, 4])
def test_attended_keys_are_near_the_cached_ones_and_the_filling_page_is_exact(bits, scales):
    call = noisy_call(seed=12)
    policy = FFD(attend="residual", bits=bits, scales=scales, **PAGES)
    kept = policy.attended_keys(call, policy.init(call))
    assert call.starts_B is not None
    for b in range(2):
        first, n = int(call.starts_B[b]), int(call.lengths_B[b])
        full = first + n // SIZE * SIZE
        live, exact = kept[b, :, first:full], call.k_BGND[b, :, first:full]
        assert not torch.equal(live, exact)
        assert (live - exact).abs().max() < exact.abs().max() / 2 ** (bits + 6)
        assert torch.equal(kept[b, :, full : first + n], call.k_BGND[b, :, full : first + n])
    assert FFD(**PAGES).attended_keys(call, policy.init(call)) is call.k_BGND


def test_residuals_grow_with_the_text():
    texts = [random_text(60, seed=b) for b in range(2)]
    policy = FFD(attend="residual", **PAGES)
    state = policy.init(batch_call(texts, [33, 40], max_tokens=60))
    for n in range(1, 12):
        call = batch_call(texts, [33 + n, 40 + n], max_tokens=60)
        policy.extend(state, call)
    rebuilt = policy.init(batch_call(texts, [44, 51], max_tokens=60))
    for name in state.paged:
        ours, theirs = getattr(state, name), getattr(rebuilt, name)
        assert torch.equal(ours[0, :, :11], theirs[0, :, :11])
        assert torch.equal(ours[1, :, :12], theirs[1, :, :12])


# Errors


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (
            lambda: TopP(score="mean_std"),
            "TopP needs a log_mass, which score mean_std does not give; scores that do: bound, ",
        ),
        (lambda: TopK(score="mean_std", rank="log_mass"), "TopK needs a log_mass, which score"),
        (lambda: TopK(score="quest"), "score must be one of bound, thumbnail, mean, mean_std, ex"),
        (lambda: TopK(score={"bits": 2}), "score must be one of .*, got None"),
        (lambda: TopK(score=3), "score must be one of .*, got 3"),
        (
            lambda: TopK(score={"name": "bound", "bits": 2}),
            r"score bound has no field 'bits' \(thumbnail has one\); accepted: metadata_dtype",
        ),
        (lambda: TopK(score={"name": "thumbnail", "bits": 3}), "bits must be one of 2, 4, got 3"),
        (lambda: TopK(score={"name": "mean", "metadata_dtype": 1}), "score.metadata_dtype must be"),
        (lambda: TopK(local_share=1.5), "local_share must be a number from 0 to 1, got 1.5"),
        (lambda: TopK(score="exact", local_share=0.5), "local_share must be 0 with score exact"),
        (
            lambda: TopK(score={"name": "thumbnail", "metadata_dtype": "float32"}),
            r"no field 'metadata_dtype' \(bound, mean, mean_std has one\); accepted: bits, scales",
        ),
        (lambda: FFD(select_backend="triton", page_size=24), "powers of two up to 512, got page"),
        (lambda: TopK(rank="mean"), "rank must be one of max, log_mass, got 'mean'"),
        (lambda: TopDelta(delta=-1), "delta must be a number >= 0, got -1"),
        (lambda: TopDelta(delta=math.nan), "delta must be a number >= 0, got nan"),
        (lambda: TopDelta(delta="5"), "delta must be .* got '5'"),  # type: ignore[arg-type]
        (lambda: TopDelta(peak="sink"), "peak must be one of all, forced, got 'sink'"),
        (lambda: TopP(p=1.5), "p must be a number from 0 to 1, got 1.5"),
        (
            lambda: TopP(max_tokens=47),
            r"max_tokens must be an integer >= 48 tokens \(3 pages of 16",
        ),
        (
            lambda: FFD(max_tokens=47),
            r"max_tokens must be an integer >= 48 tokens \(3 pages of 16 that FFD",
        ),
        (lambda: FFD(max_tokens=0.5), "max_tokens must be an integer"),  # type: ignore[arg-type]
        (lambda: FFD(max_tokens=0), "max_tokens must be an integer >= 48 tokens .* got 0"),
        (lambda: FFD(bits=2.0), "bits must be one of 2, 4, got 2.0"),  # type: ignore[arg-type]
        (
            lambda: TopK(score={"name": "thumbnail", "bits": 2.0}),
            "bits must be one of 2, 4, got 2.0",
        ),
        (lambda: TopK(score={"name": ["bound"]}), r"score must be one of .*, got \['bound'\]"),
        (lambda: TopK(score=["bound"]), r"score must be one of .*, got \['bound'\]"),
        (lambda: FFD(bits=8), "bits must be one of 2, 4, got 8"),
        (lambda: FFD(scales="page"), "scales must be one of token, channel, got 'page'"),
        (lambda: FFD(attend="2bit"), "attend must be one of exact, residual, got '2bit'"),
        (lambda: FFD(pseudo_max="true"), "pseudo_max must be one of thumbnail, exact, got 'true'"),
        (lambda: FFD(select_backend="auto"), "select_backend must be one of torch, triton, got"),
        (
            lambda: FFD(select_backend="triton", max_tokens=64),
            "select_backend triton has no cap, got max_tokens=64",
        ),
    ],
)
def test_a_pair_or_field_without_meaning_is_one_line(make, line):
    with pytest.raises(ValueError, match=line) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_policies_of_equal_scores_are_equal_and_name_their_fields():
    a = TopK(score={"name": "thumbnail", "bits": 4})
    b = TopK(score=ThumbnailScore(bits=4))
    assert a == b and hash(a) == hash(b) and a != TopK(score="thumbnail")
    assert a.config()["score"] == {"name": "thumbnail", "bits": 4, "scales": "channel"}
    assert TopDelta(delta=math.inf).config()["delta"] == "inf"  # JSON has no infinity
    assert not TopDelta(score="exact").realisable and TopDelta(score="bound").realisable
