"""Bytes and tokens that were really read: counted from selections and state."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparse_eval.core import AttentionCall
from sparse_eval.policies.base import Policy, Selection, State


def page_mask(selection: Selection, num_pages: int) -> Tensor:
    """True where a list reads a page: bool [B, S, P]."""
    pages = selection.pages_BSK
    slot = pages.long().where(pages >= 0, num_pages)
    mask = torch.zeros(*pages.shape[:2], num_pages + 1, dtype=torch.bool, device=pages.device)
    return mask.scatter_(2, slot, True)[..., :num_pages]


def union_of_group(mask_BSP: Tensor, num_kv_heads: int) -> Tensor:
    """What a KV head reads when its query heads have lists of their own: bool [B, G, P]."""
    return mask_BSP.unflatten(1, (num_kv_heads, -1)).any(2)


def tokens_read(mask_BGP: Tensor, lengths_B: Tensor, page_size: int) -> Tensor:
    """Unique live tokens read per row and KV head: int64 [B, G]."""
    first = torch.arange(mask_BGP.shape[-1], device=mask_BGP.device) * page_size
    held = (lengths_B.long()[:, None] - first).clamp(0, page_size)
    return (mask_BGP * held[:, None]).sum(-1)


class ReadRecorder:
    """Stands in for a policy's state and notes which of its tensors were touched."""

    def __init__(self, state: State):
        object.__setattr__(self, "_state", state)
        object.__setattr__(self, "touched", set())

    @property
    def __class__(self) -> Any:
        """isinstance sees the state's class, as the policy would without the recorder."""
        return type(self._state)

    @__class__.setter
    def __class__(self, kind: type) -> None:
        raise TypeError(f"a recorder stays what its state is, got {kind.__name__}")

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._state, name)
        if isinstance(value, Tensor):
            self.touched.add(name)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._state, name, value)


def state_bytes(state: State, names: set[str], num_kv_heads: int, live_pages: float) -> float:
    """Bytes of the named state tensors per row and KV head; paged ones count their live pages."""
    total = 0.0
    for name, x in state.tensors().items():
        if name not in names:
            continue
        size = x.numel() * x.element_size() / (x.shape[0] * num_kv_heads) if x.ndim else 0.0
        total += size * (live_pages / max(x.shape[2], 1) if name in state.paged else 1.0)
    return total


def token_bytes(k_BGND: Tensor, v_BGNE: Tensor) -> int:
    """Bytes of one token's K and V in one KV head, as cached."""
    return k_BGND.shape[-1] * k_BGND.element_size() + v_BGNE.shape[-1] * v_BGNE.element_size()


def attended_token_bytes(policy: Policy, call: AttentionCall, state: State) -> float | None:
    """Bytes of one token of a full page in one KV head where attention sees keys made from state:
    the state tensors touched to make them, and V. None where it reads the cache's own K and V."""
    recorder = ReadRecorder(state)
    policy.attended_keys(call, recorder)  # type: ignore[arg-type]
    if not recorder.touched:
        return None
    page = state_bytes(state, recorder.touched, call.num_kv_heads, 1)
    page -= state_bytes(state, recorder.touched, call.num_kv_heads, 0)
    v = call.v_BGNE
    return page / policy.page_size + v.shape[-1] * v.element_size()
