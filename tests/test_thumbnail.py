"""Thumbnails: the quantiser, in-place extension, and the Triton kernels against torch."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from sparse_eval.kernels.thumbnail import (
    Residual,
    Thumbnail,
    extend_thumbnail,
    pack_residual,
    pack_thumbnail,
    score_error_bound,
    thumbnail_scores,
    unpack,
    unpack_residual,
)

FORMATS = [(2, "token"), (2, "channel"), (4, "token"), (4, "channel")]


def keys(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def step_of(t: Thumbnail) -> Tensor:
    """Each coordinate's step, [B, G, N, 1 or D], in float32."""
    step = t.step.float()
    return step[..., None] if t.rule == "token" else step.repeat_interleave(t.page_size, 2)


def test_four_codes_to_a_byte_at_half_and_one_and_a_half_steps():
    k = torch.tensor([-2.0, -0.1, 0.1, 2.0, 0.9, 1.1, -0.9, -1.1]).view(1, 1, 1, 8)
    t = pack_thumbnail(k, page_size=1)
    assert t.codes.shape == (1, 1, 1, 2) and t.step.flatten().tolist() == [1.0]
    want = [-1.5, -0.5, 0.5, 1.5, 0.5, 1.5, -0.5, -1.5]
    assert unpack(t).flatten().tolist() == want
    # byte 0: channels 0, 2, 4, 6 are codes 0, 2, 2, 1 from the lowest bits up
    assert t.codes.flatten().tolist()[0] == 0 | 2 << 2 | 2 << 4 | 1 << 6


