"""task=latency's settings together, with the policy and the device: what no part can time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sparse_eval.kernels.ffd.api import MIN_TILE
from sparse_eval.kernels.quest_select import can_select
from sparse_eval.kernels.sparse_decode.api import MAX_TRITON_HEAD_DIM
from sparse_eval.kernels.thumbnail import MAX_TRITON_PAGE_SIZE, can_use_triton
from sparse_eval.latency.config import FFD_PARTS, QUEST_PARTS, LatencyConfig, latency_config
from sparse_eval.latency.replay import check_keys, check_replay
from sparse_eval.policies.quest import Quest

PAGED_PARTS = ("metadata", "select", "step")
RESIDUAL_PARTS = ("ffd_attend_residual", "ffd_step_residual")
KEYS_PER_BYTE = 4  # coordinates of a thumbnail's byte, at its 2 bits


def check_latency(task: Mapping[str, Any], info: Any, policy: Any, device: str) -> None:
    """ValueError in one line for what cannot be timed here."""
    config = latency_config(task, info)
    if not device.startswith("cuda"):
        raise ValueError(
            f"task=latency needs a CUDA GPU, got device={device}: nothing is emulated, and times "
            "on a CPU would say nothing about one"
        )
    if type(policy) is not Quest or policy.metadata_dtype == "float32":
        given = type(policy).__name__.lower()
        if isinstance(policy, Quest):
            given += f" with {policy.metadata_dtype}"
        raise ValueError(
            "task=latency times Quest's select kernel: policy must be quest with metadata_dtype "
            f"auto or int8, got {given}"
        )
    check_head_dim(config)
    check_pages(config, policy)
    if config.keys is not None:
        check_keys(config.keys, vars(config.shapes), config.contexts)
    if config.lists is not None:
        check_replay(config.lists, config.shapes.num_kv_heads, config.contexts)


def check_head_dim(config: LatencyConfig) -> None:
    """ValueError for heads that a part has no kernel for."""
    head_dim = config.shapes.head_dim
    for parts, accepted, is_accepted in (
        (
            (*QUEST_PARTS, "generate", *FFD_PARTS),
            f"<= {MAX_TRITON_HEAD_DIM}",
            head_dim <= MAX_TRITON_HEAD_DIM,
        ),
        (FFD_PARTS, f"a multiple of {KEYS_PER_BYTE}", head_dim % KEYS_PER_BYTE == 0),
        (("generate",), "even", head_dim % 2 == 0),  # rotary embeddings turn pairs of channels
    ):
        part = first_of(parts, config)
        if part and not is_accepted:
            raise ValueError(
                f"task.shapes.head_dim must be {accepted} for task.what={part}, got {head_dim}"
            )


def check_pages(config: LatencyConfig, policy: Quest) -> None:
    """ValueError for pages of which a part has none to work on, or more than it takes."""
    size, least = policy.page_size, min(config.contexts)
    part = first_of((*FFD_PARTS, "rules"), config)
    if part and not can_use_triton(size):
        raise ValueError(
            f"task.what={part} takes page sizes that are powers of two up to "
            f"{MAX_TRITON_PAGE_SIZE}, got {size}"
        )
    part = first_of(PAGED_PARTS, config)
    if part and least < size:
        raise ValueError(
            f"task.contexts must be at least {size} for task.what={part}, which needs a full page "
            f"(page_size={size}), got {least}"
        )
    part = first_of(FFD_PARTS, config)
    if part and size > 1 and least <= size:
        raise ValueError(
            f"task.contexts must be at least {size + 1} for task.what={part}, which needs a full "
            f"page and one that is filling (page_size={size}), got {least}"
        )
    if part and size > 1 and not policy.sink_pages and policy.local_pages < 2:
        raise ValueError(
            f"task.what={part} takes its pseudo-maximum from a full page: sink_pages must be at "
            f"least 1 or local_pages at least 2, got 0 and {policy.local_pages}"
        )
    part = first_of(RESIDUAL_PARTS, config)
    if part and config.scales == "channel" and size < MIN_TILE:
        raise ValueError(
            f"page_size must be at least {MIN_TILE} for task.what={part} with task.scales=channel, "
            f"got {size}"
        )
    num_pages = -(-max(config.contexts) // size)
    if first_of((*QUEST_PARTS, "generate"), config) and not can_select(policy.group, num_pages):
        raise ValueError(
            "task=latency: the select kernel takes group max or sum and fewer than 32,768 pages, "
            f"got group={policy.group} and {num_pages:,} pages"
        )


def first_of(parts: Sequence[str], config: LatencyConfig) -> str | None:
    """The first part of these that the run times."""
    return next((part for part in parts if part in config.what), None)
