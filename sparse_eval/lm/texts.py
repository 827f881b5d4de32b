"""A model's text side as lm-eval's HFLM has it: ids with one BOS, chat format, stop strings."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from sparse_eval.prompts import leading_bos


@dataclass
class TextSide:
    """tokenizer: the model's. is_question, question_tokens: as in the configuration."""

    tokenizer: Any
    is_question: bool = False
    question_tokens: int | None = None

    @cached_property
    def bos(self) -> list[int]:
        return leading_bos(self.tokenizer)

    @property
    def prefix_id(self) -> int | None:
        """What stands for an empty context. None: the tokenizer has neither BOS nor EOS."""
        bos = self.tokenizer.bos_token_id
        return self.tokenizer.eos_token_id if bos is None else bos

    @cached_property
    def eos_text(self) -> str | None:
        eos = self.tokenizer.eos_token_id
        return None if eos is None else self.raw_text([eos])

    def ids(self, text: str) -> list[int]:
        """Special tokens are added unless the text opens with a BOS of its own."""
        found = self.tokenizer.encode(text, **self._special(text))
        check_opening(found, self.bos, text)
        return found

    def _special(self, text: str) -> dict[str, bool]:
        opens = self.prefix_id is not None and text.startswith(self.raw_text([self.prefix_id]))
        return {"add_special_tokens": False} if opens else {}

    def pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Ids of a context and of what follows it, cut where the context's own ids end; spaces at
        its end belong to what follows."""
        if not context:
            found = self.tokenizer.encode(continuation, add_special_tokens=False)
            if self.prefix_id is None:
                raise ValueError("an empty context needs a tokenizer with a BOS or an EOS")
            opens = found[:1] == [self.prefix_id]
            return (found[:1], found[1:]) if opens else ([self.prefix_id], found)
        first = self.ids(context.rstrip())
        return first, self.ids(context + continuation)[len(first) :]

    def tail(self, text: str, ids: list[int], doc: Mapping[str, Any]) -> int:
        """How many of a prompt's last tokens are not prefilled: 1, or the question's."""
        if not self.is_question:
            return 1
        found = self.question_tokens or len(ids) - self._context_tokens(text, doc)
        if not 0 < found < len(ids):
            raise ValueError(
                f"protocol=question: {found} question tokens leave no context to prefill in a "
                f"prompt of {len(ids)} tokens"
            )
        return found

    def _context_tokens(self, text: str, doc: Mapping[str, Any]) -> int:
        """Tokens that end where the document's context does; what follows is the question."""
        end = context_end(text, doc)
        if end is None:
            raise ValueError(
                "protocol=question needs documents with `context` and `question` apart, both "
                "verbatim in the prompt and in this order: give protocol.question_tokens=K instead"
            )
        found = self.tokenizer(text, return_offsets_mapping=True, **self._special(text))
        return sum(stop <= end for _, stop in found["offset_mapping"])

    def chat(self, history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """A conversation as text, in the tokenizer's chat format."""
        return self.tokenizer.apply_chat_template(
            history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    def chat_name(self, chat: str) -> str:
        """none, or template:<hash of the chat format>."""
        template = self.tokenizer.chat_template
        if chat == "none":
            return chat
        if not template:
            raise ValueError("task.chat=template needs a tokenizer with a chat template")
        return f"template:{hashlib.sha256(str(template).encode()).hexdigest()[:8]}"

    def text(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    def raw_text(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False)


def check_opening(ids: list[int], bos: list[int], text: str) -> None:
    """ValueError in one line unless a prompt has a token and opens with exactly one BOS, where its
    tokenizer has one."""
    if not ids:
        raise ValueError(f"a prompt must have a token, got none for the text {text!r}")
    if bos and (ids[:1] != bos or ids[1:2] == bos):
        raise ValueError(
            f"a prompt must open with exactly one BOS, this one opens with {ids[:3]}: {text[:60]!r}"
        )


def context_end(text: str, doc: Mapping[str, Any]) -> int | None:
    """The character after the document's context in a prompt, None where it is not apart."""
    context, question = doc.get("context"), doc.get("question")
    if not isinstance(context, str) or not isinstance(question, str):
        return None
    context, question = context.strip(), question.strip()
    at = text.rfind(context) if context and question else -1
    end = at + len(context)
    return end if at >= 0 and question in text[end:] else None


def cut(ids: list[int], most: int, bos: list[int]) -> list[int]:
    """The last `most` ids, a leading BOS kept."""
    if len(ids) <= most:
        return ids
    return bos + ids[len(ids) - most + len(bos) :] if ids[: len(bos)] == bos else ids[-most:]


def until_stop(text: str, stops: tuple[str, ...]) -> str:
    """The text before the first of each stop string, as lm-eval cuts it."""
    for stop in filter(None, stops):
        text = text.split(stop)[0]
    return text
