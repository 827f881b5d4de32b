"""What one process keeps from job to job: the model loaded last, the captures used last."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sparse_eval.capture import CapturedKV
from sparse_eval.config import Settings
from sparse_eval.device import DTYPES
from sparse_eval.models import LoadedModel, load_model

CAPTURE_BYTES = 2 * 2**30
"""How much of captures a process holds; those used longest ago go first."""

_models: dict[str, LoadedModel] = {}
_captures: OrderedDict[str, CapturedKV] = OrderedDict()


def shared_model(settings: Settings) -> LoadedModel:
    """The settings' model; loading another one first lets go of this one and of all captures."""
    s = settings
    parts = [s.model, s.device, s.dtype, str(s.model_cache)]
    key = json.dumps(parts, sort_keys=True, default=str)
    if key not in _models:
        release()
        options: dict[str, Any] = {"device": s.device, "dtype": DTYPES[s.dtype]}
        _models[key] = load_model(s.model, model_cache=Path(s.model_cache), **options)
    return _models[key]


def shared_capture(key: str, device: str, make: Callable[[], CapturedKV]) -> CapturedKV:
    """The capture of that content on that device, made at most once while it is held."""
    name = f"{key}@{device}"
    if name not in _captures:
        _captures[name] = make()
    _captures.move_to_end(name)
    while len(_captures) > 1 and sum(map(bytes_of, _captures.values())) > CAPTURE_BYTES:
        _captures.popitem(last=False)
    captured = _captures[name]
    if bytes_of(captured) > CAPTURE_BYTES:
        del _captures[name]
    return captured


def bytes_of(captured: CapturedKV) -> int:
    layers = captured.layers.values()
    return sum(
        x.numel() * x.element_size()
        for layer in layers
        for x in (layer.keys_GND, layer.values_GNE, layer.queries_THD, layer.outputs_THE)
    )


def forget_captures() -> None:
    _captures.clear()


def release() -> None:
    """Hold nothing any more."""
    _models.clear()
    forget_captures()
