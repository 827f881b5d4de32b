"""Made-up inputs for tests. Nothing here was measured on a model."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import yaml

from sparse_eval.latency.config import Shapes
from sparse_eval.policies.quest import Quest

NAN = float("nan")
KEYED = ("model", "context", "policy", "policy_config", "budget_tokens", "prompt_hash", "seed")


def recall_rows(
    policies: Sequence[str] = ("quest", "full", "oracle", "window", "random"),
    budgets: Sequence[int] = (256, 512, 1024, 2048),
    *,
    num_samples: int = 1,
    num_layers: int = 30,
    num_kv_heads: int = 3,
    context: int = 4096,
    page_size: int = 16,
    **common: Any,
) -> list[dict[str, Any]]:
    """Synthetic recall rows with the shape of a real run: curves that rise with the budget, a
    window that is strong where forced pages hold much, exact byte arithmetic for head_dim 64."""
    cells = itertools.product(range(num_samples), policies, budgets)
    rows = [
        row | common
        for sample, policy, budget in cells
        for row in recall_cell(policy, budget, sample, num_layers, num_kv_heads, context, page_size)
    ]
    for row in rows:
        row["cell_key"] = hashlib.sha256(repr([row[k] for k in KEYED]).encode()).hexdigest()
    return rows


def recall_cell(
    policy: str,
    budget: int,
    sample: int,
    num_layers: int,
    num_kv_heads: int,
    context: int,
    page_size: int,
) -> Iterator[dict[str, Any]]:
    prompt = hashlib.sha256(f"prompt {sample}".encode()).hexdigest()
    per_token = 2 * 64 * 4
    for layer, kv_head in itertools.product(range(num_layers), range(num_kv_heads)):
        dense = layer < 2
        base = policy.split(":")[0]
        share = 1.0 if dense or base == "full" else budget / context
        forced = forced_mass(layer, kv_head, sample)
        noise = luck(sample) * luck(sample, layer, kv_head)
        recall = 1.0 if share == 1 else forced + (1 - forced) * found(base, share, layer) * noise
        metadata = 0 if dense else metadata_bytes(base, context, page_size)
        yield {
            "schema": 1,
            "task": "recall",
            "sample": sample,
            "prompt_hash": prompt,
            "prompts": "made up",
            "model": "synthetic-135m",
            "revision": "none",
            "weights": "Q4_1",
            "policy": policy,
            "policy_config": {"page_size": page_size, "sink_pages": 1, "local_pages": 2},
            "adaptive": False,
            "budget_tokens": budget,
            "page_size": page_size,
            "sink_pages": 1,
            "local_pages": 2,
            "context": context,
            "protocol": "decode",
            "dense_layers": [0, 1],
            "backend": "torch",
            "device": "cpu",
            "dtype": "float32",
            "seed": 0,
            "capture_hash": hashlib.sha256(f"capture {prompt}".encode()).hexdigest(),
            "seconds": 0.5,
            "peak_memory": 1e9,
            "layer": layer,
            "layer_kind": "full",
            "kv_head": kv_head,
            "dense_layer": dense,
            "queries": 32,
            "mass_recall": recall,
            "mass_recall_p10": 0.9 * recall,
            "mass_forced": forced,
            "recall_contested": (recall - forced) / (1 - forced) if forced < 0.999 else NAN,
            "output_error": 0.8 * (1 - recall),
            "lse_error": -float(np.log(recall)),
            "page_overlap_oracle": 1.0 if share == 1 else 0.5 + 0.5 * recall,
            "tokens_read": share * context,
            "density": share,
            "bytes_kv": share * context * per_token,
            "bytes_metadata": metadata,
            "bytes_dense": context * per_token,
            "bytes_stored": context * per_token + (0 if np.isnan(metadata) else metadata),
        }


def forced_mass(layer: int, kv_head: int, sample: int) -> float:
    return 0.55 + 0.35 * float(np.sin(1.7 * layer + kv_head + 0.9 * sample)) ** 2


def luck(*cell: Any) -> float:
    """A factor in [0.85, 1], the same for every policy: prompts, layers and heads differ."""
    return 1 - 0.15 * hashlib.sha256(repr(cell).encode()).digest()[0] / 255


def found(base: str, share: float, layer: int) -> float:
    """The share of contested mass that a made-up policy finds."""
    steep = {"oracle": 14.0, "quest": 7.0, "mean_std": 8.0, "snapkv": 5.0, "window": 3.0}
    if base == "random":
        return share
    if base == "window" and layer % 9 == 4:
        return 1 - float(np.exp(-11 * share))
    return 1 - float(np.exp(-steep.get(base, 4.0) * share))


def metadata_bytes(base: str, context: int, page_size: int) -> float:
    if base == "oracle":
        return NAN
    return context / page_size * 2 * 64 * 4 if base in ("quest", "mean_std") else 0.0


def latency_rows() -> list[dict[str, Any]]:
    """A grid in which batch 1 loses and batch 8 wins: two contexts, graphs and eager."""
    rows: list[dict[str, Any]] = []
    for batch in (1, 8):
        for context in (4096, 8192):
            times = {"dense": batch * context / 1000, "step": 6.0}
            for what, graph in ((w, g) for w in times for g in (True, False)):
                rows.append(
                    {
                        "schema": 1,
                        "task": "latency",
                        "model": "qwen",
                        "weights": "none: shapes only",
                        "device": "a GPU",
                        "dtype": "bfloat16",
                        "page_size": 64,
                        "budget_tokens": 2048,
                        "lists": "scattered",
                        "batch": batch,
                        "context": context,
                        "what": what,
                        "graph": graph,
                        "l2_resident": what == "step" and batch == 1,
                        "median_us": times[what] + (0 if graph else 100),
                        "p10_us": times[what],
                        "p90_us": times[what] + 100,
                        "bytes": 1,
                        "terabytes_per_s": 1.0,
                        "ceiling_fraction": 0.25,
                        "baseline": "",
                        "speedup_vs_sdpa": times["dense"] / times[what],
                        "speedup_vs_best": times["dense"] / times[what],
                    }
                )
    return rows


def latency_settings(
    task: dict[str, Any],
    shapes: Shapes,
    page_size: int,
    budget: int,
    device: str,
    dtype: str,
) -> Any:
    """What resolve makes of task=latency with the default model and these values."""
    conf = Path(__file__).parent.parent / "conf"
    given = yaml.safe_load((conf / "task/latency.yaml").read_text())
    model = (conf / "model/deepseek_r1_distill_qwen_1_5b.yaml").read_text()
    return SimpleNamespace(
        task=given | task | {"shapes": vars(shapes)},
        model=yaml.safe_load(model),
        policies=[SimpleNamespace(label="quest", policy=Quest(page_size=page_size))],
        budgets=(budget,),
        protocol={"name": "decode"},
        dense_layers=(0, 1),
        backend="triton",
        device=device,
        dtype=dtype,
        seed=0,
    )
