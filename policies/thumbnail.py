"""Thumbnails as a score: the logits of 2- or 4-bit keys, token by token.

Source: Faster Flash Decoding's 2-bit key thumbnails. Only full pages are packed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from sparse_eval.core import AttentionCall
from sparse_eval.kernels.thumbnail import (
    BITS,
    RULES,
    Thumbnail,
    pack_thumbnail,
    score_error_bound,
    thumbnail_scores,
)
from sparse_eval.policies.base import State, check_one_of
from sparse_eval.policies.metadata import build_metadata, extend_metadata
from sparse_eval.policies.score import Score


@dataclass
class ThumbnailState(State):
    """codes_BGPLC: uint8, C = D · bits / 8 bytes a key. step_BGPX: X = page_size (a step per
    token) or D (a step per channel of a page), in the keys' dtype."""

    codes_BGPLC: Tensor
    step_BGPX: Tensor
    paged: ClassVar[tuple[str, ...]] = ("codes_BGPLC", "step_BGPX")


@dataclass(frozen=True, kw_only=True)
class ThumbnailScore(Score[ThumbnailState]):
    """max and log_mass of the logits that the thumbnails give, an estimate of the true ones.

    bits: 2 or 4. scales: whose largest magnitude sets the step, a token's or a page's channel's;
    channel finds more mass, since keys have channels of their own size (docs/ffd.md)."""

    bits: int = 2
    scales: str = "channel"
    name: ClassVar[str] = "thumbnail"

    def __post_init__(self) -> None:
        check_one_of("bits", self.bits, BITS)
        check_one_of("scales", self.scales, RULES)

    def check_heads(self, head_dim: int | None) -> None:
        per_byte = 8 // self.bits
        if head_dim is not None and head_dim % per_byte:
            raise ValueError(
                f"thumbnails of {self.bits} bits take head dims that are a multiple of {per_byte}, "
                f"got {head_dim}"
            )

    def init(self, call: AttentionCall, page_size: int) -> ThumbnailState:
        return build_metadata(ThumbnailState, call, page_size, self.pack)

    def extend(self, state: ThumbnailState, call: AttentionCall, page_size: int) -> None:
        extend_metadata(state, call, page_size, self.pack)

    def pack(self, keys_BGPLD: Tensor) -> tuple[Tensor, Tensor]:
        """codes_BGPLC and step_BGPX of whole pages."""
        num_pages, page_size = keys_BGPLD.shape[2:4]
        keys = keys_BGPLD.flatten(2, 3)
        packed = pack_thumbnail(keys, page_size=page_size, bits=self.bits, rule=self.scales)
        codes = packed.codes.unflatten(2, (num_pages, page_size))
        step = packed.step
        return codes, step if self.scales == "channel" else step.unflatten(
            2, (num_pages, page_size)
        )

    def packed(self, state: ThumbnailState) -> Thumbnail:
        """The state as the kernels take it."""
        codes, step = state.codes_BGPLC, state.step_BGPX
        page_size = codes.shape[3]
        step = step if self.scales == "channel" else step.flatten(2)
        return Thumbnail(codes.flatten(2, 3), step, page_size, self.bits, self.scales)

    def token_logits(self, call: AttentionCall, state: ThumbnailState) -> Tensor:
        """[B, H, P, page_size] float32 (float64 for float64 keys)."""
        return self._by_token(thumbnail_scores, call, state)

    def token_errors(self, call: AttentionCall, state: ThumbnailState) -> Tensor:
        """At least what token_logits is off by: [B, H, P, page_size], its dtype."""
        return self._by_token(score_error_bound, call, state)

    def _by_token(
        self, values: Callable[..., Tensor], call: AttentionCall, state: ThumbnailState
    ) -> Tensor:
        """Rows that share one cache enter one product per KV head, not a copy of its keys each."""
        packed, q = self.packed(state), call.q_BHD
        num_rows, num_kv_heads = len(q), call.num_kv_heads
        if len(packed.codes) < num_rows:
            q = q.unflatten(1, (num_kv_heads, -1)).transpose(0, 1).flatten(0, 2)[None]
        x_BHN = values(q, packed, call.scale)
        if len(x_BHN) < num_rows:
            x_GBMN = x_BHN[0].unflatten(0, (num_kv_heads, num_rows, -1))
            x_BHN = x_GBMN.transpose(0, 1).flatten(1, 2)
        return x_BHN.unflatten(2, (-1, packed.page_size))

    def max(self, call: AttentionCall, state: ThumbnailState, page_size: int) -> Tensor:
        return self.token_logits(call, state).amax(-1)

    def log_mass(self, call: AttentionCall, state: ThumbnailState, page_size: int) -> Tensor:
        return self.token_logits(call, state).logsumexp(-1)
