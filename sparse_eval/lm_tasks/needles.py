"""Sentences with a value each, hidden in a text; the question asks for one of the values.

Wordings, keys and values: sparse_eval.needle.kinds. Their wordings take turns over the samples.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from datasets import Dataset

from sparse_eval.lm_tasks.build import Question, build, random_of
from sparse_eval.lm_tasks.planting import draw_values, hide, spread_depth
from sparse_eval.lm_tasks.request import Request
from sparse_eval.needle.kinds import KEYS, KINDS, Kind

NUM_KEYS = 8
NUM_CHOICES = 4
UUID_START = 8
"""Characters of a UUID that are asked for: its first group, at most as many tokens."""


def needle(request: Request, sample: int, kind: Kind, num_keys: int = 1) -> Question:
    """num_keys: sentences of the needle's form, each with a key and a value of its own."""
    random = random_of(request, sample, "sentences")
    first = random_of(request, 0, "wording").randrange(len(kind.wordings))
    wording = kind.wordings[(first + sample) % len(kind.wordings)]
    keys = random.sample(KEYS, num_keys)
    values = draw_values(kind.make, kind.form, num_keys, request, random)
    depth = spread_depth(request, sample)
    depths = [depth, *(random.random() for _ in keys[1:])]
    sentences = [wording.needle.format(key=k, value=v) for k, v in zip(keys, values, strict=True)]
    hidden = hide(request, random, list(zip(depths, sentences, strict=True)))
    return Question(
        write=hidden.write,
        smallest=0,
        asked=wording.question.format(key=keys[0]),
        cue=wording.cue.format(key=keys[0]),
        targets=(values[0],),
        others=tuple(values[1:]),
        depth=depth,
    )


def with_choices(request: Request, sample: int, question: Question) -> Question:
    """The same question with its value among some of the others, in seeded order."""
    random = random_of(request, sample, "choices")
    choices = [*question.targets, *random.sample(question.others, NUM_CHOICES - 1)]
    random.shuffle(choices)
    return replace(question, choices=tuple(choices))


def uuid_start(question: Question) -> Question:
    """Asks for the first group only: a whole UUID has more tokens than the answer may have."""
    return replace(question, targets=(question.targets[0][:UUID_START],))


def passcode(**metadata: Any) -> dict[str, Dataset]:
    return build("se_needle_passcode", lambda r, i: needle(r, i, KINDS["passcode"]), metadata)


def word(**metadata: Any) -> dict[str, Dataset]:
    return build("se_needle_word", lambda r, i: needle(r, i, KINDS["word"]), metadata)


def uuid(**metadata: Any) -> dict[str, Dataset]:
    return build("se_needle_uuid", lambda r, i: uuid_start(needle(r, i, KINDS["uuid"])), metadata)


def multikey(**metadata: Any) -> dict[str, Dataset]:
    return build("se_multikey", lambda r, i: needle(r, i, KINDS["multikey"], NUM_KEYS), metadata)


def multikey_choice(**metadata: Any) -> dict[str, Dataset]:
    def make(request: Request, sample: int) -> Question:
        return with_choices(request, sample, needle(request, sample, KINDS["multikey"], NUM_KEYS))

    return build("se_multikey_choice", make, metadata)
