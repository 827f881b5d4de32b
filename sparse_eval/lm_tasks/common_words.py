"""A long list of words, a few of them far more frequent than the others: which ones?

After RULER's common-words extraction (Hsieh et al. 2024, https://arxiv.org/abs/2404.06654). The
frequencies grow with the list, so that the question stays as hard; a unit is a word.
"""

from __future__ import annotations

import itertools
from typing import Any

from datasets import Dataset

from sparse_eval.lm_tasks.build import Question, build, random_of
from sparse_eval.lm_tasks.request import Request
from sparse_eval.needle.forms import WORDS
from sparse_eval.needle.kinds import KEYS

NUM_COMMON = 3
SHARE = 12
"""Each common word is one word of so many."""
SMALLEST = 4 * SHARE
POOL = (*KEYS, *WORDS)


def counts(common: list[str], others: list[str], size: int) -> dict[str, int]:
    """How often each word stands in a list of `size` words; the others as evenly as can be."""
    number = {word: size // SHARE for word in common}
    rest = size - sum(number.values())
    for i, word in enumerate(others):
        number[word] = rest // len(others) + (i < rest % len(others))
    return number


def question(request: Request, sample: int) -> Question:
    random = random_of(request, sample, "words")
    pool = random.sample(POOL, len(POOL))
    common, others = pool[:NUM_COMMON], pool[NUM_COMMON:]

    def write(size: int) -> str:
        number = counts(common, others, size)
        words = list(itertools.chain.from_iterable([w] * n for w, n in number.items()))
        random_of(request, sample, "order").shuffle(words)
        return f"A list of words, some of which are repeated often:\n\n{', '.join(words)}."

    return Question(
        write=write,
        smallest=SMALLEST,
        asked=f"Which {NUM_COMMON} words appear most often in the list?",
        cue=f"The {NUM_COMMON} words that appear most often in the list are",
        targets=tuple(common),
        others=tuple(others),
    )


def common_words(**metadata: Any) -> dict[str, Dataset]:
    return build("se_common_words", question, metadata)
