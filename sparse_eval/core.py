"""The shape legend and the small types that every room shares. Imports torch only.

Shapes: B batch rows · H query heads · G KV heads (H % G == 0, M = H // G) · N cached tokens ·
D head dim of Q and K · E head dim of V · P pages · K selected pages · T decode queries ·
W prompt queries · S = G (a group shares its pages) or H (each query head has its own).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Row = dict[str, Any]
"""One line of rows.jsonl: column name -> number, text, list or NaN (not measured)."""


@dataclass(frozen=True, kw_only=True)
class AttentionCall:
    """What one layer's attention function was given for one decode step of B rows.

    q_BHD: one query per row. k_BGND, v_BGNE: post-RoPE, never expanded to H; their batch axis is
    B, or 1 where all rows read one cache (a replay of T decode queries: B = T, one cache).
    lengths_B: int32 live tokens per row, the newest included. starts_B: int32 first live token per
    row (left padding), None where every row starts at 0. Row b reads [starts_b, starts_b+lengths_b).
    N is the cache's extent, not a live length: whatever lies beyond a row's end is garbage.
    layer: the model's layer index. scale: softmax scale, logits are scale · q·k.
    max_tokens: tokens per row that state must have room for, if the cache will outgrow N.
    """

    q_BHD: Tensor
    k_BGND: Tensor
    v_BGNE: Tensor
    lengths_B: Tensor
    scale: float
    layer: int
    starts_B: Tensor | None = None
    step: int = 0
    max_tokens: int = 0

    @property
    def num_heads(self) -> int:
        return self.q_BHD.shape[1]

    @property
    def num_kv_heads(self) -> int:
        return self.k_BGND.shape[1]

    @property
    def group_size(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def capacity(self) -> int:
        """Tokens per row that state and selections are sized for."""
        return max(self.max_tokens, self.k_BGND.shape[2])

    @property
    def device(self) -> torch.device:
        return self.q_BHD.device
