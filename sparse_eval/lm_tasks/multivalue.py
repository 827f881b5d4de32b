"""One key with several words, each in a sentence of its own: how many of them are recalled?"""

from __future__ import annotations

from typing import Any

from datasets import Dataset

from sparse_eval.lm_tasks.build import Question, build, random_of
from sparse_eval.lm_tasks.planting import draw_values, hide
from sparse_eval.lm_tasks.request import Request
from sparse_eval.needle.forms import WORD
from sparse_eval.needle.kinds import KEYS, word

NUM_VALUES = 3


def question(request: Request, sample: int) -> Question:
    random = random_of(request, sample, "sentences")
    key = random.choice(KEYS)
    values = draw_values(word, WORD, NUM_VALUES, request, random)
    placed = [(random.random(), f"The {key} chest holds one {value}.") for value in values]
    return Question(
        write=hide(request, random, placed).write,
        smallest=0,
        asked=f"Which {NUM_VALUES} things does the {key} chest hold?",
        cue=f"The {key} chest holds one",
        targets=tuple(values),
    )


def multivalue(**metadata: Any) -> dict[str, Dataset]:
    return build("se_multivalue", question, metadata)
