"""Attention over the lists of top-δ: exact and refined keys, whole steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from sparse_eval.kernels.ffd import ffd_select, ffd_step, lists_decode
from sparse_eval.kernels.thumbnail import (
    Residual,
    unpack,
    unpack_residual,
)
from tests.ffd_cases import ATTEND, INF, REFINED, RULE, make_case, with_values


@pytest.mark.parametrize(
    "form",
    [
        {},
        {"bits": 4},
        {"rule": "channel", "page_size": 16},
        {"page_size": 32, "coverage": 0.8},
        {"page_size": 1, "tokens": 40},
        {"dtype": torch.bfloat16, "head_dim": 64, "group_size": 6},
        {"dtype": torch.float16, "head_dim": 24, "group_size": 1},
        {"dtype": torch.bfloat16, "head_dim": 32, "group_size": 12, "tokens": 40},
        {"rows_of_one": True},
    ],
    ids=str,
)
def test_attention_by_residual_is_that_of_the_refined_keys(form, device):
    tokens = form.get("tokens", 100)
    case = with_values(make_case(device, [tokens, 37], integers=False, **form), e=24)
    pages, counts = ffd_select(
        **{n: case[n] for n in ("q", "k", "thumbnail", "starts", "lengths")},
        **RULE | {"delta": 0.25},
        backend="torch",
    )
    t, k = case["thumbnail"], case["k"]
    refined = (unpack(t) + unpack_residual(case["residual"], t))[:, :, :tokens].to(torch.float64)
    keys = refined.expand(2, -1, -1, -1).clone()
    for row, length in enumerate(case["lengths"].tolist()):
        full = length // t.page_size * t.page_size
        keys[row, :, full:] = k.double().expand(2, -1, -1, -1)[row, :, full:]
    where: dict[str, Any] = {"page_size": t.page_size, "scale": 0.25, "backend": "torch"}
    want, want_lse = ATTEND(
        *(case["q"].double(), keys, case["v"].double().expand(2, -1, -1, -1)),
        *(pages, counts, None, case["lengths"]),
        **where,
    )
    close = 1e-4 if k.dtype == torch.float32 else 2e-2
    for backend in ("torch", "triton"):
        got = REFINED(**case, pages=pages, counts=counts, scale=0.25, backend=backend)
        torch.testing.assert_close(got[0].double(), want, rtol=0, atol=close)
        torch.testing.assert_close(got[1].double(), want_lse, rtol=0, atol=1e-3)


@pytest.mark.parametrize("refine", [False, True])
@pytest.mark.parametrize("pooled", [False, True])
def test_a_step_packs_selects_and_attends(pooled, refine, device):
    case = with_values(make_case(device, [96, 61], dtype=torch.bfloat16, head_dim=32, tokens=96))
    truth, left = case["thumbnail"], case["residual"]
    t = truth.with_tensors(truth.codes.clone(), truth.step.clone())
    residual = Residual(left.codes.clone(), left.unit) if refine else None
    t.codes[0, :, 88:], t.step[0, :, 88:] = 85, 9  # page 11 of row 0 has just filled
    cache = {"k": case["k"], "v": case["v"], "block_table": None}
    if pooled:
        table = torch.tensor([[3, 1, 4], [0, 5, 2]], dtype=torch.int32, device=device)
        cache["block_table"] = table
        for name in ("k", "v"):
            pool = torch.full((6, 2, 32, 32), torch.nan, dtype=torch.bfloat16, device=device)
            for row in range(2):
                for block in range(3):
                    pool[table[row, block]] = case[name][row, :, 32 * block : 32 * block + 32]
            cache[name] = pool
    step: dict[str, Any] = {"q": case["q"], "starts": None, "lengths": case["lengths"]} | RULE
    out, lse, pages, counts = ffd_step(
        **step, **cache, thumbnail=t, residual=residual, backend="triton"
    )
    assert torch.equal(t.codes, truth.codes) and torch.equal(t.step, truth.step)
    chosen = {n: case[n] for n in ("q", "k", "thumbnail", "starts", "lengths")}
    want = ffd_select(**chosen, **RULE, backend="torch")
    assert torch.equal(pages, want[0]) and torch.equal(counts, want[1])
    tensors = (case["q"], case["k"], case["v"])
    lists = (pages, counts, None, case["lengths"])
    if refine:
        near = REFINED(*tensors, truth, left, *lists, scale=0.25, backend="torch")
    else:
        near = ATTEND(*tensors, *lists, page_size=8, scale=0.25, backend="torch")
    torch.testing.assert_close(out.float(), near[0].float(), rtol=0, atol=2e-2)
    torch.testing.assert_close(lse, near[1], rtol=0, atol=1e-3)
    if pooled != refine:
        return
    again = ffd_step(**step, **cache, thumbnail=t, residual=residual, backend="triton")
    assert all(torch.equal(x, y) for x, y in zip(again, (out, lse, pages, counts), strict=True))


def test_pads_never_shift_a_page(device):
    case = with_values(make_case(device, [75, 41], integers=False), e=24)
    starts = torch.tensor([0, 5], dtype=torch.int32, device=device)
    shifted = {"starts": starts}
    for name in ("k", "v"):  # row 1 moves five tokens on, behind pads that nothing may read
        shifted[name] = torch.full_like(case[name], torch.nan)
        shifted[name][0], shifted[name][1, :, 5:46] = case[name][0], case[name][1, :, :41]
    names = ("q", "k", "thumbnail", "starts", "lengths")
    options = RULE | {"delta": 0.5, "pseudo_max": "exact"}
    want = ffd_select(**{n: case[n] for n in names}, **options, backend="torch")
    for backend in ("torch", "triton"):
        got = ffd_select(**{n: (case | shifted)[n] for n in names}, **options, backend=backend)
        assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    lists: dict[str, Any] = {"pages": want[0], "counts": want[1], "scale": 0.25}
    plain = REFINED(**case, **lists, backend="torch")
    for backend in ("torch", "triton"):
        out, lse = REFINED(**case | shifted, **lists, backend=backend)
        torch.testing.assert_close(out, plain[0], rtol=0, atol=5e-4)
        torch.testing.assert_close(lse, plain[1], rtol=0, atol=5e-4)


def test_an_infinite_delta_attends_as_dense_does(device):
    case = with_values(make_case(device, [96, 61], integers=False))
    t, step = case.pop("thumbnail"), RULE | {"delta": INF, "backend": "triton"}
    case.pop("residual")
    out, lse, _, _ = ffd_step(**case, **step, thumbnail=t, residual=None)
    want, want_lse = ATTEND(
        *(case["q"], case["k"], case["v"], None, None, None, case["lengths"]),
        page_size=8,
        scale=0.25,
        backend="torch",
    )
    torch.testing.assert_close(out, want, rtol=0, atol=1e-5)
    torch.testing.assert_close(lse, want_lse, rtol=0, atol=1e-5)


def test_nothing_unwritten_is_read(device, monkeypatch):
    case = with_values(make_case(device, [96, 61]))
    want: Any = None
    empty = torch.empty
    for poison in (0x55, 0xFF):

        def poisoned(*shape: Any, value: int = poison, **options: Any) -> Tensor:
            x = empty(*shape, **options)
            x.view(torch.uint8).fill_(value)
            return x

        with monkeypatch.context() as patch:
            patch.setattr(torch, "empty", poisoned)
            got = ffd_step(**case, **RULE, backend="triton")
        want = want or got
        assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))
    assert not want[0].isnan().any()


@pytest.mark.parametrize("dtype, group_size", [("float32", 3), ("bfloat16", 8), ("bfloat16", 9)])
def test_lists_of_any_lengths_attend_as_sparse_decode_does(dtype, group_size, device, monkeypatch):
    from sparse_eval.kernels.ffd import launch

    form: dict[str, Any] = {"dtype": getattr(torch, dtype), "group_size": group_size}
    case = with_values(make_case(device, [96, 61, 40, 96, 7], integers=False, **form), e=24)
    pages = torch.full((5, 2, 12), -1, dtype=torch.int32)
    counts = torch.tensor([[12, 1], [0, 0], [5, 0], [2, 11], [1, 1]], dtype=torch.int32)
    for row in range(5):
        for head in range(2):
            pages[row, head, : counts[row, head]] = torch.arange(int(counts[row, head]))
    tensors = (case["q"], case["k"], case["v"], pages.to(device), counts.to(device), None)
    where: dict[str, Any] = {"page_size": 8, "scale": 0.25}
    want, want_lse = ATTEND(*tensors, case["lengths"], **where, backend="torch")
    for programs, tile in ((1, 128), (3, 16), (64, 32)):
        plan = launch.AttendPlan(tile, 4, 2, programs)
        monkeypatch.setattr(launch, "attend_plan_of", lambda *_, plan=plan: plan)
        out, lse = lists_decode(*tensors, case["lengths"], **where, backend="triton")
        close = 1e-5 if dtype == "float32" else 2e-2
        torch.testing.assert_close(out, want, rtol=0, atol=close)
        torch.testing.assert_close(lse, want_lse, rtol=0, atol=1e-5)
