"""What is asked of a generated task: how many prompts, of how many tokens, from which seed.

It comes as lm-eval's metadata: a task YAML's own, TaskManager(metadata=…) or --metadata.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sparse_eval.lm_tasks.token_count import TokenCount, token_count

TOKENIZER_KEYS = ("tokenizer", "pretrained")
"""Where a tokenizer's name can stand: lm-eval's command line adds a model's arguments."""


@dataclass(frozen=True)
class Request:
    """max_length: tokens that no prompt exceeds, special tokens and a chat frame included. text:
    docs, or a UTF-8 file's path. count(prompt): its tokens."""

    task: str
    count: TokenCount
    max_length: int
    num_samples: int
    seed: int
    text: str


def request_of(task: str, metadata: Mapping[str, Any]) -> Request:
    """metadata may hold more than is asked here. Raises ValueError in one line."""
    tokenizer = next((metadata[key] for key in TOKENIZER_KEYS if metadata.get(key)), None)
    if not isinstance(tokenizer, str):
        raise ValueError(
            f"{task}: metadata must name the tokenizer that max_length counts by, a model's name "
            f"or folder, got {tokenizer!r}"
        )
    is_chat = metadata.get("apply_chat_template", False)
    if not isinstance(is_chat, bool):
        raise ValueError(
            f"{task}: metadata apply_chat_template must be true or false, got {is_chat!r}"
        )
    text = metadata.get("text", "docs")
    if not isinstance(text, str) or not text:
        raise ValueError(f"{task}: metadata text must be docs or a file's path, got {text!r}")
    max_length = integer(task, metadata, "max_length", at_least=1)
    num_samples = integer(task, metadata, "num_samples", at_least=1)
    seed = integer(task, metadata, "seed", at_least=0)
    return Request(task, token_count(tokenizer, is_chat), max_length, num_samples, seed, text)


def integer(task: str, metadata: Mapping[str, Any], key: str, *, at_least: int) -> int:
    value = metadata.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise ValueError(f"{task}: metadata {key} must be an integer >= {at_least}, got {value!r}")
    return value
