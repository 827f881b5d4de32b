"""ModelInfo: what is known of a model before its weights: from a yaml, a config, a header."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from sparse_eval.inputs.gguf_header import GgufHeader

SHAPES = ("num_layers", "num_heads", "num_kv_heads", "head_dim")
_SHORT_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


@dataclass(frozen=True, kw_only=True)
class ModelInfo:
    """Names for rows and titles, and shapes. None: not known before the checkpoint is there.

    weights: how they are stored, such as "Q4_1 GGUF", "bf16" or "random". revision: what pins
    them: a commit, or a hash of the file. max_context, default_context: tokens.
    """

    name: str
    base: str
    variant: str
    weights: str | None
    revision: str | None
    default_context: int
    max_context: int | None
    num_layers: int | None
    num_heads: int | None
    num_kv_heads: int | None
    head_dim: int | None
    num_parameters: int | None

    @property
    def label(self) -> str:
        """Base and variant: "SmolLM2-135M (Instruct)"."""
        return f"{self.base} ({self.variant})" if self.variant else self.base

    @property
    def title(self) -> str:
        """Base, variant and quantisation: "SmolLM2-135M (Instruct) · Q4_1 GGUF"."""
        return f"{self.label} · {self.weights}" if self.weights else self.label


def info_from(cfg: Mapping[str, Any], found: Mapping[str, Any]) -> ModelInfo:
    """The yaml's fields; what it leaves null comes from `found` (read from the checkpoint)."""

    def pick(key: str) -> Any:
        given = cfg.get(key)
        return found.get(key) if given is None else given

    values = {field.name: pick(field.name) for field in fields(ModelInfo)}
    values["base"] = values["base"] or values["name"]
    values["variant"] = values["variant"] or ""
    for key in ("default_context", "max_context", *SHAPES, "num_parameters"):
        value = values[key]
        is_count = isinstance(value, int) and not isinstance(value, bool) and value >= 1
        if not is_count and (value is not None or key == "default_context"):
            raise ValueError(f"model.{key} must be an integer >= 1, got {value!r}")
    heads, kv_heads = values["num_heads"], values["num_kv_heads"]
    if heads and kv_heads and heads % kv_heads:
        raise ValueError(
            f"model.num_heads must be a multiple of model.num_kv_heads ({kv_heads}), got {heads}"
        )
    return ModelInfo(**values)


def facts_of_config(config: Any) -> dict[str, Any]:
    """Shapes, longest context and weight label from a transformers config."""
    text = config.get_text_config()
    num_heads = getattr(text, "num_attention_heads", None)
    hidden_size = getattr(text, "hidden_size", None)
    head_dim = getattr(text, "head_dim", None)
    if head_dim is None and num_heads and hidden_size:
        head_dim = hidden_size // num_heads
    return {
        "num_layers": getattr(text, "num_hidden_layers", None),
        "num_heads": num_heads,
        "num_kv_heads": getattr(text, "num_key_value_heads", None) or num_heads,
        "head_dim": head_dim,
        "max_context": getattr(text, "max_position_embeddings", None),
        "weights": weights_label(config),
    }


def weights_label(config: Any) -> str | None:
    """How its weights are stored, by a checkpoint's config: "bf16", "gptq 4-bit"; None: silent."""
    quantised = getattr(config, "quantization_config", None)
    if quantised:
        as_dict = quantised if isinstance(quantised, dict) else quantised.to_dict()
        bits = as_dict.get("bits")
        return f"{as_dict.get('quant_method', 'quantised')}{f' {bits}-bit' if bits else ''}"
    dtype = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None)
    name = str(dtype).removeprefix("torch.")
    return _SHORT_DTYPES.get(name, name) if dtype else None


def facts_of_gguf(header: GgufHeader, path: Path) -> dict[str, Any]:
    """The same facts from a GGUF header."""
    from gguf.constants import LlamaFileType

    file_type: Any = header.metadata.get("general.file_type")
    known = file_type in LlamaFileType._value2member_map_
    quantisation = LlamaFileType(file_type).name.partition("_")[2] if known else "quantised"
    num_heads = header.of_architecture("attention.head_count")
    width = header.of_architecture("embedding_length")
    return {
        "name": path.stem,
        "weights": f"{quantisation} GGUF",
        "num_layers": header.of_architecture("block_count"),
        "num_heads": num_heads,
        "num_kv_heads": header.of_architecture("attention.head_count_kv") or num_heads,
        "head_dim": header.of_architecture("attention.key_length")
        or (width // num_heads if width and num_heads else None),
        "max_context": header.of_architecture("context_length"),
        "num_parameters": header.num_parameters,
    }


def count_parameters(safetensors: list[Path]) -> int | None:
    """Parameters of a checkpoint from its files' headers; None for packed (integer) weights."""
    total = 0
    for path in safetensors:
        if path.suffix != ".safetensors":
            return None
        for tensor in safetensors_header(path).values():
            if not tensor["dtype"].startswith(("F", "BF")):
                return None
            total += math.prod(tensor["shape"])
    return total


def safetensors_header(path: Path) -> dict[str, Any]:
    """Name -> dtype, shape and offsets. Source: https://github.com/huggingface/safetensors."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= path.stat().st_size:
            raise ValueError(f"{path} is truncated or not a safetensors file")
        header = json.loads(file.read(length))
    return {name: tensor for name, tensor in header.items() if name != "__metadata__"}


def folder_revision(files: list[Path]) -> str:
    """A hash of a local checkpoint: small files by content, weights by size and time of change,
    since reading all of them would take longer than a plan may. A copy is another revision."""
    digest = hashlib.sha256()
    for path in sorted(files):
        status = path.stat()
        digest.update(f"{path.name}:{status.st_size}:".encode())
        is_small = status.st_size < 1 << 20
        digest.update(path.read_bytes() if is_small else str(status.st_mtime_ns).encode())
    return f"folder:{digest.hexdigest()[:12]}"
