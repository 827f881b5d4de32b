"""A planted prompt: text, a needle at a wanted depth, the question for it; exactly so many tokens.

Depth is counted in tokens of the context besides the needle: 0 puts the needle first, 1 last. The
same seed gives the same prompt in every process.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparse_eval.needle.haystack import Gaps, Haystack, distinct
from sparse_eval.needle.sentences import Spot, draw
from sparse_eval.needle.template import Template
from sparse_eval.needle.writer import Body, Encoded, Places, Prompt, Writer
from sparse_eval.prompts import hash_of, too_short

DEPTH_TOLERANCE = 0.015
"""Of the context: farther than this from a sentence's end, the needle goes between words."""
FITTING_TRIES = 50
PLACING_TRIES = 50


@dataclass(frozen=True)
class Planted:
    """ids: int64 [context]. question_start: index of the first token after the text. needle_span,
    value_span: [first, end) token indices. answer_ids: the tokens of the true answer after the
    prompt, of which those from value_start on are the value's. distractors: values planted beside
    it. hash: of the ids. wording: index into kind.wordings."""

    spot: Spot
    ids: Tensor
    hash: str
    chat: str
    wording: int
    key: str
    value: str
    needle: str
    distractors: tuple[str, ...]
    depth_realised: float
    question_start: int
    needle_span: tuple[int, int]
    value_span: tuple[int, int]
    answer_ids: tuple[int, ...]
    value_start: int
    source: str

    @property
    def question_tokens(self) -> int:
        """Tokens after the context: the question, the frame around it and the answer's cue."""
        return len(self.ids) - self.question_start


def plant(
    spot: Spot, haystack: Haystack, tokenizer: Any, template: Template, *, num_distractors: int = 0
) -> Planted:
    """Raises ValueError in one line where the text is too short, the context too small for the
    sentences, or the tokenizer does not give the planted text back verbatim."""
    if not 0 <= spot.depth <= 1:
        raise ValueError(f"depth must lie in [0, 1], got {spot.depth}")
    window = haystack.window(spot.sample, spot.context, spot.random("offset"))
    writer = Writer(tokenizer, template, draw(spot, window, num_distractors))
    room = spot.context - len(writer.prompt(Body("", 0)).ids)
    room -= sum(len(writer.encode(f" {sentence}").ids) for sentence in writer.sentences.planted)
    if room < 0:
        raise ValueError(
            f"context must be >= {spot.context - room} tokens for the sentences and the question "
            f"of a {spot.kind.name} needle, got {spot.context}"
        )
    # now and then no end of the text gives the exact length: then it starts at a later word, where
    # there are few words at a later character
    starts = itertools.chain(Gaps.of(window).words[:-1], range(1, len(window)))
    for start in itertools.islice(starts, FITTING_TRIES):
        text = window[start:]
        hay = writer.encode(text)
        if len(hay.ids) < room:
            raise too_short(haystack.source, haystack.n * len(hay.ids), haystack.n, room)
        places = choose_places(spot, text[: hay.end(room)], hay, writer)
        found = fit(spot.context, room, text, hay, places, writer)
        if found is not None:
            return checked(spot, writer, *found, haystack.source)
    raise ValueError(f"cannot cut the text so that a prompt has exactly {spot.context} tokens")


def choose_places(spot: Spot, hay: str, encoded: Encoded, writer: Writer) -> Places:
    """Seeded places for the distractors, and for the needle the one nearest to the wanted depth."""
    gaps = Gaps.of(hay)
    tokens = distinct([0, *(a for a, _ in encoded.offsets if 0 < a < len(hay)), len(hay)])
    wanted = len(writer.sentences.others)
    roomy = (found for found in (gaps.sentences, gaps.words) if len(found) > 4 * wanted + 2)
    inner = next(roomy, tokens)[1:-1] or tokens
    random = spot.random("places")
    # a long distractor can stand across the wanted depth: then the distractors are drawn again
    for _ in range(PLACING_TRIES):
        placed = random.choices(inner, k=wanted)
        if spot.depth in (0, 1):
            return Places(0 if spot.depth == 0 else None, placed)
        for found in (gaps.sentences, gaps.words, tokens):
            best = nearest(found, placed, spot.depth, encoded, writer)
            if best is not None:
                return Places(best, placed)
    raise ValueError(
        f"{spot.name}: no place within {DEPTH_TOLERANCE:.1%} of depth {spot.depth:g}; "
        "the context is too small for the sentences"
    )


