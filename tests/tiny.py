"""Tiny random models, prompts and captures, built in process."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

import sparse_eval
from sparse_eval.capture import CapturedKV
from sparse_eval.device import DTYPES
from sparse_eval.models import load_model
from sparse_eval.prefill import prefill
from sparse_eval.record import record

CONF = Path(sparse_eval.__file__).parent / "conf"


@cache
def tiny_loaded(name: str, dtype: str = "float32") -> Any:
    cfg = yaml.safe_load((CONF / "model" / f"{name}.yaml").read_text())
    return load_model(cfg, device="cpu", dtype=DTYPES[dtype], model_cache=Path("unused"))


def tiny_model(name: str) -> Any:
    return tiny_loaded(name).model


def random_ids(length: int, *, rows: int = 1, seed: int = 0) -> Tensor:
    return torch.randint(3, 100, (rows, length), generator=torch.Generator().manual_seed(seed))


def tiny_capture(model: Any, *, context: int, steps: int, seed: int = 0) -> CapturedKV:
    filled = prefill(model, random_ids(context, seed=seed)[0])
    meta = {
        "capture_hash": f"tiny-{context}-{steps}-{seed}",
        "model": "tiny",
        "revision": "random",
        "weights": "random",
        "prompt_hash": "p",
        "prompt_source": "random tokens",
    }
    return record(model, filled, meta=meta, num_steps=steps)
