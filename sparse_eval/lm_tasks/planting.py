"""Sentences hidden in ordinary text: the repository's `docs`, or a file; a unit is a word.

A sentence stands after the end of another where one is near, else between words. A text that is
too short for the length starts again.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random

from sparse_eval.inputs import texts
from sparse_eval.lm_tasks.request import Request
from sparse_eval.needle.forms import Form

WORD = re.compile(r"\S{1,24}\s*")
"""A word and the white space after it; of a longer run, a part."""
SENTENCE_END = re.compile(r"[.!?][\"')\]]*\s+$")
WORD_END = re.compile(r"\s$")
NEAR = 0.015
"""Share of the context within which a sentence's end is looked for."""
NEAR_WORDS = 12
"""Units within which a word's end is looked for."""
GOLDEN = 0.6180339887498949
DRAWS = 1000


@dataclass(frozen=True)
class Words:
    """A text word by word, each with the white space after it; lowered: the text, lower case."""

    words: tuple[str, ...]
    lowered: str

    def ends(self, pattern: re.Pattern[str], at: int) -> bool:
        return bool(pattern.search(self.words[at % len(self.words)]))

    def start(self, random: Random) -> int:
        """The first word of a sentence at a seeded place, of the text where no sentence ends."""
        first = random.randrange(len(self.words))
        for at in range(first, first + len(self.words)):
            if self.ends(SENTENCE_END, at - 1):
                return at % len(self.words)
        return 0

    def place(self, start: int, size: int, depth: float) -> int:
        """Words of the window before a sentence at a depth in [0, 1]."""
        wanted = round(depth * size)
        for pattern, near in ((SENTENCE_END, int(NEAR * size)), (WORD_END, NEAR_WORDS)):
            for off in range(near + 1):
                for at in (wanted - off, wanted + off):
                    is_inner = 0 < at < size and self.ends(pattern, start + at - 1)
                    if at in (0, size) or is_inner:
                        return at
        return wanted

    def window(self, start: int, first: int, end: int) -> str:
        n = len(self.words)
        return "".join(self.words[(start + i) % n] for i in range(first, end))


def words_of(text: str) -> Words:
    """text: docs, or a file's path. Raises ValueError in one line."""
    if text == "docs":
        return _docs()
    path = Path(os.path.expanduser(text))
    if not os.path.isfile(path):
        raise ValueError(f"metadata text must be docs or a UTF-8 file's path, got {text!r}")
    return _file(path, path.stat().st_mtime_ns)


@cache
def _docs() -> Words:
    return _words(texts.docs().text, "docs")


@cache
def _file(path: Path, changed_ns: int) -> Words:
    try:
        return _words(path.read_text(encoding="utf-8-sig"), str(path))
    except UnicodeDecodeError as error:
        raise ValueError(
            f"metadata text must be UTF-8, got {path} (byte {error.start} is not)"
        ) from None


def _words(text: str, source: str) -> Words:
    words = tuple(WORD.findall(f"{text.strip()}\n\n"))
    if not words:
        raise ValueError(f"metadata text is empty: {source} holds no words to hide a sentence in")
    return Words(words, text.lower())


@dataclass(frozen=True)
class Hidden:
    """Sentences at depths of a text that starts at word `start`, in the order of their depths."""

    words: Words
    start: int
    sentences: tuple[tuple[float, str], ...]

    def write(self, size: int) -> str:
        """`size` words of the text with every sentence in it."""
        return "".join(self._parts(size)).rstrip()

    def _parts(self, size: int) -> Iterator[str]:
        done = 0
        for depth, sentence in self.sentences:
            at = max(done, self.words.place(self.start, size, depth))
            before = self.words.window(self.start, done, at)
            yield before
            yield f" {sentence} " if before and not before[-1].isspace() else f"{sentence} "
            done = at
        yield self.words.window(self.start, done, size)


def hide(request: Request, random: Random, placed: Sequence[tuple[float, str]]) -> Hidden:
    words = words_of(request.text)
    ordered = sorted(placed, key=lambda pair: pair[0])
    return Hidden(words, words.start(random), tuple(ordered))


def spread_depth(request: Request, sample: int) -> float:
    """Depths in [0, 1) that cover it evenly, however many samples are taken from the first on."""
    first = Random(f"{request.seed}/{request.task}/depth").random()
    return (first + sample * GOLDEN) % 1


def draw_values(
    make: Callable[[Random], str], form: Form, n: int, request: Request, random: Random
) -> list[str]:
    """n values, none of which stands in the text or is close to another."""
    lowered, values = words_of(request.text).lowered, list[str]()
    for _ in range(DRAWS * n):
        value = make(random)
        if value not in lowered and not any(
            value == known or form.is_close(value, known) for known in values
        ):
            values.append(value)
        if len(values) == n:
            return values
    raise ValueError(
        f"{request.task}: the text holds too many of the possible values to hide {n} others in it"
    )
