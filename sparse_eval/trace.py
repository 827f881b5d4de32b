"""What a patched model read: noted step by step without waiting, counted when somebody asks.

Tokens are counted from the selections that the kernel got, bytes from the tensors in the cache.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from sparse_eval import ledger
from sparse_eval.core import AttentionCall
from sparse_eval.policies.base import Selection, State, check_kept, num_pages_of

FOLD_STEPS = 64
"""Steps noted per layer before they are counted together."""


@dataclass(frozen=True)
class CachedLayer:
    """How one layer's K and V lie in the cache. token_bytes: of one token in one cached head.

    Latent caches (MLA) hold one head that all KV heads given to attention share. window: most
    tokens a sliding layer reads, None for full attention."""

    num_heads: int
    token_bytes: int
    kv_form: str
    window: int | None = None

    @staticmethod
    def of(
        layer: object | None, key: Tensor, value: Tensor, window: int | None = None
    ) -> CachedLayer:
        """layer: the cache's own; key, value: what attention was given, where there is no cache."""
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if not isinstance(keys, Tensor) or not isinstance(values, Tensor):
            keys, values = key, value
        same = keys.shape[1] == key.shape[1] and keys.shape[3] == key.shape[3]
        form = "expanded" if same else "latent"
        return CachedLayer(keys.shape[1], ledger.token_bytes(keys, values), form, window)

    def dense_bytes(self, lengths: Tensor) -> float:
        """What dense attention reads of rows with these live lengths."""
        seen = lengths if self.window is None else lengths.clamp_max(self.window)
        return float(seen.sum()) * self.num_heads * self.token_bytes


@dataclass(frozen=True)
class StateBytes:
    """State tensors that `select` touches: bytes per KV head and row, and per live full page."""

    fixed: float
    per_page: float


@dataclass(frozen=True)
class NotedStep:
    pages_BSK: Tensor
    lengths_B: Tensor
    num_pages: int
    is_long: bool


