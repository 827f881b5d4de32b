"""Promises about how selections relate: to other rows, to padding, to time, to the state kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sparse_eval.contract.cases import (
    Lists,
    batch_call,
    decode,
    first_step,
    lists_of,
    on_meta,
    prompt_queries,
    replay_call,
)
from sparse_eval.contract.subject import Fault, Skip, Subject, expect, few_policies, middle_budget
from sparse_eval.policies.base import Policy, num_pages_of


def is_hashable_and_names_its_fields(subject: Subject) -> None:
    policy = subject.policy()
    expect(hash(policy) == hash(subject.policy()), "two equal policies have different hashes")
    expect("page_size" in policy.config(), f"config() lacks page_size: {policy.config()}")


def a_budget_below_the_forced_pages_is_refused(subject: Subject) -> None:
    policy = subject.policy()
    if policy.adaptive or policy.dense:
        raise Skip("needs no budget")
    texts = subject.texts(1, 12 * policy.page_size)
    lengths = [12 * policy.page_size]
    for budget in (policy.min_budget - 1, None):
        try:
            first_step(policy, texts, lengths, budget)
        except ValueError as error:
            named = str(policy.min_budget) in str(error)
            expect(named, f"the error does not name the minimum {policy.min_budget}: {error}")
        else:
            raise Fault(f"budget {budget} was accepted, the forced pages need {policy.min_budget}")


def adaptive_reads_everything_at_its_limit(subject: Subject) -> None:
    if not subject.policy().adaptive:
        raise Skip("takes a budget")
    limit = subject.policy().dense_at
    expect(bool(limit), "adaptive, but dense_at names no field values at which it reads everything")
    policy = subject.policy(**limit)
    lengths = [9 * policy.page_size + 1]
    cap = getattr(policy, "max_tokens", None)
    if cap is not None and cap < lengths[0]:
        raise Skip(f"capped at {cap} tokens")
    pages = first_step(policy, subject.texts(1, lengths[0]), lengths, None)[0]
    everything = list(range(10))
    expect(all(p == everything for p in pages), f"at {limit} it reads {pages} of pages 0 to 9")


def other_rows_do_not_matter(subject: Subject) -> None:
    for policy, lengths in few_policies(subject):
        texts, budget = subject.texts(3, max(lengths) + 3), middle_budget(policy)
        together = list(decode(policy, texts, lengths, 3, budget))
        for b in range(3):
            alone = list(decode(policy, texts[b : b + 1], lengths[b : b + 1], 3, budget))
            same([[step[b]] for step in together], alone, f"row {b} of 3 rows and alone")


def left_pads_do_not_matter(subject: Subject) -> None:
    for policy, lengths in few_policies(subject):
        texts, budget = subject.texts(3, max(lengths) + 3), middle_budget(policy)
        plain = list(decode(policy, texts, lengths, 3, budget))
        padded = list(decode(policy, texts, lengths, 3, budget, starts=[3, 0, 7]))
        same(padded, plain, "rows that start at 3, 0, 7 and at 0")


def tokens_beyond_the_end_do_not_matter(subject: Subject) -> None:
    for policy, lengths in few_policies(subject):
        texts, budget = subject.texts(3, max(lengths)), middle_budget(policy)
        exact = first_step(policy, texts, lengths, budget, garbage=0.0)
        for garbage in (torch.nan, torch.inf, 1e4):
            options = {"extent": max(lengths) + 3 * policy.page_size, "garbage": garbage}
            longer = first_step(policy, texts, lengths, budget, **options)
            same(longer, exact, f"a cache with {garbage} beyond the end and without")


def same_input_same_pages(subject: Subject) -> None:
    policy, lengths = few_policies(subject)[0]
    texts, budget = subject.texts(3, max(lengths) + 2), middle_budget(policy)
    with torch.random.fork_rng():
        runs = []
        for seed in range(4):
            torch.manual_seed(seed)
            runs.append(list(decode(policy, texts, lengths, 3, budget)))
    for run in runs[1:]:
        same(run, runs[0], "two runs on the same input")


def ties_go_to_the_lowest_page(subject: Subject) -> None:
    policy = subject.policy()
    if policy.adaptive or policy.dense or policy.evidence == "position":
        raise Skip("ranks no pages by their keys")
    budget = middle_budget(policy)
    assert budget is not None
    num_pages = policy.sink_pages + policy.local_pages + 9
    length = num_pages * policy.page_size
    text = subject.texts(1, length)[0]
    equal = replace(text, k_GND=torch.ones_like(text.k_GND))
    local = policy.local_pages_at(budget) if policy.realisable else 1
    kept = set(range(num_pages - local, num_pages))
    kept |= set(range(budget // policy.page_size - local))
    for pages in first_step(policy, [equal], [length], budget)[0]:
        expect(pages == sorted(kept), f"all keys equal: reads {pages}, not {sorted(kept)}")


def incremental_state_equals_rebuilt_state(subject: Subject) -> None:
    for policy, lengths in few_policies(subject):
        steps, budget = 2 * policy.page_size + 2, middle_budget(policy)
        texts = subject.texts(3, max(lengths) + steps)
        grown = list(decode(policy, texts, lengths, steps, budget))
        allocated = list(decode(policy, texts, lengths, steps, budget, grows=False))
        same(allocated, grown, "a cache allocated at full length and one that grows")
        if policy.evidence in ("prompt", "history"):
            continue
        for step, pages in enumerate(grown):
            rebuilt = first_step(policy, texts, [n + step for n in lengths], budget)
            same(pages, rebuilt, f"state extended {step} times and state built anew")


def replay_equals_single_steps(subject: Subject) -> None:
    if subject.policy().evidence == "history":
        raise Skip("learns from past attention: goes step by step")
    for policy, lengths in few_policies(subject):
        first, num_steps, budget = lengths[1], 2 * policy.page_size + 3, middle_budget(policy)
        text = subject.texts(1, first + num_steps)[0]
        single = [s[0] for s in decode(policy, [text], [first], num_steps, budget)]
        queries = prompt_queries([text], [first])
        call = replay_call(text, range(first, first + num_steps))
        at_once = policy.init(call, queries)
        same(lists_of(policy.select(call, at_once, budget)), single, "a replay and single steps")
        extended = policy.init(replay_call(text, [first]), queries)
        for n in range(first + 1, first + num_steps):
            policy.extend(extended, replay_call(text, [n]))
        replayed = lists_of(policy.select(call, extended, budget))
        same(replayed, single, "a replay on extended state and single steps")


def sequences_do_not_share_state(subject: Subject) -> None:
    _, lengths = few_policies(subject)[0]
    steps, budget = subject.policy().page_size + 1, middle_budget(subject.policy())
    texts = subject.texts(2, max(lengths) + steps)

    def run(policy: Policy, b: int) -> Iterator[Lists]:
        return decode(policy, texts[b : b + 1], lengths[b : b + 1], steps, budget)

    apart = list(zip(*(list(run(subject.policy(), b)) for b in range(2)), strict=True))
    shared = subject.policy()
    interleaved = list(zip(*(run(shared, b) for b in range(2)), strict=True))
    same(interleaved, apart, "two sequences decoded in turns by one policy and apart")


def inputs_and_policy_stay_unchanged(subject: Subject) -> None:
    policy, lengths = few_policies(subject)[0]
    before = set(vars(policy))
    texts = subject.texts(3, max(lengths))
    call, queries = batch_call(texts, lengths), prompt_queries(texts, lengths)
    given = {f"call.{name}": x for name, x in vars(call).items() if isinstance(x, Tensor)}
    given["prompt_queries"] = queries
    copies = {name: x.clone() for name, x in given.items()}
    state = policy.init(call, queries)
    unchanged(given, copies, "init or select")
    policy.extend(state, call)
    unchanged(given, copies, "extend")
    kept = {f"state.{name}": x for name, x in state.tensors().items()}
    copies |= {name: x.clone() for name, x in kept.items()}
    policy.select(call, state, middle_budget(policy))
    unchanged(given | kept, copies, "select")
    added = sorted(set(vars(policy)) - before)
    expect(not added, f"the policy keeps {', '.join(added)} on itself: state is the caller's")


def evidence_is_as_declared(subject: Subject) -> None:
    policy, lengths = few_policies(subject)[0]
    if policy.evidence == "history":
        raise Skip("may look at anything that was attended")
    budget, longest = middle_budget(policy), max(lengths)
    texts, others = subject.texts(3, longest), subject.texts(3, longest, seed=50)
    if policy.evidence == "position":
        pages = first_step(policy, texts, lengths, budget)
        same(first_step(policy, others, lengths, budget), pages, "two texts of the same lengths")
        return
    call = batch_call(texts, lengths)
    state = policy.init(call, prompt_queries(texts, lengths))
    pages = lists_of(policy.select(call, state, budget))
    if policy.evidence == "prompt":
        other = replace(call, q_BHD=batch_call(others, lengths).q_BHD)
        same(lists_of(policy.select(other, state, budget)), pages, "two queries after the prompt")
        return
    other_prompt = policy.init(call, prompt_queries(others, lengths))
    same(lists_of(policy.select(call, other_prompt, budget)), pages, "two sets of prompt queries")


def short_prompts_give_all_their_queries(subject: Subject) -> None:
    policy = subject.policy(page_size=2)
    if policy.evidence != "prompt":
        raise Skip("looks at no prompt queries")
    budget = middle_budget(policy)
    for length in (1, policy.page_size + 1, 20):
        lengths = [length, -(-length // 2)]
        texts = subject.texts(2, length)
        call, queries = batch_call(texts, lengths), prompt_queries(texts, lengths)
        padded, bare = (policy.init(call, given) for given in (queries, queries[:, -length:]))
        pages = lists_of(policy.select(call, padded, budget))
        found = lists_of(policy.select(call, bare, budget))
        same(found, pages, f"a prompt of {length} tokens with as many queries and with more rows")


def evicted_pages_stay_away(subject: Subject) -> None:
    if subject.policy().action != "evict":
        raise Skip("selects: nothing is dropped")
    for policy, lengths in few_policies(subject):
        steps, budget, size = 4 * policy.page_size, middle_budget(policy), policy.page_size
        texts = subject.texts(3, max(lengths) + steps)
        before: Lists | None = None
        for step, now in enumerate(decode(policy, texts, lengths, steps, budget)):
            for b, lists in enumerate(before or []):
                newest = num_pages_of(lengths[b] + step - 1, size) - 1
                for old, new in zip(lists, now[b], strict=True):
                    back = [p for p in new if p <= newest and p not in old]
                    expect(not back, f"pages {back} came back at step {step}: {old} to {new}")
            before = now


def needs_no_value_on_the_host(subject: Subject) -> None:
    """On a GPU no wait for the device; elsewhere select and extend must run on shapes alone."""
    policy, lengths = few_policies(subject)[0]
    texts, budget = subject.texts(3, max(lengths)), middle_budget(policy)
    call = batch_call(texts, lengths)
    state = policy.init(call, prompt_queries(texts, lengths))
    try:
        if call.q_BHD.is_cuda:
            with no_sync():
                policy.extend(state, call)
                policy.select(call, state, budget)
        else:
            call, state = on_meta(call, state)
            policy.extend(state, call)
            policy.select(call, state, budget)
    except Exception as error:
        line = str(error).strip().splitlines()[0] if str(error).strip() else ""
        told = f"extend or select waits for a value: {type(error).__name__}: {line}"
        raise Fault(told) from error


class no_sync:
    """Any wait for the GPU is an error inside."""

    def __enter__(self) -> None:
        self.before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")

    def __exit__(self, *error: object) -> None:
        torch.cuda.set_sync_debug_mode(self.before)


def shapes_ignore_live_lengths(subject: Subject) -> None:
    policy, lengths = few_policies(subject)[0]
    texts, budget = subject.texts(3, max(lengths)), middle_budget(policy)
    shapes = []
    for live in (lengths, [1, 2, 3], [max(lengths)] * 3):
        call = batch_call(texts, live, extent=max(lengths))
        state = policy.init(call, prompt_queries(texts, live))
        shape = {name: list(x.shape) for name, x in state.tensors().items()}
        shape["pages"] = list(policy.select(call, state, budget).pages_BSK.shape)
        shapes.append(shape)
    expect(shapes[0] == shapes[1] == shapes[2], f"shapes depend on live lengths: {shapes}")


def same(got: Any, wanted: Any, what: str) -> None:
    """Fault with the first pair of page lists that differ."""
    while got != wanted and isinstance(got, list) and isinstance(got[0], list | tuple):
        got, wanted = next((a, b) for a, b in zip(got, wanted, strict=True) if a != b)
    expect(got == wanted, f"{what} differ: {got} and {wanted}")


def unchanged(tensors: dict[str, Tensor], copies: dict[str, Tensor], who: str) -> None:
    for name, x in tensors.items():
        same_bits = torch.equal(x.view(torch.uint8), copies[name].view(torch.uint8))
        expect(same_bits, f"{who} changed {name}")


BEHAVIOUR_CHECKS: tuple[Callable[[Subject], None], ...] = (
    is_hashable_and_names_its_fields,
    a_budget_below_the_forced_pages_is_refused,
    adaptive_reads_everything_at_its_limit,
    other_rows_do_not_matter,
    left_pads_do_not_matter,
    tokens_beyond_the_end_do_not_matter,
    same_input_same_pages,
    ties_go_to_the_lowest_page,
    incremental_state_equals_rebuilt_state,
    replay_equals_single_steps,
    sequences_do_not_share_state,
    inputs_and_policy_stay_unchanged,
    evidence_is_as_declared,
    short_prompts_give_all_their_queries,
    evicted_pages_stay_away,
    needs_no_value_on_the_host,
    shapes_ignore_live_lengths,
)
