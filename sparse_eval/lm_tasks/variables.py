"""Variables that take their values from each other: what is the last of a chain worth?

After RULER's variable tracking (Hsieh et al. 2024, https://arxiv.org/abs/2404.06654), which asks
for the names of a whole chain; a number is shorter and has one right form.
"""

from __future__ import annotations

from random import Random
from typing import Any

from datasets import Dataset

from sparse_eval.lm_tasks.build import Question, build, random_of
from sparse_eval.lm_tasks.planting import draw_values, hide
from sparse_eval.lm_tasks.request import Request
from sparse_eval.needle.forms import DIGITS
from sparse_eval.needle.kinds import KEYS, code

NUM_CHAINS = 4
NUM_HOPS = 2


def chain(names: list[str], value: str) -> list[str]:
    """The first name is given the value, each other name that of the one before it."""
    given = f"VAR {names[0]} = {value}."
    return [given, *(f"VAR {b} = VAR {a}." for a, b in zip(names, names[1:], strict=False))]


def placed_chains(random: Random, chains: list[list[str]]) -> list[tuple[float, str]]:
    """Every chain in its order, at depths of its own, the chains between each other."""
    placed = list[tuple[float, str]]()
    for sentences in chains:
        depths = sorted(random.random() for _ in sentences)
        placed += zip(depths, sentences, strict=True)
    return placed


def question(request: Request, sample: int) -> Question:
    random = random_of(request, sample, "sentences")
    names = [name.upper() for name in random.sample(KEYS, NUM_CHAINS * (NUM_HOPS + 1))]
    chains = [names[i::NUM_CHAINS] for i in range(NUM_CHAINS)]
    values = draw_values(code, DIGITS, NUM_CHAINS, request, random)
    sentences = [chain(*pair) for pair in zip(chains, values, strict=True)]
    asked = chains[0][-1]
    return Question(
        write=hide(request, random, placed_chains(random, sentences)).write,
        smallest=0,
        asked=f"Some variables above are assigned. Which number is VAR {asked} equal to?",
        cue=f"VAR {asked} =",
        targets=(values[0],),
        others=tuple(values[1:]),
    )


def variable_tracking(**metadata: Any) -> dict[str, Dataset]:
    return build("se_variable_tracking", question, metadata)
