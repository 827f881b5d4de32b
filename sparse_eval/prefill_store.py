"""Prefilled caches on disk, one safetensors file a prompt: what cache_prefill=true keeps."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import DynamicCache

from sparse_eval.prefill import Prefilled


def save_prefill(prefilled: Prefilled, path: Path) -> None:
    """Write atomically. `seen`: the tokens each layer has seen; a sliding layer keeps fewer."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {"ids": prefilled.ids.cpu()}
    for i, layer in enumerate(prefilled.cache.layers):
        tensors[f"{i}.keys"] = layer.keys.cpu().contiguous()
        tensors[f"{i}.values"] = layer.values.cpu().contiguous()
        tensors[f"{i}.seen"] = torch.tensor(layer.get_seq_length())
    for i, queries in prefilled.prompt_queries.items():
        tensors[f"{i}.prompt_queries"] = queries.cpu().contiguous()
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        save_file(tensors, partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def load_prefill(path: Path, model: Any, ids: Tensor) -> Prefilled:
    """The prefill of `ids`, on the model's device. Raises ValueError if the file is not that."""
    try:
        tensors = load_file(path, device=str(model.device))
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is not a readable prefill ({type(error).__name__})") from None
    if not torch.equal(tensors["ids"].cpu(), ids.cpu()):
        raise ValueError(f"{path} is the prefill of another prompt")
    cache = DynamicCache(config=model.config)
    queries: dict[int, Tensor] = {}
    for i in range(model.config.get_text_config().num_hidden_layers):
        cache.update(tensors[f"{i}.keys"], tensors[f"{i}.values"], i)
        layer: Any = cache.layers[i]
        if hasattr(layer, "cumulative_length"):
            layer.cumulative_length = int(tensors[f"{i}.seen"])
        if f"{i}.prompt_queries" in tensors:
            queries[i] = tensors[f"{i}.prompt_queries"]
    return Prefilled(ids, cache, queries)