def nearest(
    places: list[int], placed: list[int], depth: float, encoded: Encoded, writer: Writer
) -> int | None:
    """The place whose depth in tokens, distractors counted, is nearest; None out of tolerance."""
    lengths = [len(writer.encode(f" {sentence}").ids) for _, sentence in writer.sentences.others]
    total = encoded.tokens_before(places[-1]) + sum(lengths)

    def off(place: int) -> float:
        inserted = sum(n for n, p in zip(lengths, placed, strict=True) if p < place)
        return abs((encoded.tokens_before(place) + inserted) / max(total, 1) - depth)

    best = min(places, key=off)
    return best if off(best) <= DEPTH_TOLERANCE else None


def fit(
    context: int, room: int, text: str, hay: Encoded, places: Places, writer: Writer
) -> tuple[Prompt, Body] | None:
    """The prompt of exactly `context` tokens, the text's end giving way; None if none is."""
    tokens, seen = room, set[int]()
    while 0 <= tokens <= len(hay.ids) and tokens not in seen:
        seen.add(tokens)
        body = writer.body(text[: hay.end(tokens)], places)
        prompt = writer.prompt(body)
        if len(prompt.ids) == context:
            return prompt, body
        tokens += context - len(prompt.ids)
    return None


def checked(spot: Spot, writer: Writer, prompt: Prompt, body: Body, source: str) -> Planted:
    """The finished prompt, checked against what was meant."""
    s, encoded, first = writer.sentences, prompt.body, prompt.first
    end_at = body.needle_at + len(s.needle)
    value_at = body.needle_at + s.needle.rindex(s.value)
    needle = encoded.span(body.needle_at, end_at)
    value = encoded.span(value_at, value_at + len(s.value))
    question = next(i for i, (_, b) in enumerate(encoded.offsets) if b > len(body.context))
    num_context = max(question, needle[1])
    others = num_context - (needle[1] - needle[0])
    answer, value_start = writer.answer(body, prompt)
    ids = torch.tensor(prompt.ids, dtype=torch.int64)
    check_text(ids, spot, writer, (needle[0] + first, needle[1] + first))
    return Planted(
        spot=spot,
        ids=ids,
        hash=hash_of(ids),
        chat=writer.template.name,
        wording=s.wording,
        key=s.key,
        value=s.value,
        needle=s.needle,
        distractors=s.distractors,
        depth_realised=needle[0] / others if others else 0.0,
        question_start=question + first,
        needle_span=(needle[0] + first, needle[1] + first),
        value_span=(value[0] + first, value[1] + first),
        answer_ids=answer,
        value_start=value_start,
        source=source,
    )


def check_text(ids: Tensor, spot: Spot, writer: Writer, span: tuple[int, int]) -> None:
    """The planted text stands verbatim in the decoded prompt, once, where its tokens are said to
    be; the length is exact; no special token stands outside the frame."""
    s = writer.sentences

    def decode(part: Tensor) -> str:
        return writer.tokenizer.decode(part.tolist(), clean_up_tokenization_spaces=False)

    whole = decode(ids)
    if s.needle not in decode(ids[span[0] : span[1]]) or whole.count(s.value) != 1:
        raise ValueError(
            f"{spot.name}: the decoded prompt does not hold {s.needle!r} verbatim, once"
        )
    assert len(ids) == spot.context, f"{len(ids)} tokens, wanted {spot.context}"
