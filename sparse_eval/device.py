"""Which device, dtype and kernel backend run, said out loud; and the memory they peaked at."""

from __future__ import annotations

import os
import resource
import sys

import torch

from sparse_eval.kernels.sparse_decode import BACKENDS

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_device(device: str) -> str:
    """auto: the GPU if there is one, else the CPU."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        kind = torch.device(device).type
    except RuntimeError:
        raise ValueError(f"device must be auto, cpu, cuda or cuda:N, got {device!r}") from None
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"device must be auto, cpu, cuda or cuda:N, got {device!r}")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device={device} needs a CUDA GPU, and torch sees none; use device=cpu")
    return device


def resolve_dtype(dtype: str, device: str) -> torch.dtype:
    """auto: float32 on a CPU, bfloat16 on a GPU."""
    if dtype == "auto":
        return torch.float32 if device == "cpu" else torch.bfloat16
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be auto, {', '.join(DTYPES)}, got {dtype!r}")
    return DTYPES[dtype]


def resolve_backend(backend: str, device: str) -> str:
    """auto: triton on a GPU, torch on a CPU."""
    if backend == "auto":
        return "torch" if device == "cpu" else "triton"
    if backend not in BACKENDS:
        raise ValueError(f"backend must be auto, {', '.join(BACKENDS)}, got {backend!r}")
    check_runs("backend", backend, device)
    return backend


def check_runs(name: str, backend: str, device: str) -> None:
    """ValueError for triton on a CPU without its interpreter. name: the setting that asks."""
    if backend == "triton" and device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(
            f"{name}=triton needs a GPU, got device=cpu; use {name}=torch, or set "
            "TRITON_INTERPRET=1 to run the kernel in Triton's interpreter (slow)"
        )


def describe_device(device: str) -> str:
    """A GPU's name, or the CPU with the number of threads torch uses."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    return f"CPU, {torch.get_num_threads()} threads"


def describe_dtype(dtype: str, device: str) -> str:
    """The dtype, and whether a GPU rounds the operands of float32 matrix products to TF32 (as some
    containers ask torch for): then a float32 model's own layers are not float32 throughout."""
    is_tf32 = torch.get_float32_matmul_precision() != "highest"
    is_concerned = device.startswith("cuda") and dtype == "float32"
    return f"{dtype} (matrix products in TF32)" if is_concerned and is_tf32 else dtype


def peak_memory_bytes(device: torch.device | str = "cpu") -> int:
    """Peak bytes so far: of the allocator on a GPU, the process's resident memory on a CPU."""
    if torch.device(device).type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
