"""Top-δ selection over thumbnails: its promises, and the Triton kernels against torch."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from sparse_eval.kernels.ffd import ffd_select, ffd_step, lists_decode, residual_decode
from sparse_eval.kernels.thumbnail import (
    Residual,
    Thumbnail,
    pack_residual,
    pack_thumbnail,
    thumbnail_scores,
)
from tests.ffd_cases import INF, REFINED, RULE, draw, listed, make_case, with_values


def kept_by_hand(case: dict[str, Any], delta: float, true_max: bool = False) -> list[list[int]]:
    """Token by token, in Python."""
    t: Thumbnail = case["thumbnail"]
    q, group = case["q"], case["q"].shape[1] // t.codes.shape[1]
    score = thumbnail_scores(q, t, RULE["scale"])
    lists = []
    for row, length in enumerate(case["lengths"].tolist()):
        pages = -(-length // t.page_size)
        forced = set(range(min(RULE["sink_pages"], pages)))
        forced |= set(range(max(pages - RULE["local_pages"], 0), pages))
        full = length // t.page_size
        for first in range(0, q.shape[1], group):
            keep = set(forced)
            for head in range(first, first + group):
                by_page = (
                    score[row, head, : full * t.page_size].unflatten(0, (full, t.page_size)).amax(1)
                )
                usable = range(full) if true_max else [p for p in forced if p < full]
                peak = max((by_page[p].item() for p in usable), default=-INF)
                keep |= {p for p in range(full) if by_page[p].item() >= peak - delta}
            lists.append(sorted(keep))
    return lists


def test_keeps_what_a_loop_over_tokens_keeps():
    for lengths in ([100, 37], [8, 1], [16, 0], [64, 63]):
        for integers in (True, False):
            case = make_case("cpu", lengths, integers=integers)
            got = listed(*ffd_select(**case, **RULE, backend="torch"))
            assert got == kept_by_hand(case, RULE["delta"])


@pytest.mark.parametrize("seed", range(5))
def test_the_pseudo_max_can_only_add_pages(seed):
    case = make_case("cpu", [96, 50], integers=False, seed=seed)
    for delta in (0.0, 0.5, 3.0):
        more = listed(*ffd_select(**case, **RULE | {"delta": delta}, backend="torch"))
        fewer = kept_by_hand(case, delta, true_max=True)
        assert all(set(a) >= set(b) for a, b in zip(more, fewer, strict=True))


@pytest.mark.parametrize("form", [{}, {"bits": 4}, {"rule": "channel"}, {"coverage": 0.8}])
def test_with_the_exact_maximum_every_token_within_delta_is_read(form):
    for seed in range(3):
        case = make_case("cpu", [96, 50], integers=False, seed=seed, head_dim=8, **form)
        options = RULE | {"delta": 0.5, "pseudo_max": "exact"}
        lists = listed(*ffd_select(**case, **options, backend="torch"))
        q = case["q"].unflatten(1, (2, 3))
        score = RULE["scale"] * torch.einsum("bgmd,bgnd->bgmn", q, case["k"])
        for row, length in enumerate(case["lengths"].tolist()):
            for group in range(2):
                s = score[row, group, :, :length]
                near = (s >= s.amax(1, keepdim=True) - 0.5).any(0).nonzero().flatten()
                assert {int(n) // 8 for n in near} <= set(lists[row * 2 + group])


@pytest.mark.parametrize("first", [0.0, 2.0])
@pytest.mark.parametrize("rule", ["token", "channel"])
@pytest.mark.parametrize("bits", [2, 4])
def test_the_exact_maximum_holds_against_the_querys_rounding(bits, rule, first, device):
    q = torch.full((1, 1, 128), 0.0037).bfloat16()
    q[0, 0, 0] = -64  # the others are a small part of the unit it sets
    k = torch.full((1, 1, 32, 128), 1.5).bfloat16()
    k[0, 0, 8:16], k[..., 0] = 2.0, 0.0  # page 1 has the true maximum
    k[0, 0, ::8, 0] = first
    case: dict[str, Any] = {"q": q.to(device), "k": k.to(device), "starts": None}
    case["lengths"] = torch.tensor([32], dtype=torch.int32, device=device)
    case["thumbnail"] = pack_thumbnail(case["k"], page_size=8, bits=bits, rule=rule)
    rule_of: dict[str, Any] = {"delta": 0.2, "sink_pages": 1, "local_pages": 1, "scale": 1.0}
    for backend in ("torch", "triton"):
        got = ffd_select(**case, **rule_of, pseudo_max="exact", backend=backend)
        assert 1 in listed(*got)[0]


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_rounding_of_sums_costs_no_token_at_the_maximum(backend, device):
    # errors of every coordinate at their bound and of one sign: nothing is left for rounding
    rng = torch.Generator().manual_seed(3)
    q = torch.rand(1, 12, 100, generator=rng).to(device)
    k = torch.ones(1, 1, 32, 100, device=device)
    case: dict[str, Any] = {"q": q, "k": k, "thumbnail": pack_thumbnail(k, page_size=8)}
    lengths = torch.tensor([32], dtype=torch.int32, device=device)
    options = RULE | {"delta": 0.0, "local_pages": 1, "pseudo_max": "exact", "scale": 0.3}
    for head in range(12):
        own = case | {"q": q[:, head : head + 1]}
        got = ffd_select(**own, starts=None, lengths=lengths, **options, backend=backend)
        assert listed(*got) == [[0, 1, 2, 3]]


@pytest.mark.parametrize("pseudo_max", ["thumbnail", "exact"])
def test_lengths_beyond_the_extent_end_with_it(pseudo_max, device):
    case = make_case(device, [75, 96, 75])
    case["k"] = case["k"][:, :, :75].clone()
    case["thumbnail"] = pack_thumbnail(case["k"], page_size=8, capacity=120)
    starts = torch.tensor([0, 0, 5], dtype=torch.int32, device=device)
    cut = torch.tensor([75, 75, 70], dtype=torch.int32, device=device)
    options = RULE | {"pseudo_max": pseudo_max, "delta": 0.1}
    want = ffd_select(**case | {"lengths": cut, "starts": starts}, **options, backend="torch")
    for backend in ("torch", "triton"):
        got = ffd_select(**case | {"starts": starts}, **options, backend=backend)
        assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


def test_a_step_cuts_lengths_at_the_extent(device):
    for refine in (False, True):
        results = []
        for lengths, backend in (([75, 75], "torch"), ([200, 75], "torch"), ([200, 75], "triton")):
            case = with_values(make_case(device, lengths, tokens=75, integers=False))
            residual = case.pop("residual")
            options = RULE | {"backend": backend, "delta": 0.5}
            step = ffd_step(**case, **options, residual=residual if refine else None)
            results.append(step)
        for got in results[1:]:
            torch.testing.assert_close(got[0], results[0][0], rtol=0, atol=5e-4)
            assert torch.equal(got[2], results[0][2])


def test_an_infinite_delta_reads_everything(device):
    case = make_case(device, [96, 50, 3])
    for backend in ("torch", "triton"):
        for pseudo_max in ("thumbnail", "exact"):
            options = RULE | {"delta": INF, "pseudo_max": pseudo_max}
            lists = listed(*ffd_select(**case, **options, backend=backend))
            assert [len(x) for x in lists] == [12, 12, 7, 7, 1, 1]


def test_without_a_full_forced_page_everything_is_read(device):
    case = make_case(device, [50])
    for backend in ("torch", "triton"):
        options = RULE | {"sink_pages": 0, "local_pages": 1}
        assert listed(*ffd_select(**case, **options, backend=backend)) == [list(range(7))] * 2


@pytest.mark.parametrize("group_size", [1, 2, 3, 4, 5, 6, 7, 8, 12])
def test_the_kernel_keeps_what_torch_keeps(group_size, device):
    case = make_case(device, [100, 61], group_size=group_size)
    options = RULE | {"delta": 0.5 if group_size % 2 else 2.0}
    want = ffd_select(**case, **options, backend="torch")
    got = ffd_select(**case, **options, backend="triton")
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    listed(*got)


@pytest.mark.parametrize(
    "form",
    [
        {"bits": 4},
        {"rule": "channel", "page_size": 16},
        {"rule": "channel", "bits": 4, "page_size": 32},
        {"page_size": 1},
        {"page_size": 32},
        {"dtype": torch.bfloat16, "head_dim": 64},
        {"dtype": torch.float16, "head_dim": 24},
        {"rows_of_one": True},
    ],
    ids=str,
)
def test_the_kernel_keeps_what_torch_keeps_in_every_form(form, device):
    lengths = {"thumbnail": [100, 33], "exact": [64, 7]}
    for pseudo_max in lengths:
        case = make_case(device, lengths[pseudo_max], **form)
        options = RULE | {"pseudo_max": pseudo_max, "delta": 1.25}
        want = ffd_select(**case, **options, backend="torch")
        got = ffd_select(**case, **options, backend="triton")
        assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


@pytest.mark.parametrize("scale", [0.25, -0.25, 0.0])
@pytest.mark.parametrize("head_dim, bits", [(16, 2), (256, 2), (160, 4)])
def test_keys_of_zeros_and_any_scale(head_dim, bits, scale, device):
    q, k = draw(1, 6, head_dim, integers=True), draw(1, 2, 96, head_dim, seed=1, integers=True)
    k[:, :, 20:60] = 0
    case: dict[str, Any] = {"q": q.to(device), "k": k.to(device), "starts": None}
    case["lengths"] = torch.tensor([90], dtype=torch.int32, device=device)
    case["thumbnail"] = pack_thumbnail(case["k"], page_size=8, bits=bits)
    for delta in (0.0, 1.0):
        options = RULE | {"delta": delta, "scale": scale}
        want = ffd_select(**case, **options, backend="torch")
        got = ffd_select(**case, **options, backend="triton")
        assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


def test_many_programs_and_tiles_write_one_ascending_list(device, monkeypatch):
    from sparse_eval.kernels.ffd import launch

    case = make_case(device, [600, 377], tokens=600, page_size=1)
    want = ffd_select(**case, **RULE, backend="torch")
    for programs, tile in ((1, 256), (3, 64)):
        plan = launch.Plan(tile, 4, programs)
        monkeypatch.setattr(launch, "plan_of", lambda *_, plan=plan: plan)
        got = ffd_select(**case, **RULE, backend="triton")
        assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


def test_top_delta_lists_what_a_mask_keeps(device):
    from sparse_eval.kernels.ffd import rules

    scores = draw(2, 3, 5000, seed=3).to(device)
    ids, counts = rules.top_delta_triton(scores, delta=1.5, num_sinks=4, num_local=8)
    forced = torch.cat([scores[..., :4], scores[..., -8:]], -1)
    keep = scores >= forced.amax(-1, keepdim=True) - 1.5
    keep[..., :4] = keep[..., -8:] = True
    assert torch.equal(counts, keep.sum(-1, dtype=torch.int32))
    for row in range(2):
        for head in range(3):
            kept = keep[row, head].nonzero().flatten().int()
            assert torch.equal(ids[row, head, : len(kept)], kept)


@pytest.mark.gpu
def test_a_graph_of_one_step_stays_right_while_the_cache_grows():
    case = with_values(
        make_case("cuda", [4000, 3000], dtype=torch.bfloat16, head_dim=128, tokens=4224)
    )
    case["q"] = torch.randn_like(case["q"])
    step = {**case, **RULE, "backend": "triton"}
    ffd_step(**step)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = ffd_step(**step)
    for _ in range(60):
        case["lengths"].add_(1)
        case["q"].copy_(torch.randn_like(case["q"]))
        graph.replay()
        kept = [x.clone() for x in results]
        assert all(torch.equal(x, y) for x, y in zip(kept, ffd_step(**step), strict=True))
        chosen = {n: case[n] for n in ("q", "k", "thumbnail", "starts", "lengths")}
        counts = ffd_select(**chosen, **RULE, backend="torch")[1]
        assert (kept[3] - counts).abs().max() <= 1  # a score at the threshold may fall either way


def test_pages_too_small_for_a_product_are_refused():
    case = with_values(make_case("cpu", [32], page_size=8, rule="channel"))
    lists: dict[str, Any] = {"pages": torch.zeros(1, 2, 1).int(), "counts": torch.ones(1, 2).int()}
    with pytest.raises(ValueError, match="pages of 16 tokens or more, got 8"):
        REFINED(**case, **lists, scale=0.25, backend="triton")
    out, _ = REFINED(**case, **lists, scale=0.25, backend="torch")
    assert out.isfinite().all()


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "a negative delta": ({"delta": -1.0}, "delta must be a number >= 0 or inf"),
    "no delta": ({"delta": math.nan}, "delta must be a number >= 0 or inf"),
    "no local page": ({"local_pages": 0}, "local_pages must be an integer >= 1"),
    "sinks": ({"sink_pages": -1}, "sink_pages must be an integer >= 0"),
    "pseudo-max": ({"pseudo_max": "true"}, "pseudo_max must be one of thumbnail, exact"),
    "lengths as int64": ({"lengths": torch.ones(1).long()}, "lengths must be int32"),
    "a backend": ({"backend": "cuda"}, "backend must be one of"),
    "a query": ({"q": torch.zeros(1, 6, 8)}, "q must be"),
    "starts as int64": ({"starts": torch.zeros(1).long()}, r"starts must be int32 \[1\], got"),
    "starts of two": ({"starts": torch.zeros(2).int()}, r"starts must be int32 \[1\], got"),
    "a batch": ({"k": torch.zeros(3, 2, 100, 16)}, "k must have batch 1 .* got 3"),
    "little room": (
        {"thumbnail": pack_thumbnail(torch.zeros(1, 2, 96, 16), page_size=8)},
        "room for 100 tokens or more, which the cache of 100 may hold, got a capacity of 96",
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_arguments_are_refused_in_one_line(what):
    change, message = BAD[what]
    good = make_case("cpu", [100]) | RULE | {"backend": "torch"}
    with pytest.raises(ValueError, match=message) as failure:
        ffd_select(**good | change)
    assert "\n" not in str(failure.value)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_step_refuses_a_thumbnail_or_residual_that_does_not_fit(backend, device):
    case = with_values(make_case(device, [100]))
    residual, t = case.pop("residual"), case.pop("thumbnail")
    step: dict[str, Any] = case | RULE | {"backend": backend}
    short = pack_thumbnail(case["k"][:, :, :96], page_size=8)
    other = Residual(residual.codes, residual.unit * 2)
    for given, left, message in (
        (short, None, "room for 100 tokens or more"),
        (t, other, "residual must be the thumbnail's, of unit"),
        (t, Residual(residual.codes[:, :, :96], residual.unit), "residual must be the thumbnail's"),
    ):
        with pytest.raises(ValueError, match=message) as failure:
            ffd_step(**step, thumbnail=given, residual=left)
        assert "\n" not in str(failure.value)


@pytest.mark.parametrize("decode", ["lists", "residual"])
def test_lists_are_needed_and_have_the_keys_heads(decode):
    q, k = torch.zeros(2, 4, 32), torch.zeros(2, 2, 64, 32)
    t = pack_thumbnail(k, page_size=16)
    lengths = torch.full((2,), 64, dtype=torch.int32)
    for pages in (None, torch.zeros(2, 4, 3, dtype=torch.int32)):
        counts = None if pages is None else torch.ones(2, 4, dtype=torch.int32)
        lists: Any = (pages, counts, None, lengths)
        with pytest.raises(ValueError, match=r"pages must be \[B, G, K\] with k's KV heads"):
            if decode == "lists":
                lists_decode(q, k, k, *lists, page_size=16, scale=1.0, backend="torch")
            else:
                r = pack_residual(k, t)
                residual_decode(q, k, k, t, r, *lists, scale=1.0, backend="torch")


@pytest.mark.parametrize("delta", [-1.0, float("nan"), 10**400, True])
def test_delta_is_a_number_that_float32_can_hold_or_infinite(delta):
    q, k = torch.zeros(1, 2, 32), torch.zeros(1, 1, 64, 32)
    t = pack_thumbnail(k, page_size=16)
    lengths = torch.full((1,), 64, dtype=torch.int32)
    rule: Any = {"sink_pages": 1, "local_pages": 1, "scale": 1.0, "backend": "torch"}
    with pytest.raises(ValueError, match="delta must be a number >= 0 or inf"):
        ffd_select(q, k, t, None, lengths, delta=delta, **rule)
