"""Metadata of full pages: built from the cache as it stands, extended in place when a page fills.

One `summary` function makes both, so that state grown step by step equals state built anew.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sparse_eval.core import AttentionCall
from sparse_eval.policies.base import (
    State,
    StateT,
    newest_full_page,
    num_pages_of,
    pages_of_keys,
)

Summary = Callable[[Tensor], tuple[Tensor, ...]]
"""keys [B, G, P, page_size, D] -> one [B, G, P, ...] for each name in the state's `paged`."""

METADATA_DTYPES = ("auto", "float32")


def build_metadata(
    kind: Callable[..., StateT], call: AttentionCall, page_size: int, summary: Summary
) -> StateT:
    """A state that `kind` makes of the summary of every whole page of the extent, sized for
    capacity."""
    state = kind(*summary(pages_of_keys(call, page_size)))
    state.grow(num_pages_of(call.capacity, page_size))
    return state


def extend_metadata(state: State, call: AttentionCall, page_size: int, summary: Summary) -> None:
    """Writes the summary of each row's newest full page."""
    state.grow(num_pages_of(call.capacity, page_size))
    page_B, keys_BGLD = newest_full_page(call, page_size)
    row = torch.arange(page_B.shape[0], device=call.device)
    for name, x in zip(state.paged, summary(keys_BGLD[:, :, None]), strict=True):
        getattr(state, name)[row, :, page_B] = x[:, :, 0]


def metadata_dtype(keys: Tensor, wanted: str) -> torch.dtype:
    """wanted: of METADATA_DTYPES; auto is the keys' own."""
    return keys.dtype if wanted == "auto" else torch.float32


@dataclass
class ChannelState(State):
    """Per channel of each full page: a centre and a spread >= 0, [B, G, P, D]."""

    center_BGPD: Tensor
    spread_BGPD: Tensor
    paged: ClassVar[tuple[str, ...]] = ("center_BGPD", "spread_BGPD")


def channel_logits(call: AttentionCall, state: ChannelState) -> Tensor:
    """scale · (q·center + |q|·spread) of each head and page: [B, H, P], two matrix products."""
    center = query_page_products(call.q_BHD, state.center_BGPD)
    spread = query_page_products(call.q_BHD.abs(), state.spread_BGPD)
    return call.scale * (center + spread)


def query_page_products(q_BHD: Tensor, x_BGPD: Tensor) -> Tensor:
    """q·x for each head and page: [B, H, P] in float32 (float64 stays); x's batch may be 1."""
    dtype = torch.promote_types(q_BHD.dtype, torch.float32)
    num_rows, num_heads, head_dim = q_BHD.shape
    num_kv_heads, num_pages = x_BGPD.shape[1:3]
    q = q_BHD.to(dtype).reshape(num_rows, num_kv_heads, -1, head_dim)
    x_BGDP = x_BGPD.to(dtype).transpose(-1, -2)
    if x_BGDP.shape[0] == 1:  # rows share one cache: one product per KV head, not one per row
        flat = q.transpose(0, 1).reshape(num_kv_heads, -1, head_dim) @ x_BGDP[0]
        return flat.unflatten(1, (num_rows, -1)).transpose(0, 1).reshape(num_rows, num_heads, -1)
    return (q @ x_BGDP).reshape(num_rows, num_heads, num_pages)
