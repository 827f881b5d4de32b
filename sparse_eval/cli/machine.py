"""How fast this machine is, measured in a fraction of a second: what predictions are made from."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

REPEATS = 5


@dataclass(frozen=True)
class Machine:
    """flops: a second, of a matrix product of the size a prefill chunk makes. bytes_per_second: of
    weights read by a matrix-vector product. norm_seconds: an RMS norm of one token, nine operations
    too small to take longer than their start."""

    flops: float
    bytes_per_second: float
    norm_seconds: float


def measured_now(device: str, dtype: torch.dtype) -> Machine:
    a_MK = torch.ones(1024, 2048, device=device, dtype=dtype)
    b_KN = torch.ones(2048, 2048, device=device, dtype=dtype)
    weights_NK = torch.ones(16 * 2048, 2048, device=device, dtype=dtype)  # beyond any cache
    x_K = torch.ones(2048, device=device, dtype=dtype)
    q_BHD = torch.ones(1, 16, 64, device=device, dtype=dtype)
    product = seconds_of(lambda: a_MK @ b_KN, device)
    read = seconds_of(lambda: weights_NK @ x_K, device)
    norm = seconds_of(lambda: rms_norm(q_BHD), device, times=100)
    return Machine(
        flops=2 * a_MK.numel() * b_KN.shape[1] / product,
        bytes_per_second=weights_NK.numel() * dtype.itemsize / read,
        norm_seconds=norm,
    )


def rms_norm(q_BHD: Tensor) -> Tensor:
    wide = q_BHD.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    flat = wide.to(q_BHD.dtype).transpose(0, 1).reshape(1, -1)
    return torch.cat([flat, flat], -1)


def seconds_of(work: Callable[[], object], device: str, times: int = 1) -> float:
    """The median; the first run, which starts libraries, is not counted."""
    found = []
    for _ in range(1 + REPEATS):
        started = time.perf_counter()
        for _ in range(times):
            work()
        if device != "cpu":
            torch.cuda.synchronize(device)
        found.append((time.perf_counter() - started) / times)
    return statistics.median(found[1:])
