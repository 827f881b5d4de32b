"""Small sequences, calls and decode steps on which the policy contract is checked.

Queries and keys are multiples of one half, so that sums of products are exact whatever the order
and the batch they are computed in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from sparse_eval.core import AttentionCall
from sparse_eval.kernels.sparse_decode import sparse_decode
from sparse_eval.policies.base import Attended, Policy, Selection, State

NUM_PROMPT_QUERIES = 64
MakePolicy = Callable[..., Policy]
"""Builds a policy from field values."""
Lists = list[list[list[int]]]
"""Page ids by row and list."""


@dataclass(frozen=True)
class Text:
    """One sequence as a layer sees it: q_NHD (a query per position), k_GND, v_GNE."""

    q_NHD: Tensor
    k_GND: Tensor
    v_GNE: Tensor

    def cast(self, dtype: torch.dtype) -> Text:
        return Text(self.q_NHD.to(dtype), self.k_GND.to(dtype), self.v_GNE.to(dtype))


def random_text(
    num_tokens: int,
    *,
    num_kv_heads: int = 2,
    group_size: int = 2,
    seed: int = 0,
    device: Any = "cpu",
) -> Text:
    """Head dims 8 (q, k) and 12 (v)."""
    rng = torch.Generator().manual_seed(seed)

    def halves(*shape: int) -> Tensor:
        return (torch.randint(-8, 9, shape, generator=rng) / 2).to(device)

    return Text(
        halves(num_tokens, num_kv_heads * group_size, 8),
        halves(num_kv_heads, num_tokens, 8),
        halves(num_kv_heads, num_tokens, 12),
    )


def batch_call(
    texts: Sequence[Text],
    lengths: Sequence[int],
    *,
    starts: Sequence[int] | None = None,
    extent: int | None = None,
    garbage: float = torch.nan,
    **options: Any,
) -> AttentionCall:
    """The decode step of each text's token lengths[b] - 1, everything not live being garbage."""
    first = starts or [0] * len(texts)
    need = max(s + n for s, n in zip(first, lengths, strict=True))
    extent = max(need, 1) if extent is None else extent
    k, v = texts[0].k_GND, texts[0].v_GNE
    k_BGND = k.new_full((len(texts), k.shape[0], extent, k.shape[2]), garbage)
    v_BGNE = v.new_full((len(texts), v.shape[0], extent, v.shape[2]), garbage)
    for b, (text, s, n) in enumerate(zip(texts, first, lengths, strict=True)):
        k_BGND[b, :, s : s + n] = text.k_GND[:, :n]
        v_BGNE[b, :, s : s + n] = text.v_GNE[:, :n]
    return AttentionCall(
        q_BHD=torch.stack([t.q_NHD[max(n - 1, 0)] for t, n in zip(texts, lengths, strict=True)]),
        k_BGND=k_BGND,
        v_BGNE=v_BGNE,
        lengths_B=int32(lengths, k.device),
        starts_B=None if starts is None else int32(starts, k.device),
        **{"scale": 0.25, "layer": 3} | options,
    )


def replay_call(text: Text, lengths: Sequence[int]) -> AttentionCall:
    """Decode steps of one text at once: T rows over one shared cache."""
    return AttentionCall(
        q_BHD=text.q_NHD[[n - 1 for n in lengths]],
        k_BGND=text.k_GND[None, :, : max(lengths)],
        v_BGNE=text.v_GNE[None, :, : max(lengths)],
        lengths_B=int32(lengths, text.k_GND.device),
        scale=0.25,
        layer=3,
    )


def prompt_queries(texts: Sequence[Text], lengths: Sequence[int]) -> Tensor:
    """The queries of each row's last W live tokens, [B, W, H, D]; short rows have NaN in front."""
    rows = []
    for text, n in zip(texts, lengths, strict=True):
        last = text.q_NHD[max(n - NUM_PROMPT_QUERIES, 0) : n]
        blank = last.new_full((NUM_PROMPT_QUERIES - len(last), *last.shape[1:]), torch.nan)
        rows.append(torch.cat([blank, last]))
    return torch.stack(rows)


def int32(values: Sequence[int], device: Any) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int32, device=device)


def decode_step(policy: Policy, state: State, call: AttentionCall, budget: int | None) -> Selection:
    """Select, and where the policy learns from attention also attend and observe."""
    selection = policy.select(call, state, budget)
    if policy.evidence == "history":
        out, lse, page_lse = sparse_decode(
            *(call.q_BHD, call.k_BGND, call.v_BGNE, selection.pages_BSK, selection.counts_BS),
            *(call.starts_B, call.lengths_B),
            page_size=policy.page_size,
            scale=call.scale,
            backend="triton" if call.q_BHD.is_cuda else "torch",
            page_lse=True,
        )
        policy.observe(state, call, Attended(selection, out, lse, page_lse))
    return selection


def first_step(
    policy: Policy,
    texts: Sequence[Text],
    lengths: Sequence[int],
    budget: int | None,
    **options: Any,
) -> Lists:
    """What a policy reads at the first decode step after a prompt."""
    call = batch_call(texts, lengths, **options)
    state = policy.init(call, prompt_queries(texts, lengths))
    return lists_of(policy.select(call, state, budget))


def decode(
    policy: Policy,
    texts: Sequence[Text],
    lengths: Sequence[int],
    num_steps: int,
    budget: int | None,
    *,
    starts: Sequence[int] | None = None,
    grows: bool = True,
) -> Iterator[Lists]:
    """What a policy reads at each of num_steps decode steps, state extended in between.

    grows: the cache is as long as its longest row; else it is allocated at full length."""
    capacity = max(n + s for n, s in zip(lengths, starts or [0] * len(texts), strict=True))
    capacity += num_steps - 1
    state: State | None = None
    for step in range(num_steps):
        live = [n + step for n in lengths]
        extent = None if grows else capacity
        options: dict[str, Any] = {"max_tokens": capacity, "step": step}
        call = batch_call(texts, live, starts=starts, extent=extent, **options)
        if state is None:
            state = policy.init(call, prompt_queries(texts, live))
        else:
            policy.extend(state, call)
        yield lists_of(decode_step(policy, state, call, budget))


def lists_of(selection: Selection) -> Lists:
    pages, counts = selection.pages_BSK.tolist(), selection.counts_BS.tolist()
    return [
        [row[:n] for row, n in zip(pages_SK, counts_S, strict=True)]
        for pages_SK, counts_S in zip(pages, counts, strict=True)
    ]


def on_meta(call: AttentionCall, state: State) -> tuple[AttentionCall, State]:
    """The same call and state with shapes and no values: reading a value there is an error."""
    tensors = {f.name: getattr(call, f.name) for f in fields(call)}
    moved: dict[str, Any] = {n: x.to("meta") for n, x in tensors.items() if isinstance(x, Tensor)}
    bare = object.__new__(type(state))
    bare.__dict__.update(vars(state))
    for name, x in state.tensors().items():
        setattr(bare, name, x.to("meta"))
    return replace(call, **moved), bare
