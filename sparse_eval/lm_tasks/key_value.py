"""A register of entries, all of one form: what stands at a key?  A unit is an entry.

After the key-value retrieval of Liu et al. 2023 (https://arxiv.org/abs/2307.03172).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any

from datasets import Dataset

from sparse_eval.lm_tasks.build import Question, build, random_of
from sparse_eval.lm_tasks.planting import spread_depth
from sparse_eval.lm_tasks.request import Request
from sparse_eval.needle.forms import WORDS
from sparse_eval.needle.kinds import KEYS

SMALLEST = 20
HEAD = "A register of numbers, each under its name:\n\n"


@dataclass
class Register:
    """Entries in the order in which they were drawn; the first is the one asked for."""

    random: Random
    numbers: dict[str, str] = field(default_factory=dict)
    taken: set[str] = field(default_factory=set)

    def entries(self, size: int) -> list[tuple[str, str]]:
        while len(self.numbers) < size:
            random = self.random
            name = f"{random.choice(KEYS)}-{random.choice(WORDS)}-{random.randrange(10, 100)}"
            number = str(random.randrange(100_000, 1_000_000))
            if name not in self.numbers and number not in self.taken:
                self.numbers[name] = number
                self.taken.add(number)
        return list(self.numbers.items())[:size]


def question(request: Request, sample: int) -> Question:
    register = Register(random_of(request, sample, "entries"))
    depth = spread_depth(request, sample)
    (name, number), *others = register.entries(SMALLEST)

    def write(size: int) -> str:
        asked, *rest = register.entries(size)
        rest.insert(round(depth * len(rest)), asked)
        return HEAD + "\n".join(f"{name}: {number}" for name, number in rest)

    return Question(
        write=write,
        smallest=SMALLEST,
        asked=f"Which number stands at {name} in the register above?",
        cue=f"{name}:",
        targets=(number,),
        depth=depth,
    )


def key_value(**metadata: Any) -> dict[str, Dataset]:
    return build("se_key_value", question, metadata)
