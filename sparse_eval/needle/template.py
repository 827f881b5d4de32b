"""A prompt's frame: what stands before the text and after it, by the model's chat format or plain.

A prompt is before + body + after: only the frame may hold special tokens, and whatever the format,
exactly one BOS stands at the start of a prompt whose tokenizer wants one.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from sparse_eval.inputs.tokens import leading_bos

CHATS = ("auto", "none", "template")
_CONTEXT = "HAYSTACK-9d1f"


@dataclass(frozen=True)
class Template:
    """name: none, or template:<hash of the chat format>. before: ids that open the prompt. joint:
    between context and question. reply: from the question to the answer's cue; plain text where
    is_plain, where the next line would be the next question, else the chat format's frame."""

    name: str
    before: tuple[int, ...]
    joint: str
    reply: str
    is_plain: bool


def make_template(tokenizer: Any, chat: str) -> Template:
    """chat: auto (the tokenizer's chat format if it has one), none, template (must have one)."""
    has_format = bool(getattr(tokenizer, "chat_template", None))
    if chat == "template" and not has_format:
        raise ValueError("task.chat=template needs a tokenizer with a chat template, this has none")
    if chat == "none" or not has_format:
        before = tuple(leading_bos(tokenizer))
        return Template("none", before, "\n\nQuestion: ", "\nAnswer: ", is_plain=True)
    return chat_template(tokenizer)


def chat_template(tokenizer: Any) -> Template:
    """The tokenizer's own chat format around one user message, no thinking before the answer."""
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": _CONTEXT}], add_generation_prompt=True, tokenize=False
    )
    before, found, after = rendered.partition(_CONTEXT)
    if not found or _CONTEXT in after:
        raise ValueError("the chat template must hold the user's message once, as it is given")
    if after.rstrip().endswith("<think>"):
        after = f"{after.rstrip()}\n\n</think>\n\n"
    digest = hashlib.sha256(f"{before}\0{after}".encode()).hexdigest()[:8]
    ids = tokenizer(before, add_special_tokens=False)["input_ids"]
    bos = leading_bos(tokenizer)
    if bos and ids[:1] != bos:
        ids = bos + ids
    return Template(f"template:{digest}", tuple(ids), "\n\n", after, is_plain=False)
