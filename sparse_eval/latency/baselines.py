"""The dense attention that others have: torch's SDPA backends, FlashAttention-3 and FlashInfer."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

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


def other_kernels() -> dict[str, Attend]:
    """Those of other packages that can be imported here."""
    found: dict[str, Attend] = {}
    if importlib.util.find_spec("flash_attn_interface"):
        found["flash_attention_3"] = flash_attention_3
    if importlib.util.find_spec("flashinfer"):
        found["flashinfer"] = flashinfer_single
    return found


def flash_attention_3(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    from flash_attn_interface import flash_attn_with_kvcache

    return flash_attn_with_kvcache(q[:, None], k.transpose(1, 2), v.transpose(1, 2))


def flashinfer_single(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """FlashInfer's decode of one row; batches need its paged wrapper, whose plan waits."""
    from flashinfer import single_decode_with_kv_cache

    if len(q) != 1:
        raise RuntimeError("one row only")
    return single_decode_with_kv_cache(q[0], k[0], v[0], kv_layout="HND", use_tensor_cores=True)


def those_that_run(
    variants: dict[str, Attend], q: Tensor, k: Tensor, v: Tensor, truth: Tensor
) -> dict[str, Attend]:
    """Variants that run on these tensors and agree with truth [B, H, D] within 2 %."""
    good = {}
    for name, attend in variants.items():
        try:
            out = attend(q, k, v).reshape(truth.shape)
            torch.cuda.synchronize()
        except (RuntimeError, TypeError, ImportError):
            continue
        if (out.float() - truth.float()).norm() <= 0.02 * truth.float().norm():
            good[name] = attend
    return good
