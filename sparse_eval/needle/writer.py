"""Sentences into text, and text into tokens, with the characters that each token covers."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import Any

from sparse_eval.needle.sentences import Sentences
from sparse_eval.needle.template import Template


@dataclass(frozen=True)
class Encoded:
    """Token ids and the characters [first, end) that each covers."""

    ids: list[int]
    offsets: list[tuple[int, int]]

    def end(self, num_tokens: int) -> int:
        """Where the first num_tokens tokens end, in characters."""
        return self.offsets[num_tokens - 1][1] if num_tokens > 0 else 0

    def tokens_before(self, char: int) -> int:
        """Tokens that begin before a character."""
        return bisect_left(self.offsets, (char, -1))

    def span(self, first: int, end: int) -> tuple[int, int]:
        """Indices [first, end) of the tokens that cover characters [first, end)."""
        covering = [i for i, (a, b) in enumerate(self.offsets) if b > first and a < end]
        return covering[0], covering[-1] + 1


@dataclass(frozen=True)
class Body:
    """The context with everything planted in it; needle_at: where the needle starts."""

    context: str
    needle_at: int


@dataclass(frozen=True)
class Prompt:
    """ids of the whole prompt; body: those of its plain-text part, which starts at `first`."""

    ids: list[int]
    body: Encoded
    first: int


@dataclass(frozen=True)
class Places:
    """Where sentences go, in characters of the window; None: at the end, wherever that is."""

    needle: int | None
    others: list[int]


@dataclass
class Writer:
    """Writes sentences into a text, and text into tokens, for one tokenizer and template."""

    tokenizer: Any
    template: Template
    sentences: Sentences

    def encode(self, text: str, *, is_frame: bool = False) -> Encoded:
        """is_frame: special tokens spelled out in the text are meant as such."""
        if not getattr(self.tokenizer, "is_fast", False):
            raise ValueError("planting a needle needs a fast tokenizer: it tells tokens' offsets")
        found = self.tokenizer(
            text,
            add_special_tokens=False,
            split_special_tokens=not is_frame,
            return_offsets_mapping=True,
            verbose=False,
        )
        return Encoded(found["input_ids"], [tuple(pair) for pair in found["offset_mapping"]])

    def body(self, hay: str, places: Places) -> Body:
        """The sentences written into a text: at one place, the needle comes first."""
        end = len(hay)
        needle = end if places.needle is None else min(places.needle, end)
        others = zip(places.others, self.sentences.others, strict=True)
        inserts = sorted((min(place, end), sentence) for place, (_, sentence) in others)
        before = [pair for pair in inserts if pair[0] < needle or places.needle is None]
        after = inserts[len(before) :]
        text, needle_at, done = "", 0, 0
        for place, sentence in [*before, (needle, self.sentences.needle), *after]:
            text += hay[done:place]
            done = place
            text += "" if not text or text[-1].isspace() else " "
            if sentence is self.sentences.needle:
                needle_at = len(text)
            text += sentence + ("" if place == end else " ")
        return Body(text + hay[done:], needle_at)

    def prompt(self, body: Body) -> Prompt:
        template = self.template
        encoded = self.encode(self._text(body))
        tail = [] if template.is_plain else self.encode(self._frame(), is_frame=True).ids
        return Prompt([*template.before, *encoded.ids, *tail], encoded, len(template.before))

    def _text(self, body: Body) -> str:
        template, sentences = self.template, self.sentences
        asked = f"{body.context}{template.joint}{sentences.question}"
        return f"{asked}{self._frame()}" if template.is_plain else asked

    def _frame(self) -> str:
        return f"{self.template.reply}{self.sentences.cue}"

    def answer(self, body: Body, prompt: Prompt) -> tuple[tuple[int, ...], int]:
        """The true answer's tokens after the prompt, and the index of the value's first."""
        before = self._text(body) if self.template.is_plain else self._frame()
        have = self.encode(before, is_frame=not self.template.is_plain)
        full = self.encode(f"{before} {self.sentences.value}", is_frame=not self.template.is_plain)
        n = len(have.ids)
        if full.ids[:n] != have.ids or prompt.ids[-n:] != have.ids:
            raise ValueError(
                f"this tokenizer joins the cue {self.sentences.cue!r} and the answer into one "
                "token: the true answer cannot be fed after the prompt"
            )
        value_at = len(before) + 1
        first = next(i for i, (_, b) in enumerate(full.offsets) if b > value_at)
        return tuple(full.ids[n:]), first - n
