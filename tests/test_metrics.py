"""Metrics and the ledger on cases a human can check."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from sparse_eval import ledger, metrics
from sparse_eval.policies.base import Selection, State
from sparse_eval.record import repeated_ngram_share
from sparse_eval.tasks.recall import loop_warning


def test_mass_is_the_share_of_the_softmax():
    dense = torch.tensor([[math.log(4.0), math.log(8.0)]])
    selected = torch.tensor([[math.log(1.0), math.log(6.0)]])
    torch.testing.assert_close(
        metrics.mass(selected, dense), torch.tensor([[0.25, 0.75]], dtype=torch.float64)
    )


def test_nothing_selected_holds_nothing():
    assert metrics.mass(torch.tensor([[-math.inf]]), torch.tensor([[1.0]])).item() == 0


def test_contested_is_nan_where_forced_pages_hold_nearly_all():
    recall, forced = torch.tensor([0.9, 1.0]), torch.tensor([0.8, 0.9995])
    ours = metrics.contested(recall.double(), forced.double())
    assert ours[0].item() == pytest.approx(0.5) and ours[1].isnan()


def test_output_error_is_a_ratio_of_sums_per_kv_head():
    dense = torch.tensor([[[3.0, 4.0], [0.0, 0.0], [1.0, 0.0], [0.0, 1.0]]])  # one query, 4 heads
    sparse = dense.clone()
    sparse[0, 1] = torch.tensor([3.0, 4.0])
    ours = metrics.output_error(sparse, dense, num_kv_heads=2)
    assert ours.tolist() == [1.0, 0.0]


def test_p10_runs_over_queries_and_the_groups_heads():
    x = torch.arange(22, dtype=torch.float64).reshape(11, 2)  # 11 queries, 1 group of 2 heads
    assert metrics.p10_per_kv_head(x, 1).item() == pytest.approx(2.1)


def test_overlap_with_the_oracle():
    mass = torch.tensor([[[0.5, 0.1, 0.3, 0.1]]])  # one query, one list, four pages
    current = torch.tensor([[False, False, False, True]])
    ranks = metrics.page_ranks(mass, current)
    assert ranks.tolist() == [[[1, 3, 2, 0]]]
    chosen = torch.tensor([[[False, True, False, True]]])
    assert metrics.page_overlap(chosen, ranks).item() == 0.5


def test_tokens_read_counts_a_partial_page_as_what_it_holds():
    selection = Selection(torch.tensor([[[0, 2, -1]]]), torch.tensor([[2]]), 4)
    mask = ledger.page_mask(selection, 4)
    assert mask.tolist() == [[[True, False, True, False]]]
    assert ledger.tokens_read(mask, torch.tensor([10]), 4).tolist() == [[6]]


def test_a_groups_union_counts_a_page_once():
    mask = torch.tensor([[[True, True, False], [False, True, True]]])  # two heads of one group
    union = ledger.union_of_group(mask, 1)
    assert union.tolist() == [[[True, True, True]]]
    assert ledger.tokens_read(union, torch.tensor([12]), 4).tolist() == [[12]]


@dataclass
class Boxes(State):
    mid: Tensor
    unused: Tensor
    paged: ClassVar[tuple[str, ...]] = ("mid",)


def test_metadata_bytes_are_those_of_the_tensors_that_were_touched():
    state = Boxes(torch.zeros(1, 2, 8, 16), torch.zeros(1, 2, 1000))
    recorder = ledger.ReadRecorder(state)
    _ = recorder.mid
    assert recorder.touched == {"mid"}
    # 6 of 8 pages are live: 6 pages x 16 channels x 4 bytes per KV head
    assert ledger.state_bytes(state, recorder.touched, 2, 6) == 6 * 16 * 4


def test_repeated_4grams():
    assert repeated_ngram_share([1, 2, 3, 4, 5, 6]) == 0
    assert repeated_ngram_share([1, 2, 3, 4] * 8) == pytest.approx(25 / 29)


def test_a_loop_is_told_with_a_cure_that_is_not_in_use():
    assert "queries=text feeds" in loop_warning(0, 0.5, "greedy")
    assert "prompt 1: 50% of" in loop_warning(1, 0.5, "text")
    assert "queries=text" not in loop_warning(1, 0.5, "text")
