"""How many tokens a prompt has, as lm-eval's Hugging Face models encode it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from sparse_eval.inputs.hub import is_offline, is_reachable

TokenCount = Callable[[str], int]


@cache
def token_count(name: str, is_chat: bool) -> TokenCount:
    """name: a folder or a hub id. is_chat: prompts are one user message in the tokenizer's chat
    format, whose tokens count. Raises ValueError in one line."""
    tokenizer = load_tokenizer(name)
    if not is_chat:
        return lambda prompt: len(tokenizer(prompt, verbose=False)["input_ids"])
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(f"apply_chat_template needs a tokenizer with a chat template, not {name}")

    def count(prompt: str) -> int:
        rendered = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=False
        )
        # a format that spells out its BOS gets no second one
        has_bos = bool(tokenizer.bos_token) and rendered.startswith(tokenizer.bos_token)
        return len(tokenizer(rendered, add_special_tokens=not has_bos, verbose=False)["input_ids"])

    return count


def load_tokenizer(name: str) -> Any:
    if not Path(name).is_dir() and not is_offline() and not is_reachable():
        raise ValueError(f"tokenizer {name} is no folder, and the hub cannot be reached")
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(f"no tokenizer at {name!r}: {reason}") from error
