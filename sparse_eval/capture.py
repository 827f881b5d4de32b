"""CapturedKV: K, V, queries and the model's own attention outputs of real decode steps, as a file.

The format is documented in docs/capture.md and can be evaluated without this package.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from sparse_eval.core import AttentionCall

FORMAT_VERSION = 1
METADATA_KEY = "sparse_eval"


@dataclass(frozen=True)
class LayerCapture:
    """One full-attention layer: keys_GND, values_GNE (un-expanded, post-RoPE), queries_THD and
    outputs_THE of T decode steps, prompt_queries_WHD of the last W prompt tokens."""

    keys_GND: Tensor
    values_GNE: Tensor
    queries_THD: Tensor
    outputs_THE: Tensor
    prompt_queries_WHD: Tensor
    scale: float


@dataclass(frozen=True)
class CapturedKV:
    """A prompt's captured cache. lengths_T: int32, query t attends keys[:lengths_T[t]].

    layers holds the full-attention layers by index; meta["layer_kinds"] names every layer's kind.
    """

    layers: dict[int, LayerCapture]
    lengths_T: Tensor
    meta: dict[str, Any] = field(default_factory=dict)

    @property
    def hash(self) -> str:
        return self.meta["capture_hash"]

    @property
    def prompt_length(self) -> int:
        return self.meta["prompt_length"]

    @property
    def num_queries(self) -> int:
        return len(self.lengths_T)

    def to(self, device: str | torch.device) -> CapturedKV:
        def move(layer: LayerCapture) -> LayerCapture:
            tensors = {n: x.to(device) for n, x in vars(layer).items() if isinstance(x, Tensor)}
            return LayerCapture(**tensors, scale=layer.scale)

        layers = {i: move(layer) for i, layer in self.layers.items()}
        return CapturedKV(layers, self.lengths_T.to(device), self.meta)

    def replay_call(self, layer: int) -> AttentionCall:
        """All T decode queries of a layer as T rows over one shared cache."""
        x = self.layers[layer]
        return AttentionCall(
            q_BHD=x.queries_THD,
            k_BGND=x.keys_GND[None],
            v_BGNE=x.values_GNE[None],
            lengths_B=self.lengths_T,
            scale=x.scale,
            layer=layer,
        )

    def step_call(self, layer: int, step: int) -> AttentionCall:
        """Decode step `step` of a layer as one row."""
        x = self.layers[layer]
        return AttentionCall(
            q_BHD=x.queries_THD[step : step + 1],
            k_BGND=x.keys_GND[None],
            v_BGNE=x.values_GNE[None],
            lengths_B=self.lengths_T[step : step + 1],
            scale=x.scale,
            layer=layer,
            step=step,
        )

    def save(self, path: str | Path) -> None:
        """Write atomically as safetensors; the metadata carries a digest of all tensors' bytes."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        tensors = {"lengths": self.lengths_T.cpu()}
        for i, layer in self.layers.items():
            for name in _TENSOR_NAMES:
                tensors[f"layers.{i}.{name}"] = getattr(layer, _FIELDS[name]).cpu().contiguous()
        meta = self.meta | {
            "format_version": FORMAT_VERSION,
            "scales": {str(i): layer.scale for i, layer in self.layers.items()},
            "digest": _digest(tensors),
        }
        partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
        try:
            save_file(tensors, partial, metadata={METADATA_KEY: json.dumps(meta)})
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)


_FIELDS = {
    "keys": "keys_GND",
    "values": "values_GNE",
    "queries": "queries_THD",
    "outputs": "outputs_THE",
    "prompt_queries": "prompt_queries_WHD",
}
_TENSOR_NAMES = tuple(_FIELDS)


def load_capture(path: str | Path, device: str | torch.device = "cpu") -> CapturedKV:
    """Read a capture file. Raises ValueError in one line for a missing, torn or altered file."""
    path = Path(path)
    if not os.path.isfile(path):
        raise ValueError(f"no capture file at {path}")
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            meta = json.loads((file.metadata() or {})[METADATA_KEY])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, KeyError, json.JSONDecodeError, OSError) as error:
        raise ValueError(f"{path} is not a readable capture ({type(error).__name__})") from None
    if not isinstance(meta, dict):
        raise ValueError(f"{path} is not a readable capture (its metadata is no mapping)")
    if meta.get("format_version") != FORMAT_VERSION:
        raise ValueError(
            f"{path} has capture format {meta.get('format_version')}, expected {FORMAT_VERSION}"
        )
    if meta.get("digest") != _digest(tensors):
        raise ValueError(f"{path} was altered or truncated: its tensors do not match its digest")
    if lack := what_lacks(meta, tensors):
        raise ValueError(f"{path} is not a readable capture ({lack})")
    layers = {
        int(i): LayerCapture(
            **{_FIELDS[n]: tensors[f"layers.{i}.{n}"].to(device) for n in _TENSOR_NAMES},
            scale=scale,
        )
        for i, scale in meta["scales"].items()
    }
    return CapturedKV(layers, tensors["lengths"].to(device), meta)


def what_lacks(meta: dict[str, Any], tensors: dict[str, Tensor]) -> str:
    """What the format promises (docs/capture.md) and the file does not hold; "" for a whole one."""
    for key, kind in (("scales", dict), ("prompt_length", int), ("capture_hash", str)):
        if not isinstance(meta.get(key), kind):
            return f"its metadata has no {key}"
    lengths = tensors.get("lengths")
    if lengths is None or lengths.dim() != 1 or not len(lengths) or lengths.is_floating_point():
        return "it has no lengths [T]"
    for i, scale in meta["scales"].items():
        if not i.isdecimal() or not isinstance(scale, int | float) or isinstance(scale, bool):
            return f"the scale of layer {i!r} is {scale!r}"
        of_layer = [tensors.get(f"layers.{i}.{name}") for name in _TENSOR_NAMES]
        for name, x in zip(_TENSOR_NAMES, of_layer, strict=True):
            if x is None or x.dim() != 3:
                return f"it has no layers.{i}.{name} of three dimensions"
        k, v, q, out, prompt_q = (x for x in of_layer if x is not None)
        (kv_heads, num_tokens, head_dim), num_heads = k.shape, q.shape[1]
        if (
            v.shape[:2] != (kv_heads, num_tokens)
            or q.shape != (len(lengths), num_heads, head_dim)
            or out.shape != (len(lengths), num_heads, v.shape[2])
            or prompt_q.shape[1:] != (num_heads, head_dim)
            or not kv_heads
            or num_heads % kv_heads
            or int(lengths.max()) > num_tokens
        ):
            shapes = ", ".join(
                f"{n} {list(x.shape)}"
                for n, x in zip(_TENSOR_NAMES, (k, v, q, out, prompt_q), strict=True)
            )
            return f"layer {i}'s shapes do not fit each other: {shapes}"
    return ""


def _digest(tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        x = tensors[name]
        digest.update(f"{name}{list(x.shape)}{x.dtype}".encode())
        digest.update(x.contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()