@pytest.mark.parametrize(("bits", "rule"), FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_packing_levels_gives_them_back_exactly(bits, rule, dtype):
    cells = torch.randint(2**bits, (2, 3, 32, 24), generator=torch.Generator().manual_seed(1))
    cells[..., ::16, :] = cells[..., 0] = 0  # each step sees the largest magnitude
    level = ((cells + 0.5 - 2 ** (bits - 1)) * 0.25).to(dtype)
    outermost = 2 ** (bits - 1) - 0.5
    coverage = 2 ** (bits - 1) / outermost  # the outermost level is the largest magnitude
    t = pack_thumbnail(level, page_size=16, bits=bits, rule=rule, coverage=coverage)
    # the step is rounded up once, in the keys' dtype; the codes are exact
    assert torch.equal(unpack(t) / step_of(t), level.float() / 0.25)
    again = pack_thumbnail(unpack(t), page_size=16, bits=bits, rule=rule, coverage=coverage)
    assert torch.equal(again.codes, t.codes)


@pytest.mark.parametrize(("bits", "rule"), FORMATS)
def test_the_quantiser_is_symmetric_and_free_of_zero(bits, rule):
    k = keys(1, 2, 32, 16)
    level, mirrored = (
        unpack(pack_thumbnail(x, page_size=8, bits=bits, rule=rule)) for x in (k, -k)
    )
    assert torch.equal(level, -mirrored)
    assert torch.equal(level.sign(), k.sign())


@pytest.mark.parametrize("coverage", [1.0, 0.6, 4 / 3])
@pytest.mark.parametrize(("bits", "rule"), FORMATS)
def test_residual_error_is_at_most_half_its_step(bits, rule, coverage):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        k = keys(2, 2, 40, 16, dtype=dtype)
        k[0, 0, :16] = 0  # a page of zeros has no step
        t = pack_thumbnail(k, page_size=8, bits=bits, rule=rule, coverage=coverage)
        left = pack_residual(k, t)
        error = (unpack(t) + unpack_residual(left, t) - k.float()).abs()
        assert ((unpack(t) - k.float()).abs() <= t.reach * step_of(t) * (1 + 1e-6)).all()
        assert (error <= 0.5 * left.unit * step_of(t) * (1 + 1e-3)).all()


@pytest.mark.parametrize(("bits", "rule"), FORMATS)
def test_scores_are_the_levels_products_and_their_bound_holds(bits, rule):
    q, k = keys(3, 6, 16, seed=2), keys(3, 2, 32, 16)
    t = pack_thumbnail(k, page_size=8, bits=bits, rule=rule)
    score = thumbnail_scores(q, t, 0.25)
    want = 0.25 * torch.einsum("bgmd,bgnd->bgmn", q.unflatten(1, (2, 3)), unpack(t)).flatten(1, 2)
    torch.testing.assert_close(score, want)
    exact = 0.25 * torch.einsum("bgmd,bgnd->bgmn", q.unflatten(1, (2, 3)), k).flatten(1, 2)
    bound = score_error_bound(q, t, 0.25)
    assert bound.shape == score.shape and ((score - exact).abs() <= bound * (1 + 1e-5)).all()


@pytest.mark.parametrize(("bits", "rule"), FORMATS)
def test_extended_page_by_page_equals_packed_at_once(bits, rule):
    k = keys(2, 2, 70, 16, dtype=torch.bfloat16)
    start = torch.tensor([0, 3], dtype=torch.int32)
    live = torch.stack([k[0, :, :64], k[1, :, 3:67]])
    want = pack_thumbnail(live, page_size=8, bits=bits, rule=rule)
    left = pack_residual(live, want)
    t = pack_thumbnail(live[:, :, :13], page_size=8, bits=bits, rule=rule, capacity=64)
    residual = pack_residual(live[:, :, :13], t)
    assert t.num_pages == 8 and not t.codes[:, :, 8:].any()
    for length in range(14, 65):
        lengths = torch.full((2,), length, dtype=torch.int32)
        extend_thumbnail(t, k, start, lengths, residual=residual)
    assert torch.equal(t.codes, want.codes) and torch.equal(t.step, want.step)
    assert torch.equal(residual.codes, left.codes)


def test_only_full_pages_are_packed():
    k = keys(1, 1, 21, 8)
    k[:, :, 16:] = torch.nan
    t = pack_thumbnail(k, page_size=8)
    assert t.num_pages == 3 and not t.codes[:, :, 16:].any() and not t.step[:, :, 16:].any()
    short = pack_thumbnail(k[:, :, :5], page_size=8)
    assert short.num_pages == 1 and not short.codes.any()


def test_a_thumbnail_is_a_sixteenth_of_16_bit_keys_and_values():
    t = pack_thumbnail(keys(1, 1, 64, 128, dtype=torch.bfloat16), page_size=16)
    assert t.codes.numel() * 16 == 64 * 128 * 2 * 2
    assert t.num_bytes == t.codes.numel() + 64 * 2


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "bits": ({"bits": 3}, "bits must be one of 2, 4"),
    "bits as a float": ({"bits": 2.0}, "bits must be one of 2, 4, got 2.0"),
    "rule": ({"rule": "head"}, "rule must be one of token, channel"),
    "coverage": ({"coverage": 0}, "coverage must be a finite number > 0"),
    "endless coverage": ({"coverage": math.inf}, "coverage must be a finite number > 0"),
    "page size": ({"page_size": 0}, "page_size must be an integer >= 1"),
    "capacity": ({"capacity": 5}, "capacity must be an integer >= 16 tokens"),
    "channels": ({"k": torch.zeros(1, 1, 16, 6)}, "D a multiple of 4 for 2 bits"),
    "integers": ({"k": torch.zeros(1, 1, 16, 8).int()}, "k must be float"),
    "backend": ({"backend": "cuda"}, "backend must be one of"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_arguments_are_refused_in_one_line(what):
    change, message = BAD[what]
    good: dict[str, Any] = {"k": torch.zeros(1, 1, 16, 8), "page_size": 8}
    with pytest.raises(ValueError, match=message) as failure:
        pack_thumbnail(**good | change)
    assert "\n" not in str(failure.value)


def test_keys_and_queries_of_other_shapes_are_refused():
    t = pack_thumbnail(torch.zeros(1, 2, 16, 8), page_size=8)
    with pytest.raises(ValueError, match="as the thumbnail is"):
        pack_residual(torch.zeros(1, 2, 16, 8).half(), t)
    with pytest.raises(ValueError, match="a multiple of 2 heads"):
        thumbnail_scores(torch.zeros(1, 3, 8), t, 1.0)
    with pytest.raises(ValueError, match="batch 3"):
        thumbnail_scores(
            torch.zeros(3, 2, 8), pack_thumbnail(torch.zeros(2, 2, 16, 8), page_size=8), 1.0
        )


def test_extension_refuses_what_does_not_fit():
    k = torch.zeros(2, 2, 30, 8)
    t = pack_thumbnail(k, page_size=8)
    lengths = torch.tensor([24, 30], dtype=torch.int32)
    residual = pack_residual(k, t)
    table = torch.zeros(2, 4, dtype=torch.int32)
    pool = torch.zeros(9, 2, 16, 8)
    good: dict[str, Any] = {"thumbnail": t, "k": k, "starts": None, "lengths": lengths}
    extend_thumbnail(**good, residual=residual)
    extend_thumbnail(**good | {"thumbnail": pack_thumbnail(k[:, :, :24], page_size=8)})
    changes: list[tuple[dict[str, Any], str]] = [
        ({"thumbnail": pack_thumbnail(k[:, :, :16], page_size=8)}, "room for 24 tokens .* of 16"),
        ({"k": pool, "block_table": table}, "room for 64 tokens .* of 32"),
        ({"k": pool, "block_table": table.long()}, "block_table must be int32"),
        ({"k": torch.zeros(9, 2, 12, 8), "block_table": table}, "block_size 12 must be a multiple"),
        ({"k": torch.zeros(3, 2, 30, 8)}, "k must have batch 2"),
        ({"thumbnail": pack_thumbnail(k[[0, 1, 0]], page_size=8)}, "the thumbnail must have batch"),
        ({"lengths": lengths.long()}, r"lengths must be int32 \[2\], got"),
        ({"lengths": lengths[:, None]}, r"lengths must be int32 \[B\], got"),
        ({"starts": lengths[:1]}, r"starts must be int32 \[2\], got"),
        ({"residual": pack_residual(k, pack_thumbnail(k, page_size=8, coverage=0.6))}, "of unit"),
        ({"residual": pack_residual(k[:1], pack_thumbnail(k[:1], page_size=8))}, "residual must"),
    ]
    for change, message in changes:
        with pytest.raises(ValueError, match=message) as failure:
            extend_thumbnail(**good | change)
        assert "\n" not in str(failure.value)


@pytest.mark.parametrize(("bits", "rule"), FORMATS)
def test_at_coverage_one_levels_give_their_codes_back(bits, rule):
    t = pack_thumbnail(keys(1, 2, 32, 16), page_size=8, bits=bits, rule=rule)
    again = pack_thumbnail(unpack(t), page_size=8, bits=bits, rule=rule)
    assert torch.equal(again.codes, t.codes)
    share = (2 ** (bits - 1) - 0.5) / 2 ** (bits - 1)
    torch.testing.assert_close(again.step, t.step * share)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("bits", "rule"), FORMATS)
def test_the_kernel_packs_bit_for_bit_as_torch_does(bits, rule, dtype, device):
    k = keys(1, 2, 21, 24, dtype=dtype).to(device)
    form: dict[str, Any] = {"page_size": 8, "bits": bits, "rule": rule, "capacity": 32}
    form["coverage"] = 1.0 if bits == 2 else 0.7
    t, want = pack_thumbnail(k, backend="triton", **form), pack_thumbnail(k, **form)
    assert torch.equal(t.codes, want.codes) and torch.equal(t.step, want.step)
    left, left_want = pack_residual(k, t, backend="triton"), pack_residual(k, want)
    differs = left.codes != left_want.codes
    # a fused multiply-add may cross a cell's edge where float32 keys need rounding
    assert not differs.any() or (dtype == torch.float32 and differs.float().mean() < 1e-2)


@pytest.mark.parametrize("rule", ["token", "channel"])
def test_the_kernel_extends_as_torch_does_also_from_a_shuffled_pool(rule, device):
    k = keys(2, 2, 64, 16, dtype=torch.bfloat16).to(device)
    table = torch.tensor([[3, 1], [0, 2]], dtype=torch.int32, device=device)
    pool = torch.empty(4, 2, 32, 16, dtype=k.dtype, device=device)
    for row in range(2):
        for block in range(2):
            pool[table[row, block]] = k[row, :, 32 * block : 32 * block + 32]
    lengths = torch.tensor([48, 5], dtype=torch.int32, device=device)
    want = pack_thumbnail(k[:, :, :40], page_size=8, rule=rule, capacity=64)
    left = pack_residual(k[:, :, :40], want)
    results = []
    for cache, pages, backend in ((k, None, "torch"), (k, None, "triton"), (pool, table, "triton")):
        t = want.with_tensors(want.codes.clone(), want.step.clone())
        residual = Residual(left.codes.clone(), left.unit)
        extend_thumbnail(
            *(t, cache, None, lengths), residual=residual, block_table=pages, backend=backend
        )
        results.append((t.codes, t.step, residual.codes))
    assert results[0][0][0, :, 40:48].any() and not results[0][0][1, :, 40:].any()
    for got in results[1:]:
        assert all(torch.equal(x, y) for x, y in zip(got, results[0], strict=True))


@pytest.mark.parametrize(("bits", "rule"), FORMATS)
@pytest.mark.parametrize(
    ("group_size", "head_dim", "dtype"),
    [(1, 24, torch.float32), (6, 64, torch.bfloat16), (12, 16, torch.float16)],
    ids=str,
)
def test_the_kernel_scores_as_torch_does(group_size, head_dim, dtype, bits, rule, device):
    q = keys(2, 2 * group_size, head_dim, dtype=dtype, seed=2).to(device)
    k = keys(1, 2, 16, head_dim, dtype=dtype).to(device)
    t = pack_thumbnail(k, page_size=8, bits=bits, rule=rule)
    score = thumbnail_scores(q, t, 0.25, backend="triton").cpu()
    # the truth from the CPU: a GPU's own float32 products may be TF32
    on_cpu = t.with_tensors(t.codes.cpu(), t.step.cpu())
    torch.testing.assert_close(score, thumbnail_scores(q.cpu(), on_cpu, 0.25), rtol=1e-4, atol=2e-3)


def test_integer_queries_score_exactly(device):
    q = torch.randint(-60, 60, (2, 4, 32), generator=torch.Generator().manual_seed(0)).float()
    k = keys(2, 2, 32, 32).sign()  # steps of ½
    t = pack_thumbnail(k.to(device), page_size=8)
    score = thumbnail_scores(q.to(device), t, 0.25, backend="triton")
    assert torch.equal(score, thumbnail_scores(q.to(device), t, 0.25))


def test_the_kernel_refuses_pages_that_do_not_tile():
    k = torch.zeros(1, 1, 24, 8)
    with pytest.raises(ValueError, match="powers of two up to 512, got 12"):
        pack_thumbnail(k, page_size=12, backend="triton")
    assert pack_thumbnail(k, page_size=12).num_pages == 2


def test_lengths_may_lie_anyhow_in_memory(device):
    k = torch.randn(3, 2, 64, 32, generator=torch.Generator().manual_seed(0)).to(device)
    lengths = torch.full((3,), 64, dtype=torch.int32, device=device)
    for given in (lengths, lengths[:1].expand(3), torch.stack((lengths, -lengths), 1)[:, 0]):
        t = pack_thumbnail(k[:, :, :48], page_size=16, capacity=64, backend="torch")
        extend_thumbnail(t, k, None, given, backend="triton")
        want = pack_thumbnail(k, page_size=16, backend="torch")
        assert torch.equal(t.codes, want.codes) and torch.equal(t.step, want.step)
