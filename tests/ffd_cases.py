"""Cases that the tests of top-δ's selection and attention share."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from sparse_eval.kernels.ffd import residual_decode
from sparse_eval.kernels.sparse_decode import sparse_decode
from sparse_eval.kernels.thumbnail import (
    pack_residual,
    pack_thumbnail,
)

INF = math.inf
ATTEND: Any = sparse_decode
REFINED: Any = residual_decode
RULE: dict[str, Any] = {"delta": 2.0, "sink_pages": 1, "local_pages": 2, "scale": 0.25}


def draw(*shape: int, seed: int = 0, integers: bool = False) -> Tensor:
    """Random numbers; integers make every thumbnail score exact, with many ties."""
    rng = torch.Generator().manual_seed(seed)
    if integers:
        return torch.randint(-1, 2, shape, generator=rng).float()
    return torch.randn(shape, generator=rng)


def make_case(
    device: str,
    lengths: list[int],
    *,
    group_size: int = 3,
    tokens: int = 100,
    head_dim: int = 16,
    page_size: int = 8,
    rows_of_one: bool = False,
    integers: bool = True,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    **form: Any,
) -> dict[str, Any]:
    """Arguments of ffd_select; what lies beyond a row's end is packed garbage."""
    batch = 1 if rows_of_one else len(lengths)
    q = draw(len(lengths), 2 * group_size, head_dim, seed=seed, integers=integers)
    k = draw(batch, 2, tokens, head_dim, seed=seed + 1, integers=integers)
    k, q = k.to(device, dtype), q.to(device, dtype)
    return {
        "q": q,
        "k": k,
        "thumbnail": pack_thumbnail(k, page_size=page_size, **form),
        "starts": None,
        "lengths": torch.tensor(lengths, dtype=torch.int32, device=device),
    }


def listed(pages: Tensor, counts: Tensor) -> list[list[int]]:
    """Each list's pages, after checking its form: ascending, -1 behind, as many as counted."""
    lists = []
    for list_, count in zip(pages.flatten(0, 1).tolist(), counts.flatten().tolist(), strict=True):
        kept = list_[:count]
        assert kept == sorted(set(kept)) and min(kept, default=0) >= 0
        assert all(page == -1 for page in list_[count:])
        lists.append(kept)
    return lists


def with_values(case: dict[str, Any], e: int | None = None) -> dict[str, Any]:
    """The case with values and a residual, as residual_decode takes them."""
    k = case["k"]
    v = draw(*k.shape[:3], e or k.shape[3], seed=5).to(k)
    left = pack_residual(k, case["thumbnail"])
    return case | {"v": v, "residual": left}