@dataclass
class LayerTrace:
    """What one layer read through the policy, summed over rows, KV heads and steps.

    own_token_bytes: of one token in one KV head, where attention sees keys that the policy made
    itself; the page that still fills is read as it is cached. bound: tokens that no KV head of
    `policy` may exceed in a step, None where it has no budget; counting raises ValueError."""

    num_kv_heads: int
    page_size: int
    cached: CachedLayer
    state: StateBytes
    own_token_bytes: float | None = None
    where: str = ""
    policy: str = ""
    bound: int | None = None
    calls: int = 0
    pending: list[NotedStep] = field(default_factory=list)
    _lists: int = 0
    _tokens_read: int = 0
    _tokens_live: int = 0
    _left_out: int = 0
    _bytes_kv: float = 0.0
    _bytes_metadata: float = 0.0
    _bytes_dense: float = 0.0

    def note(self, step: NotedStep) -> None:
        self.pending.append(step)
        self.calls += 1
        if len(self.pending) >= FOLD_STEPS:
            self.fold()

    def fold(self) -> None:
        """Count the pending steps, all in one go."""
        steps, self.pending = self.pending, []
        if not steps:
            return
        lengths = torch.stack([s.lengths_B for s in steps]).long()  # [steps, B]
        read = self._mask(steps)  # [steps · B, G, P]
        read_BG = ledger.tokens_read(read, lengths.flatten(), self.page_size)
        if self.bound is not None:
            check_kept(self.policy, self.bound, int(read_BG.max()), self.where)
        by_cached_head = ledger.union_of_group(read, self.cached.num_heads)
        cached_read = ledger.tokens_read(by_cached_head, lengths.flatten(), self.page_size)
        left_out = (read_BG < lengths.flatten()[:, None]).view(len(steps), -1).any(1)
        is_long = torch.tensor([s.is_long for s in steps], device=left_out.device)
        full_pages = float((lengths // self.page_size).sum())
        self._lists += read_BG.numel()
        self._tokens_read += int(read_BG.sum())
        self._tokens_live += int(lengths.sum()) * self.num_kv_heads
        self._left_out += int((left_out & is_long).sum())
        self._bytes_kv += self._kv_bytes(read_BG, cached_read, lengths.flatten())
        self._bytes_metadata += self.num_kv_heads * (
            self.state.fixed * lengths.numel() + self.state.per_page * full_pages
        )
        self._bytes_dense += self.cached.dense_bytes(lengths)

    def _kv_bytes(self, read_BG: Tensor, cached_read: Tensor, lengths: Tensor) -> float:
        if self.own_token_bytes is None:
            return float(cached_read.sum()) * self.cached.token_bytes
        partial = float((lengths % self.page_size).sum())
        own = (float(read_BG.sum()) - partial * self.num_kv_heads) * self.own_token_bytes
        return own + partial * self.cached.num_heads * self.cached.token_bytes

    def _mask(self, steps: list[NotedStep]) -> Tensor:
        """Pages read of every step and row: bool [steps · B, G, P]."""
        width = max(s.pages_BSK.shape[2] for s in steps)
        pages = torch.cat(
            [
                torch.nn.functional.pad(s.pages_BSK, (0, width - s.pages_BSK.shape[2]), value=-1)
                for s in steps
            ]
        )
        lists = Selection(pages, (pages >= 0).sum(-1), self.page_size)
        mask = ledger.page_mask(lists, max(s.num_pages for s in steps))
        return ledger.union_of_group(mask, self.num_kv_heads)

    @property
    def lists(self) -> int:
        """Rows × KV heads × steps."""
        self.fold()
        return self._lists

    @property
    def tokens_read(self) -> int:
        self.fold()
        return self._tokens_read

    @property
    def tokens_live(self) -> int:
        self.fold()
        return self._tokens_live

    @property
    def left_out(self) -> int:
        self.fold()
        return self._left_out

    @property
    def bytes_read(self) -> float:
        self.fold()
        return self._bytes_kv + self._bytes_metadata

    @property
    def bytes_dense(self) -> float:
        self.fold()
        return self._bytes_dense

    @property
    def density(self) -> float:
        return self.tokens_read / self.tokens_live if self.tokens_live else float("nan")


@dataclass
class Trace:
    """What the policy did while a model was patched.

    layers: those that read through the policy; own: those that kept the model's attention.
    calls: selections made; long_calls: those on caches longer than the budget. left_out: of the
    long calls, those in which some row's head left something out.
    """

    layers: dict[int, LayerTrace] = field(default_factory=dict)
    own: dict[int, CachedLayer] = field(default_factory=dict)
    calls: int = 0
    long_calls: int = 0
    realisable: bool = True
    _step_lengths: list[Tensor] = field(default_factory=list)

    def note(
        self, layer: LayerTrace, call: AttentionCall, selection: Selection, budget: int | None
    ) -> None:
        """One selection, before attention reads it. Nothing is waited for."""
        is_long = budget is not None and call.k_BGND.shape[2] > budget
        num_pages = num_pages_of(call.capacity, selection.page_size)
        # a copy: a policy may write its next selection into the same tensor
        layer.note(NotedStep(selection.pages_BSK.clone(), call.lengths_B, num_pages, is_long))
        self.calls += 1
        self.long_calls += is_long
        if layer is next(iter(self.layers.values())):
            self._step_lengths.append(call.lengths_B)

    def check_kept(self) -> None:
        """ValueError where the policy read more than its budget."""
        for layer in self.layers.values():
            layer.fold()

    @property
    def left_out(self) -> int:
        return sum(layer.left_out for layer in self.layers.values())

    @property
    def tokens_read(self) -> float:
        """Tokens per KV head, row and step: mean over the policy's layers."""
        lists = sum(layer.lists for layer in self.layers.values())
        read = sum(layer.tokens_read for layer in self.layers.values())
        return read / lists if lists else float("nan")

    @property
    def density(self) -> float:
        """Tokens read / tokens a dense step reads, over the policy's layers."""
        live = sum(layer.tokens_live for layer in self.layers.values())
        read = sum(layer.tokens_read for layer in self.layers.values())
        return read / live if live else float("nan")

    @property
    def read_fraction(self) -> float:
        """Bytes of K, V and metadata read over all layers, the dense and sliding ones included,
        over the bytes that dense decoding reads. NaN for what cannot be built (an oracle)."""
        if not self._step_lengths or not self.realisable:
            return float("nan")
        lengths = torch.cat(self._step_lengths).long()
        own = sum(layer.dense_bytes(lengths) for layer in self.own.values())
        read = sum(layer.bytes_read for layer in self.layers.values())
        dense = sum(layer.bytes_dense for layer in self.layers.values())
        return (read + own) / (dense + own)

    @property
    def kv_form(self) -> str:
        """expanded: the cache holds K and V as attention is given them; latent: MLA's latents."""
        forms = {layer.cached.kv_form for layer in self.layers.values()}
        return "latent" if "latent" in forms else "expanded"


def state_bytes(call: AttentionCall, state: State, touched: set[str]) -> StateBytes:
    """Bytes of the state tensors that `select` touched, as measured on its first call."""
    fixed = ledger.state_bytes(state, touched, call.num_kv_heads, 0)
    one = ledger.state_bytes(state, touched, call.num_kv_heads, 1)
    return StateBytes(fixed, one - fixed)
