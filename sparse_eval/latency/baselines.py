"""The dense attention that others have: torch's SDPA backends, FlashAttention-3 and FlashInfer."""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""q [B, H, D], k and v [B, G, N, D] -> anything that holds the output."""

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def sdpa_variants() -> dict[str, Attend]:
    """Each backend, its group given as such ("gqa") or folded into the query axis ("folded")."""
    return {
        f"{name} {form}": sdpa(backend, folded=form == "folded")
        for name, backend in BACKENDS.items()
        for form in ("gqa", "folded")
    }


def sdpa(backend: SDPBackend, *, folded: bool) -> Attend:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            if folded:
                return F.scaled_dot_product_attention(q.unflatten(1, (k.shape[1], -1)), k, v)
            return F.scaled_dot_product_attention(q[:, :, None], k, v, enable_gqa=True)

    return attend


@dataclass(frozen=True)
class Tried:
    """Baselines that run here, by name, and why the others do not."""

    good: dict[str, Attend]
    refused: dict[str, str]


def other_kernels() -> Tried:
    """Those of other packages: what can be imported here, and what is not installed."""
    good: dict[str, Attend] = {}
    refused = {}
    for name, (module, attend) in OTHERS.items():
        if importlib.util.find_spec(module) is None:
            refused[name] = f"{module} is not installed"
            continue
        try:
            good[name] = attend()
        except Exception as error:  # whatever a foreign package raises is its own reason
            refused[name] = reason(error)
    return Tried(good, refused)


def flash_attention_3(module: str) -> Attend:
    """FlashAttention-3's decode: q as [B, 1, H, D], the cache as [B, N, G, D] in any strides whose
    last is 1; splits and the packing of a group are its own heuristics."""
    flash_attn_with_kvcache = importlib.import_module(module).flash_attn_with_kvcache

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_attn_with_kvcache(q[:, None], k.transpose(1, 2), v.transpose(1, 2))

    return attend


def flashinfer() -> Attend:
    """FlashInfer's batch decode over a paged pool, on tensor cores, as it advises for groups.

    Each KV head of a row enters as a sequence of its own: then a contiguous cache is a pool of
    pages in order, without a copy. It plans on the host, once per shape, before a graph is
    captured."""
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper

    @cache
    def planned(
        shape: tuple[int, int, int, int], group_size: int, dtype: torch.dtype, device: torch.device
    ) -> tuple[Any, int]:
        rows, kv_heads, tokens, head_dim = shape
        sequences, page_size = rows * kv_heads, math.gcd(tokens, FLASHINFER_PAGE)
        pages = tokens // page_size

        def int32(x: Tensor) -> Tensor:
            return x.to(torch.int32).to(device)

        indptr = int32(torch.arange(sequences + 1) * pages)
        indices = int32(torch.arange(sequences * pages))
        last = int32(torch.full((sequences,), page_size))
        wrapper = BatchDecodeWithPagedKVCacheWrapper(
            torch.zeros(FLASHINFER_BYTES, dtype=torch.uint8, device=device),
            "HND",
            use_cuda_graph=True,
            use_tensor_cores=True,
            paged_kv_indptr_buffer=torch.empty_like(indptr),
            paged_kv_indices_buffer=torch.empty_like(indices),
            paged_kv_last_page_len_buffer=torch.empty_like(last),
        )
        wrapper.plan(
            *(indptr, indices, last, group_size, 1, head_dim, page_size),
            q_data_type=dtype,
            kv_data_type=dtype,
        )
        return wrapper, page_size

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows, kv_heads, _, head_dim = k.shape
        wrapper, page_size = planned(tuple(k.shape), q.shape[1] // kv_heads, q.dtype, q.device)
        pool = [x.view(-1, 1, page_size, x.shape[3]) for x in (k, v)]
        return wrapper.run(q.view(rows * kv_heads, -1, head_dim), tuple(pool)).view_as(q)

    return attend


FLASHINFER_PAGE = 64
FLASHINFER_BYTES = 128 << 20
FLASH_ATTENTION_3 = {
    "flash_attention_3": "flash_attn_interface",  # its own build, from source
    "flash_attention_3 fa3_fwd": "fa3_fwd_interface",  # forward alone, on PyPI as fa3-fwd
}
OTHERS: dict[str, tuple[str, Callable[[], Attend]]] = {
    **{name: (it, partial(flash_attention_3, it)) for name, it in FLASH_ATTENTION_3.items()},
    "flashinfer": ("flashinfer", flashinfer),
}


def those_that_run(
    variants: dict[str, Attend], q: Tensor, k: Tensor, v: Tensor, truth: Tensor
) -> Tried:
    """Variants that run on these tensors and agree with truth [B, H, D] within 2 %."""
    good, refused = {}, {}
    for name, attend in variants.items():
        try:
            out = attend(q, k, v).reshape(truth.shape)
            if q.is_cuda:
                torch.cuda.synchronize()
        except Exception as error:  # asserts, a build's OSError: no end of a run
            refused[name] = reason(error)
            continue
        off = float((out.float() - truth.float()).norm() / truth.float().norm())
        if off <= 0.02:
            good[name] = attend
        else:
            refused[name] = f"its output is {off:.0%} off"
    return Tried(good, refused)


def reason(error: Exception) -> str:
    """One line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
