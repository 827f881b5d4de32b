"""A tokenizer's ids: which it adds by itself, which no text may hold, and text as plain text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Encode = Callable[[str], list[int]]


def leading_bos(tokenizer: Any) -> list[int]:
    """[BOS] if the tokenizer begins a text with one by itself, else []."""
    bos = tokenizer.bos_token_id
    with_special, without = (
        tokenizer("a", add_special_tokens=flag)["input_ids"] for flag in (True, False)
    )
    adds_bos = bos is not None and with_special[:1] == [bos] and without[:1] != [bos]
    return [bos] if adds_bos else []


def control_ids(tokenizer: Any) -> set[int]:
    """Ids of special tokens, which no text may contain; a mere unknown-token is not one of them."""
    added = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    control = added | set(tokenizer.all_special_ids)
    roles = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
    return control - ({tokenizer.unk_token_id} - set(roles))


def text_encoder(tokenizer: Any) -> Encode:
    """text -> ids of plain text: special tokens spelled out in it are encoded as the letters."""
    control = control_ids(tokenizer)

    def encode(text: str) -> list[int]:
        ids = tokenizer(text, add_special_tokens=False, split_special_tokens=True, verbose=False)[
            "input_ids"
        ]
        if not control.isdisjoint(ids):
            found = tokenizer.convert_ids_to_tokens(next(i for i in ids if i in control))
            raise ValueError(f"the text holds {found}, which this tokenizer cannot read as text")
        return ids

    return encode
