"""Quest's selection and step: the Triton kernels against the torch policy and the reference."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor

from sparse_eval.core import AttentionCall
from sparse_eval.kernels.quest_select import quest_select, update_metadata
from sparse_eval.kernels.quest_step import quest_step, step_workspace
from sparse_eval.kernels.sparse_decode import sparse_decode
from sparse_eval.policies.quest import Quest, scales_of

SELECT: Any = quest_select
STEP: Any = quest_step


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request) -> str:
    if request.param == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip(
            "the kernel is compiled in this process: set TRITON_INTERPRET=1 to interpret it"
        )
    return request.param


def make_call(
    device: str,
    lengths: list[int],
    *,
    dtype: torch.dtype = torch.float32,
    integers: bool = True,
    kv_heads: int = 2,
    group_size: int = 3,
    head_dim: int = 24,
    tokens: int = 200,
    starts: list[int] | None = None,
    shared: bool = False,
    seed: int = 0,
) -> AttentionCall:
    """Rows over a random cache; integers make every score exact, with many ties."""
    rng = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        values = torch.randint(-2, 3, shape, generator=rng) if integers else None
        real = torch.randn(shape, generator=rng) if values is None else values
        return real.to(device, dtype)

    rows = len(lengths)
    cache = (1 if shared else rows, kv_heads, tokens, head_dim)
    return AttentionCall(
        q_BHD=draw(rows, kv_heads * group_size, head_dim),
        k_BGND=draw(*cache),
        v_BGNE=draw(*cache),
        lengths_B=torch.tensor(lengths, dtype=torch.int32, device=device),
        starts_B=None if starts is None else torch.tensor(starts, device=device).int(),
        scale=0.25,
        layer=0,
    )


def policy(**fields: Any) -> Quest:
    return Quest(**{"select_backend": "torch", **fields})


def select(call: AttentionCall, quest: Quest, state: Any, budget: int, **options: Any) -> Any:
    return SELECT(
        *(call.q_BHD, call.k_BGND, state.center_BGPD, state.spread_BGPD),
        *(call.starts_B, call.lengths_B),
        **rule_of(quest, call, budget),
        **{"backend": "triton", "scales": scales_of(state), **options},
    )


def rule_of(quest: Quest, call: AttentionCall, budget: int) -> dict[str, Any]:
    return {
        "page_size": quest.page_size,
        "budget": budget,
        "sink_pages": quest.sink_pages,
        "local_pages": quest.local_pages,
        "group": quest.group,
        "scale": call.scale,
    }


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


def test_a_step_is_update_select_and_attend(device):
    call = make_call(device, [96, 200, 0], dtype=torch.bfloat16, integers=False)
    quest = policy()
    truth = quest.init(call)
    mid, half = truth.center_BGPD.clone(), truth.spread_BGPD.clone()
    mid[0, :, 5], half[0, :, 5] = 99, 0
    tensors = (call.q_BHD, call.k_BGND, call.v_BGNE)
    rule = rule_of(quest, call, 64) | {"backend": "triton"}
    out, lse, pages, counts = STEP(*tensors, mid, half, None, call.lengths_B, **rule)
    again = STEP(*tensors, mid, half, None, call.lengths_B, **rule)
    assert all(torch.equal(x, y) for x, y in zip(again, (out, lse, pages, counts), strict=True))
    assert torch.equal(mid[0, :, 5], truth.center_BGPD[0, :, 5])
    want = select(call, quest, truth, 64)
    assert torch.equal(pages, want[0]) and torch.equal(counts, want[1])
    near, near_lse = sparse_decode(
        *(*tensors, pages, counts, None, call.lengths_B),
        page_size=16,
        scale=call.scale,
        backend="torch",
    )
    torch.testing.assert_close(out.float(), near.float(), rtol=0, atol=2e-2)
    torch.testing.assert_close(lse, near_lse, rtol=1e-5, atol=1e-5)


PLANS = {"four launches": True, "three, splits choose": False}


@pytest.mark.parametrize("plan", PLANS)
def test_every_plan_of_a_step_does_the_same_and_leaves_its_workspace_clean(plan, device):
    from sparse_eval.kernels.quest_select.launch import ScorePlan
    from sparse_eval.kernels.quest_step.launch import StepPlan, quest_step_triton
    from sparse_eval.kernels.sparse_decode.launch import Plan

    call = make_call(device, [96, 200, 0], dtype=torch.bfloat16)
    quest = policy()
    state = quest.init(call)
    want_pages, want_counts = select(call, quest, state, 80, backend="torch")
    tensors = (call.q_BHD, call.k_BGND, call.v_BGNE)
    want, want_lse = sparse_decode(
        *(*tensors, want_pages, want_counts, None, call.lengths_B),
        page_size=16,
        scale=call.scale,
        backend="torch",
    )
    workspace = step_workspace(3, 2, 13, device)
    for splits, block_t in ((1, 32), (5, 16)):
        shape = StepPlan(
            score=ScorePlan(32, 3, 4, 2),
            attend=Plan(block_t, 4, 2),
            num_splits=splits,
            chooses=PLANS[plan],
        )
        mid, half = state.center_BGPD.clone(), state.spread_BGPD.clone()
        mid[0, :, 5], half[0, :, 5] = 99, 0  # that page has just filled
        runs = [
            quest_step_triton(
                *(*tensors, mid, half, None, call.lengths_B),
                **rule_of(quest, call, 80),
                block_table=None,
                workspace=workspace,
                plan=shape,
            )
            for _ in range(2)
        ]
        assert all(torch.equal(x, y) for x, y in zip(*runs, strict=True))
        out, lse, pages, counts = runs[0]
        assert torch.equal(pages, want_pages) and torch.equal(counts, want_counts)
        assert torch.equal(mid, state.center_BGPD) and torch.equal(half, state.spread_BGPD)
        torch.testing.assert_close(out.float(), want.float(), rtol=0, atol=2e-2)
        torch.testing.assert_close(lse, want_lse, rtol=1e-5, atol=1e-5)
        assert not any(x.int().any() for x in workspace)


def test_a_step_over_a_shuffled_pool_equals_the_contiguous_one_bit_for_bit(device):
    call = make_call(device, [96, 77], dtype=torch.bfloat16, integers=False, tokens=96)
    quest = policy()
    state = quest.init(call)
    call.k_BGND[1, :, :32], call.v_BGNE[1, :, :32] = call.k_BGND[0, :, :32], call.v_BGNE[0, :, :32]
    state = quest.init(call)
    table = torch.tensor([[4, 1, 0], [4, 3, 2]], dtype=torch.int32, device=device)
    pools = []
    for x in (call.k_BGND, call.v_BGNE):
        pool = torch.full((5, 2, 32, 24), torch.nan, dtype=x.dtype, device=device)
        for row in range(2):
            for block in range(3):
                pool[table[row, block]] = x[row, :, 32 * block : 32 * block + 32]
        pools.append(pool)
    rule = rule_of(quest, call, 64) | {"backend": "triton"}

    def run(k: Tensor, v: Tensor, **options: Any) -> Any:
        mid, half = state.center_BGPD.clone(), state.spread_BGPD.clone()
        mid[0, :, 5] = 55  # page 5 of row 0 has just filled: the step writes it
        args = (call.q_BHD, k, v, mid, half, None, call.lengths_B)
        return (*STEP(*args, **rule, **options), mid, half)

    paged, plain = run(*pools, block_table=table), run(call.k_BGND, call.v_BGNE)
    for got, want in zip(paged, plain, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("where", ["a cache", "rows that start later", "a pool"])
def test_a_step_whose_tiles_are_pages_reads_each_once_whatever_holds_it(where, device):
    from sparse_eval.kernels.quest_select.launch import ScorePlan
    from sparse_eval.kernels.quest_step.launch import StepPlan, quest_step_triton
    from sparse_eval.kernels.sparse_decode.launch import Plan

    starts = [3, 20] if where == "rows that start later" else None
    call = make_call(
        device, [180, 97], dtype=torch.bfloat16, integers=False, tokens=224, starts=starts
    )
    quest = policy(sink_pages=2)
    state = quest.init(call)
    k, v, table = call.k_BGND, call.v_BGNE, None
    if where == "a pool":
        order = torch.randperm(28, generator=torch.Generator().manual_seed(0)).to(device)
        table = order.int().reshape(2, 14)
        k, v = (torch.empty_like(x).reshape(28, 2, 16, 24) for x in (k, v))
        for pool, x in ((k, call.k_BGND), (v, call.v_BGNE)):
            pool[order] = x.unflatten(2, (14, 16)).transpose(1, 2).flatten(0, 1)
    pages, counts = select(call, quest, state, 96, backend="torch")
    want, want_lse = sparse_decode(
        *(call.q_BHD, call.k_BGND, call.v_BGNE, pages, counts, call.starts_B, call.lengths_B),
        page_size=16,
        scale=call.scale,
        backend="torch",
    )
    for splits in (1, 3, 8):
        out, lse, got, _ = quest_step_triton(
            *(call.q_BHD, k, v, state.center_BGPD, state.spread_BGPD),
            *(call.starts_B, call.lengths_B),
            **rule_of(quest, call, 96),
            block_table=table,
            workspace=None,
            plan=StepPlan(ScorePlan(64, None, 4, 2), Plan(16, 4, 2), splits, chooses=False),
        )
        assert torch.equal(got, pages)
        torch.testing.assert_close(out.float(), want.float(), rtol=0, atol=2e-2)
        torch.testing.assert_close(lse, want_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("metadata_dtype", ["auto", "int8"])
@pytest.mark.parametrize("chooses", [True, False])
def test_a_graph_of_one_step_stays_right_while_the_cache_grows(chooses, metadata_dtype):
    from sparse_eval.kernels.quest_step.launch import StepPlan, quest_step_triton, step_plan_of

    call = make_call("cuda", [4000, 3000], dtype=torch.bfloat16, head_dim=128, tokens=4200)
    quest = policy(page_size=64, metadata_dtype=metadata_dtype)
    state, workspace = quest.init(call), step_workspace(2, 2, 66, "cuda")
    plan = StepPlan(**vars(step_plan_of(4, 66, 1024, 64, 256, call.device)) | {"chooses": chooses})

    def run(of: Any) -> tuple[Tensor, ...]:
        return quest_step_triton(
            *(call.q_BHD, call.k_BGND, call.v_BGNE, of.center_BGPD, of.spread_BGPD),
            *(None, call.lengths_B),
            **rule_of(quest, call, 1024),
            block_table=None,
            scales=scales_of(of),
            workspace=workspace,
            plan=plan,
        )

    run(state)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run(state)
    for _ in range(130):  # both rows fill two pages
        call.lengths_B.add_(1)
        call.q_BHD.copy_(torch.randint_like(call.q_BHD, -2, 3))  # every score is exact
        graph.replay()
        kept = [x.clone() for x in results]
        rebuilt = quest.init(call)
        assert all(torch.equal(x, y) for x, y in zip(kept, run(rebuilt), strict=True))
        chosen = quest.select(call, rebuilt, 1024)  # by torch
        assert torch.equal(kept[2], chosen.pages_BSK) or metadata_dtype == "int8"
        assert not any(x.view(torch.int32).any() for x in workspace)


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


def test_a_workspace_of_another_shape_is_refused_in_one_line():
    call = make_call("cpu", [200])
    state = policy().init(call)
    tensors = (call.q_BHD, call.k_BGND, call.v_BGNE, state.center_BGPD, state.spread_BGPD)
    rule = rule_of(policy(), call, 64) | {"backend": "torch"}
    STEP(*tensors, None, call.lengths_B, workspace=step_workspace(1, 2, 13, "cpu"), **rule)
    for wrong, message in (((2, 2, 13), "workspace.flags must be"), ((1, 2, 20), "workspace.keys")):
        with pytest.raises(ValueError, match=message) as failure:
            STEP(*tensors, None, call.lengths_B, workspace=step_workspace(*wrong, "cpu"), **rule)
        assert "\n" not in str(failure.value)


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
