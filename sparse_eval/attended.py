"""What one policy's replay of a layer read and gave: selection, output, bytes; layers stacked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparse_eval import ledger, metrics
from sparse_eval.core import AttentionCall
from sparse_eval.policies.base import Selection


@dataclass(frozen=True)
class Truth:
    """Dense attention of T decode queries, of one layer or several stacked, through the shared
    kernel with exact keys."""

    out_THE: Tensor
    lse_TH: Tensor
    page_mass_THP: Tensor


@dataclass(frozen=True)
class OwnKeys:
    """What attention over the same selection gives with the keys that the policy attends with.
    token_bytes: of one such token, K and V, in one KV head."""

    out_THE: Tensor
    lse_TH: Tensor
    token_bytes: float


@dataclass(frozen=True)
class AttendedLayer:
    """A layer's decode queries, what they read and what came out. state_bytes: per step and KV
    head, of the state tensors that choosing touched."""

    call: AttentionCall
    selection: Selection
    out_THE: Tensor
    lse_TH: Tensor
    state_bytes: float
    own_keys: OwnKeys | None = None

    def shapes(self) -> tuple[Any, ...]:
        own = (self.own_keys is None, self.selection.wanted_BH is None)
        lists = self.selection.pages_BSK.shape[1]
        return (self.out_THE.shape, self.call.num_kv_heads, lists, own)


def wanted_tokens(
    layers: Sequence[AttendedLayer], mask_TSP: Tensor, lengths_T: Tensor, page_size: int
) -> Tensor:
    """Live tokens that each query head chose for itself, [layers, T, H]; NaN where heads of a group
    do not choose apart. mask_TSP, lengths_T: of all layers, one after the other."""
    call, wanted = layers[0].call, [x.selection.wanted_BH for x in layers]
    if wanted[0] is not None:
        return torch.stack([x for x in wanted if x is not None])
    tokens_TS = ledger.tokens_read(mask_TSP, lengths_T, page_size).double()
    if mask_TSP.shape[1] < call.num_heads:
        tokens_TS = torch.full_like(tokens_TS, torch.nan).repeat_interleave(call.group_size, 1)
    return tokens_TS.unflatten(0, (len(layers), -1))


def own_keys_errors(
    layers: Sequence[AttendedLayer], truth: Truth, num_kv_heads: int
) -> tuple[Tensor, Tensor]:
    """output_error and lse_error [layers, G] with the keys that the policy attends with, NaN where
    it has none of its own."""
    own = [x.own_keys for x in layers if x.own_keys is not None]
    if not own:
        missing = truth.lse_TH.new_full((len(layers), num_kv_heads), torch.nan).double()
        return missing, missing
    out_THE, lse_TH = (torch.stack([getattr(x, n) for x in own]) for n in ("out_THE", "lse_TH"))
    error = metrics.output_error(out_THE, truth.out_THE, num_kv_heads)
    return error, metrics.mean_per_kv_head(truth.lse_TH - lse_TH, num_kv_heads)


def row_of(selection: Selection, row: int) -> Selection:
    """One row's selection."""
    one = slice(row, row + 1)
    return Selection(selection.pages_BSK[one], selection.counts_BS[one], selection.page_size)


def alike(layers: Sequence[AttendedLayer]) -> list[list[AttendedLayer]]:
    """Layers grouped by the shapes that stacking needs equal."""
    groups: dict[tuple[Any, ...], list[AttendedLayer]] = {}
    for layer in layers:
        groups.setdefault(layer.shapes(), []).append(layer)
    return list(groups.values())


def stack_selections(selections: Sequence[Selection]) -> Selection:
    """The rows of several selections as the rows of one."""
    width = max(s.pages_BSK.shape[-1] for s in selections)
    pages = [
        torch.nn.functional.pad(s.pages_BSK, (0, width - s.pages_BSK.shape[-1]), value=-1)
        for s in selections
    ]
    counts = torch.cat([s.counts_BS for s in selections])
    wanted = [s.wanted_BH for s in selections if s.wanted_BH is not None]
    all_wanted = torch.cat(wanted) if len(wanted) == len(selections) else None
    return Selection(torch.cat(pages), counts, selections[0].page_size, all_wanted)
