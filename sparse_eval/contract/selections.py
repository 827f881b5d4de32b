"""Promises that hold of every single selection, whatever it is of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch

from sparse_eval.contract.cases import batch_call, lists_of, prompt_queries
from sparse_eval.contract.subject import VARIANTS, Fault, Skip, Subject, expect, middle_budget
from sparse_eval.core import AttentionCall
from sparse_eval.policies.base import Policy, Selection, num_pages_of

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Sample:
    """One select call and what it gave."""

    policy: Policy
    call: AttentionCall
    budget: int | None
    selection: Selection

    @cached_property
    def label(self) -> str:
        p = self.policy
        return (
            f"page_size {p.page_size}, sink_pages {p.sink_pages}, local_pages {p.local_pages}, "
            f"budget {self.budget}, {self.call.group_size} heads a group, "
            f"{str(self.call.q_BHD.dtype).removeprefix('torch.')}"
        )

    @cached_property
    def rows(self) -> list[tuple[int, int, list[int], str]]:
        """Per row and list: live tokens, current page, pages, and where it is."""
        rows = []
        lengths = self.call.lengths_B.tolist()
        for length, lists in zip(lengths, lists_of(self.selection), strict=True):
            current = num_pages_of(length, self.policy.page_size) - 1
            for s, pages in enumerate(lists):
                where = f"{self.label}: a row of {length} tokens, list {s}, reads pages {pages}"
                rows.append((length, current, pages, where))
        return rows


def make_samples(subject: Subject) -> list[Sample]:
    """Groups of 1 to 8 heads, three page sizes, lengths around page borders, budgets from the
    least allowed to one that covers every row, three dtypes."""
    cases = [(fields, m, torch.float32) for fields in VARIANTS for m in range(1, 9)]
    cases += [(VARIANTS[0], 2, dtype) for dtype in DTYPES[1:]]
    samples = []
    for fields, group_size, dtype in cases:
        policy = subject.policy(**fields)
        size = policy.page_size
        pages = policy.sink_pages + policy.local_pages + 6
        just_covered = (pages - 3) * size + size // 2  # by the middle budget
        lengths = [0, 1, size - 1, size, size + 1, just_covered, pages * size - 1, pages * size]
        texts = [t.cast(dtype) for t in subject.texts(len(lengths), pages * size, group_size)]
        call = batch_call(texts, lengths, extent=pages * size + 3)
        state = policy.init(call, prompt_queries(texts, lengths))
        for budget in sample_budgets(policy, pages):
            samples.append(Sample(policy, call, budget, policy.select(call, state, budget)))
    return samples


def sample_budgets(policy: Policy, pages: int) -> list[int | None]:
    if policy.adaptive:
        return [None]
    some = middle_budget(policy)
    return [policy.min_budget, some, pages * policy.page_size] + [None] * policy.dense


def is_a_selection_of_its_pages(x: Sample) -> None:
    expect(isinstance(x.selection, Selection), f"{x.label}: returned {type(x.selection).__name__}")
    got = x.selection.page_size
    expect(got == x.policy.page_size, f"{x.label}: the selection's page_size is {got}")


def lists_are_int32_of_the_right_shape(x: Sample) -> None:
    pages, counts = x.selection.pages_BSK, x.selection.counts_BS
    rows, lists = len(x.call.q_BHD), (x.call.num_kv_heads, x.call.num_heads)
    wanted = f"[{rows}, {lists[0]} or {lists[1]}, K]"
    for name, tensor in (("pages", pages), ("counts", counts)):
        expect(tensor.dtype == torch.int32, f"{x.label}: {name} are {tensor.dtype}, not int32")
        expect(
            tensor.device == x.call.device, f"{x.label}: {name} on {tensor.device}, not the call's"
        )
    fits = pages.dim() == 3 and len(pages) == rows and pages.shape[1] in lists
    expect(fits, f"{x.label}: pages are {list(pages.shape)}, not {wanted}")
    fits = counts.shape == pages.shape[:2]
    expect(fits, f"{x.label}: counts are {list(counts.shape)} beside pages {list(pages.shape)}")


def counts_match_and_empty_slots_are_minus_one(x: Sample) -> None:
    pages, counts = x.selection.pages_BSK, x.selection.counts_BS
    slot = torch.arange(pages.shape[-1], device=pages.device)
    valid = pages != -1
    ordered = (valid == (slot < valid.sum(-1, keepdim=True))).all(-1)
    for pages_K in pages[~ordered].tolist()[:1]:
        raise Fault(f"{x.label}: valid ids do not come first and -1 after: {pages_K}")
    wrong = counts != valid.sum(-1)
    for count, pages_K in zip(counts[wrong].tolist(), pages[wrong].tolist(), strict=True):
        raise Fault(f"{x.label}: the count is {count} for {pages_K}")


def ids_are_live_pages(x: Sample) -> None:
    for _, current, pages, where in x.rows:
        expect(all(0 <= p <= current for p in pages), f"{where}, its live pages are 0 to {current}")


def ids_ascend_without_duplicates(x: Sample) -> None:
    for _, _, pages, where in x.rows:
        expect(pages == sorted(set(pages)), f"{where}, not ascending or twice")


def current_page_is_read(x: Sample) -> None:
    for length, current, pages, where in x.rows:
        expect(not length or current in pages, f"{where}, its current page is {current}")


def sinks_and_local_pages_are_read(x: Sample) -> None:
    if not x.policy.realisable:
        raise Skip("bound by the current page alone")
    for _, current, pages, where in x.rows:
        sinks = range(min(x.policy.sink_pages, current + 1))
        local = range(max(current + 1 - x.policy.local_pages_at(x.budget), 0), current + 1)
        missing = sorted({*sinks, *local} - set(pages))
        expect(not missing, f"{where}, sink or local pages {missing} are missing")


def budget_is_kept(x: Sample) -> None:
    """By the union of a group's lists, or the optional cap (max_tokens) of an adaptive policy."""
    budget = getattr(x.policy, "max_tokens", None) if x.policy.adaptive else x.budget
    if budget is None or x.policy.dense:
        raise Skip("has no budget")
    group_lists = x.selection.pages_BSK.shape[1] // x.call.num_kv_heads
    for b, lists in enumerate(lists_of(x.selection)):
        for g in range(x.call.num_kv_heads):
            union = sorted({p for s in lists[g * group_lists : (g + 1) * group_lists] for p in s})
            length = int(x.call.lengths_B[b])
            fits = len(union) <= budget // x.policy.page_size or length <= budget
            expect(fits, f"{x.label}: a KV head of a row of {length} tokens reads pages {union}")


def budget_is_used(x: Sample) -> None:
    if x.budget is None or x.selection.pages_BSK.shape[1] != x.call.num_kv_heads:
        raise Skip("no fixed count, or a list per query head")
    for _, current, pages, where in x.rows:
        least = min(current + 1, x.budget // x.policy.page_size)
        expect(len(pages) >= least, f"{where}, the budget allows {least}")


def a_budget_that_covers_the_row_reads_everything(x: Sample) -> None:
    if x.policy.adaptive:
        raise Skip("takes no budget")
    for length, current, pages, where in x.rows:
        covered = x.policy.dense or (x.budget is not None and length <= x.budget)
        expect(not covered or len(pages) == current + 1, f"{where}, not all of 0 to {current}")


SELECTION_CHECKS: tuple[Callable[[Sample], None], ...] = (
    is_a_selection_of_its_pages,
    lists_are_int32_of_the_right_shape,
    counts_match_and_empty_slots_are_minus_one,
    ids_are_live_pages,
    ids_ascend_without_duplicates,
    current_page_is_read,
    sinks_and_local_pages_are_read,
    budget_is_kept,
    budget_is_used,
    a_budget_that_covers_the_row_reads_everything,
)
