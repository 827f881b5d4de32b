"""Quest's selection and step: the Triton kernels against the torch policy and the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sparse_eval.kernels.quest_select import quest_select, update_metadata
from sparse_eval.kernels.sparse_decode import sparse_decode
from sparse_eval.policies.quest import Quest, scales_of
from tests.quest_calls import SELECT, STEP, make_call, policy, rule_of, select


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("group", ["max", "sum"])
def test_selects_exactly_the_pages_of_the_torch_policy(group, dtype, device):
    quest = policy(group=group)
    for lengths in ([1, 0, 16], [40, 64, 65], [200, 97, 128]):
        call = make_call(device, lengths, dtype=dtype)
        state = quest.init(call)
        want = quest.select(call, state, 64)
        for backend in ("triton", "torch"):
            pages, counts = select(call, quest, state, 64, backend=backend)
            assert torch.equal(pages, want.pages_BSK)
            assert torch.equal(counts, want.counts_BS)


def test_real_scores_select_equal_mass(device):
    call = make_call(device, [200, 150], dtype=torch.bfloat16, integers=False)
    quest = policy()
    state = quest.init(call)
    want = quest.select(call, state, 80)
    pages, counts = select(call, quest, state, 80)
    attend: dict[str, Any] = {"page_size": 16, "scale": call.scale, "backend": "torch"}
    tensors = (call.q_BHD, call.k_BGND, call.v_BGNE)
    _, lse = sparse_decode(*tensors, pages, counts, None, call.lengths_B, **attend)
    _, lse_want = sparse_decode(
        *tensors, want.pages_BSK, want.counts_BS, None, call.lengths_B, **attend
    )
    torch.testing.assert_close(lse, lse_want, rtol=0, atol=1e-4)


def test_padded_rows_and_rows_of_one_cache(device):
    quest = policy(page_size=8, sink_pages=2, local_pages=1)
    padded = make_call(device, [190, 96, 33], starts=[3, 5, 9])
    replay = make_call(device, [180, 181, 184, 8], shared=True)
    for call in (padded, replay):
        state = quest.init(call)
        want = quest.select(call, state, 48)
        pages, counts = select(call, quest, state, 48)
        assert torch.equal(pages, want.pages_BSK) and torch.equal(counts, want.counts_BS)


def test_all_equal_scores_take_the_lowest_pages(device):
    call = make_call(device, [200])
    call.k_BGND.fill_(1)
    quest = policy(sink_pages=0, local_pages=1)
    pages, counts = select(call, quest, quest.init(call), 5 * 16)
    assert pages.tolist() == [[[0, 1, 2, 3, 12]] * 2] and counts.tolist() == [[5, 5]]


def test_a_nan_page_comes_last_and_infinite_ones_first(device):
    call = make_call(device, [160], group_size=1)
    call.q_BHD.fill_(1)
    quest = policy(sink_pages=0, local_pages=1)
    state = quest.init(call)
    state.center_BGPD[:, :, 2], state.spread_BGPD[:, :, 5] = torch.nan, torch.inf
    want = quest.select(call, state, 9 * 16)
    pages, _ = select(call, quest, state, 9 * 16)
    assert torch.equal(pages, want.pages_BSK)
    assert 2 not in pages[0, 0] and 5 in pages[0, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_metadata_of_a_full_page_is_written_in_place_and_covers_its_keys(dtype, device):
    for starts in (None, [7, 0]):
        call = make_call(device, [96, 65], dtype=dtype, integers=False, starts=starts)
        truth = policy().init(call)
        arguments = (call.k_BGND, call.starts_B, call.lengths_B)
        for backend in ("triton", "torch"):
            mid = truth.center_BGPD.clone()
            half = truth.spread_BGPD.clone()
            for x in (mid, half):
                x[0, :, 5] = x[1, :, 3] = 77
            k, start, length = arguments
            update_metadata(k, mid, half, start, length, page_size=16, backend=backend)
            for row, full in ((0, 6), (1, 4)):
                assert torch.equal(mid[row, :, :full], truth.center_BGPD[row, :, :full])
                assert torch.equal(half[row, :, :full], truth.spread_BGPD[row, :, :full])


def test_metadata_in_8_bits_is_the_torch_policys_bit_for_bit(device):
    for dtype, starts in ((torch.bfloat16, None), (torch.float32, [7, 0])):
        call = make_call(device, [96, 65], dtype=dtype, integers=False, starts=starts)
        call.k_BGND[0, 0, 87:96] = 0
        truth = policy(metadata_dtype="int8").init(call)
        for backend in ("triton", "torch"):
            got = [x.clone() for x in truth.tensors().values()]
            for x in got:
                x[0, :, 5] = x[1, :, 3] = 77
            mid, half, scales = got
            update_metadata(
                *(call.k_BGND, mid, half, call.starts_B, call.lengths_B),
                page_size=16,
                backend=backend,
                scales=scales,
            )
            for x, want in zip(got, truth.tensors().values(), strict=True):
                assert torch.equal(x[0, :, :6], want[0, :, :6])
                assert torch.equal(x[1, :, :4], want[1, :, :4])


@pytest.mark.parametrize("group", ["max", "sum"])
def test_metadata_in_8_bits_selects_the_pages_of_the_torch_policy(group, device):
    call = make_call(device, [200, 97, 0], dtype=torch.bfloat16, integers=False)
    quest = policy(group=group, metadata_dtype="int8")
    state = quest.init(call)
    want = quest.select(call, state, 80)
    rule = rule_of(quest, call, 80) | {"backend": "triton", "scales": scales_of(state)}
    tensors = (call.q_BHD, call.k_BGND, call.v_BGNE, state.center_BGPD, state.spread_BGPD)
    for backend in ("triton", "torch"):
        pages, counts = select(call, quest, state, 80, backend=backend)
        assert torch.equal(pages, want.pages_BSK) and torch.equal(counts, want.counts_BS)
    assert torch.equal(STEP(*tensors, None, call.lengths_B, **rule)[2], want.pages_BSK)


@pytest.mark.parametrize("metadata_dtype", ["auto", "int8"])
def test_a_policy_that_extends_by_kernel_selects_as_one_that_rebuilds(metadata_dtype, device):
    call = make_call(device, [61], tokens=100)
    by_kernel = policy(select_backend="triton", metadata_dtype=metadata_dtype)
    rebuilt = policy(metadata_dtype=metadata_dtype)
    state = by_kernel.init(call)
    for length in (*range(62, 66), *range(78, 82), 96, 99):
        call.lengths_B.fill_(length)
        by_kernel.extend(state, call)
        got = by_kernel.select(call, state, 64)
        want = rebuilt.select(call, rebuilt.init(call), 64)
        assert torch.equal(got.pages_BSK, want.pages_BSK)


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [16, 64])
def test_long_caches_select_as_the_torch_policy_does(page_size):
    quest = policy(page_size=page_size)
    call = make_call(
        "cuda", [65536, 60001], dtype=torch.bfloat16, head_dim=128, group_size=6, tokens=65536
    )
    state = quest.init(call)
    want = quest.select(call, state, 2048)
    pages, counts = select(call, quest, state, 2048)
    assert torch.equal(pages, want.pages_BSK) and torch.equal(counts, want.counts_BS)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "a group rule": ({"group": "softmax_sum"}, "group must be one of max, sum"),
    "a small budget": ({"budget": 47}, "budget must be an integer >= 48"),
    "no local page": ({"local_pages": 0}, "local_pages must be an integer >= 1"),
    "a page of nothing": ({"page_size": 0}, "page_size must be an integer >= 1"),
    "a backend": ({"backend": "cuda"}, "backend must be one of"),
    "lengths as int64": ({"lengths": torch.ones(1).long()}, "lengths must be int32"),
    "other heads": ({"mid": torch.zeros(1, 3, 13, 24)}, "mid and half must both be"),
    "bytes without scales": (
        {"mid": torch.zeros(1, 2, 13, 24).char(), "half": torch.zeros(1, 2, 13, 24).byte()},
        "must share a float dtype",
    ),
    "floats with scales": ({"scales": torch.ones(1, 2, 13, 2)}, "must be int8, uint8 and float32"),
    "a query": ({"q": torch.zeros(1, 5, 24)}, "q must be"),
    "keys of three axes": ({"k": torch.zeros(2, 208, 24)}, "k must be 4-D"),
    "keys of other rows": ({"k": torch.zeros(3, 2, 208, 24)}, r"k must have batch 1 .* got 3"),
    "starts of other rows": ({"starts": torch.zeros(2).int()}, r"starts must be int32 \[1\]"),
    "starts as floats": ({"starts": torch.zeros(1)}, "starts must be int32"),
    "a table as int64": (
        {"k": torch.zeros(9, 2, 32, 24), "block_table": torch.zeros(1, 9).long()},
        "block_table must be int32",
    ),
    "blocks of part pages": (
        {"k": torch.zeros(9, 2, 24, 24), "block_table": torch.zeros(1, 9).int()},
        "block_size 24 must be a multiple of page_size 16",
    ),
    "no scale": ({"scale": float("nan")}, "scale must be a finite number"),
}
UPDATE_KEYS = {"k", "mid", "half", "starts", "lengths", "page_size", "block_table", "scales"}


@pytest.mark.parametrize("what", BAD)
def test_bad_arguments_are_refused_in_one_line(what):
    change, message = BAD[what]
    call = make_call("cpu", [200])
    state = policy().init(call)
    good = {
        "q": call.q_BHD,
        "k": call.k_BGND,
        "mid": state.center_BGPD,
        "half": state.spread_BGPD,
        "starts": None,
        "lengths": call.lengths_B,
        **rule_of(policy(), call, 64),
        "backend": "torch",
    }
    with pytest.raises(ValueError, match=message) as failure:
        quest_select(**good | change)
    assert "\n" not in str(failure.value)
    if {*change} <= UPDATE_KEYS:
        given = {name: x for name, x in (good | change).items() if name in UPDATE_KEYS}
        with pytest.raises(ValueError, match=message):
            update_metadata(**given, backend="torch")


def test_a_rule_the_kernel_lacks_is_refused_not_replaced():
    with pytest.raises(ValueError, match="select_backend triton takes group max or sum"):
        Quest(group="softmax_sum", select_backend="triton")
    with pytest.raises(ValueError, match="select_backend must be one of"):
        Quest(select_backend="cuda")


@pytest.mark.parametrize("how", ["expanded", "every other"])
def test_lengths_and_starts_may_lie_anyhow_in_memory(how, device):
    call = make_call(device, [130, 130, 130], starts=[8, 8, 8])
    assert call.starts_B is not None
    if how == "expanded":
        lengths, starts = (x[:1].expand(3) for x in (call.lengths_B, call.starts_B))
    else:
        lengths, starts = (
            torch.stack((x, -x), 1).flatten()[::2] for x in (call.lengths_B, call.starts_B)
        )
    quest, boxes = policy(), []
    for at in ((call.starts_B, call.lengths_B), (starts, lengths)):
        mid, half = (call.k_BGND.new_zeros(3, 2, 8, 24) for _ in range(2))
        update_metadata(call.k_BGND, mid, half, *at, page_size=16, backend="triton")
        args = (call.q_BHD, call.k_BGND, mid, half, *at)
        found = SELECT(*args, **rule_of(quest, call, 64), backend="triton", update=True)
        boxes.append((mid, half, *found))
    for got, want in zip(*boxes, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("starts", [None, [0, 40, 20]])
def test_a_length_counts_as_far_as_the_cache_and_its_metadata_reach(starts, device):
    """64 tokens of room, four pages: what lies beyond is neither read nor written."""
    call = make_call(device, [90, 64, 63], tokens=64, starts=starts)
    room = [64, 64, 63] if starts is None else [64, 24, 44]
    short = make_call(device, room, tokens=64, starts=starts)
    quest = policy(sink_pages=0, local_pages=1)
    found = []
    for at, backend in ((call, "triton"), (call, "torch"), (short, "torch")):
        mid, half = (call.k_BGND.new_full((3, 2, 4, 24), -7.0) for _ in range(2))
        tensors = (mid, half, at.starts_B, at.lengths_B)
        update_metadata(call.k_BGND, *tensors, page_size=16, backend=backend)
        args = (call.q_BHD, call.k_BGND, *tensors)
        pages = SELECT(*args, **rule_of(quest, call, 32), backend=backend)
        found.append((mid, half, *pages))
    for got, want in zip(zip(*found, strict=True), found[2], strict=True):
        assert all(torch.equal(x, want) for x in got)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("group_size", [1, 64])
def test_score_tiles_fit_a_multiprocessor(dtype, head_dim, group_size):
    """Shared memory that Triton 3.6 took for sm_90: float32, 256 channels, 3 stages of 64 pages
    304 KB, 2 stages of 32 pages 96 KB."""
    from sparse_eval.kernels.quest_select.launch import ScorePlan, fitting

    q_bytes = dtype.itemsize
    for metadata_bytes in {1, q_bytes}:
        given = ScorePlan(64, 132, 4, 4 if metadata_bytes == 1 else 3)
        plan = fitting(given, max(16, group_size), head_dim, q_bytes, metadata_bytes)
        if head_dim <= 128 and group_size == 1:
            assert plan == given  # what was measured stays
        tiles = 2 * plan.block_p * head_dim * metadata_bytes * (plan.num_stages - 1)
        assert tiles <= 160 * 1024 and plan.block_p >= 16 and plan.num_stages >= 2
