"""How many tokens a prompt has, as lm-eval's Hugging Face models encode it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from typing import Any

from sparse_eval.inputs.hub import is_offline, is_reachable


@dataclass(frozen=True)
class TokenCount:
    """is_chat: prompts are one user message in the tokenizer's chat format, whose tokens count."""

    tokenizer: Any
    is_chat: bool

    def __call__(self, prompt: str) -> int:
        if not self.is_chat:
            return len(self.tokenizer(prompt, verbose=False)["input_ids"])
        rendered = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=False
        )
        # a format that spells out its BOS gets no second one
        bos = self.tokenizer.bos_token
        has_bos = bool(bos) and rendered.startswith(bos)
        encoded = self.tokenizer(rendered, add_special_tokens=not has_bos, verbose=False)
        return len(encoded["input_ids"])

    def special_in(self, text: str) -> str | None:
        """A special token that stands in the text as letters and would be read as itself."""
        added = self.tokenizer.added_tokens_decoder.values()
        special = {str(token) for token in added if token.special}
        special |= set(self.tokenizer.all_special_tokens) - {self.tokenizer.unk_token}
        return next((token for token in sorted(special) if token in text), None)


@cache
def token_count(name: str, is_chat: bool) -> TokenCount:
    """name: a folder or a hub id. Raises ValueError in one line."""
    tokenizer = load_tokenizer(name)
    if is_chat and not getattr(tokenizer, "chat_template", None):
        raise ValueError(f"apply_chat_template needs a tokenizer with a chat template, not {name}")
    return TokenCount(tokenizer, is_chat)


def load_tokenizer(name: str) -> Any:
    if not os.path.isdir(name) and not is_offline() and not is_reachable():
        raise ValueError(f"tokenizer {name} is no folder, and the hub cannot be reached")
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(f"no tokenizer at {name!r}: {reason}") from error
