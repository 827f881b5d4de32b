"""A whole decode step of Quest against its parts, in every plan and over pools."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from sparse_eval.kernels.quest_step import step_workspace
from sparse_eval.kernels.sparse_decode import sparse_decode
from sparse_eval.policies.quest import scales_of
from tests.quest_calls import STEP, make_call, policy, rule_of, select


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
