"""The text that needles are hidden in: windows of it at seeded offsets, and where a sentence fits.

Windows of one (context, depth, kind) are disjoint. Source of the texts: sparse_eval.inputs.texts.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from sparse_eval.inputs import texts
from sparse_eval.inputs.store import user_cache

SENTENCE_END = re.compile(r"[.!?][\"')\]]*\s+")
SPACE = re.compile(r"\s+")
SNAP_CHARS = 2000
CHARS_PER_TOKEN = 8
"""Characters a window has for each token wanted: more than any usual text needs."""


def haystack_text(cfg: Mapping[str, Any], model_cache: Path | None, num_chars: int) -> texts.Text:
    """The whole text of a prompts config; of a data set the first num_chars characters.

    Raises ValueError for an empty text and for transcripts, which a model would have to write."""
    match cfg["source"]:
        case "docs":
            text = texts.docs()
        case "kjv":
            text = texts.kjv(cfg, model_cache or user_cache())
        case "file":
            text = texts.file(cfg)
        case "dataset":
            text = _of_dataset(cfg, num_chars)
        case _:
            raise ValueError(
                "prompts must be docs, kjv, file or dataset to hide a needle in, "
                f"got {cfg['source']!r}"
            )
    if not text.text.strip():
        raise ValueError(f"the haystack is empty: {text.source} holds no text")
    return text


def _of_dataset(cfg: Mapping[str, Any], num_chars: int) -> texts.Text:
    documents: list[str] = []
    wanted = num_chars
    for document in texts.documents(cfg):
        documents.append(document)
        wanted -= len(document) + 2
        if wanted <= 0:
            break
    return texts.Text("\n\n".join(documents), f"dataset: {cfg['path']} ({cfg['split']})")


@dataclass(frozen=True)
class Haystack:
    """A text cut into n equal slots; every sample has a slot of its own."""

    text: str
    source: str
    n: int

    def window(self, slot: int, num_tokens: int, random: Random) -> str:
        """Text from a seeded place in a slot, long enough for num_tokens if the slot is."""
        first = slot * len(self.text) // self.n
        end = (slot + 1) * len(self.text) // self.n
        slack = max(0, end - first - num_tokens * CHARS_PER_TOKEN)
        start = self._begin(first + random.randint(0, slack), end)
        return self.text[start : min(end, start + num_tokens * CHARS_PER_TOKEN)]

    def _begin(self, at: int, end: int) -> int:
        """The first start of a sentence, else of a word, shortly after `at`, else `at`."""
        if at == 0:
            return 0
        for pattern in (SENTENCE_END, SPACE):
            match = pattern.search(self.text, at, min(end, at + SNAP_CHARS))
            if match:
                return match.end()
        return at


@dataclass(frozen=True)
class Gaps:
    """Places in a text where a sentence can stand, by character: ascending, the ends included.

    sentences: between sentences; words: between words."""

    sentences: list[int]
    words: list[int]

    @staticmethod
    def of(text: str) -> Gaps:
        def ends(pattern: re.Pattern[str]) -> list[int]:
            inner = (match.end() for match in pattern.finditer(text))
            return [0, *(end for end in inner if 0 < end < len(text)), len(text)]

        return Gaps(ends(SENTENCE_END), ends(SPACE))


def distinct(places: list[int]) -> list[int]:
    return [place for place, _ in itertools.groupby(places)]
