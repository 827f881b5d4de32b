"""A JSON object of entries, all of one form: what stands at a key? A unit is an entry.

After the key-value retrieval of Liu et al. 2023 (https://arxiv.org/abs/2307.03172).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from random import Random
from typing import Any

from datasets import Dataset

from sparse_eval.lm_tasks.build import Question, build, random_of
from sparse_eval.lm_tasks.planting import spread_depth
from sparse_eval.lm_tasks.request import Request
from sparse_eval.needle.forms import WORDS
from sparse_eval.needle.kinds import KEYS, code

SMALLEST = 20
SHORT_NAMES = 2000
"""Entries named by two words; those after them have a number too."""
MOST = 50_000
"""Entries beyond which numbers of five digits would run out."""


@dataclass
class Register:
    """Entries in the order in which they were drawn; the first is the one asked for."""

    task: str
    random: Random
    numbers: dict[str, str] = field(default_factory=dict)
    taken: set[str] = field(default_factory=set)

    def entries(self, size: int) -> list[tuple[str, str]]:
        if size > MOST:
            raise ValueError(f"{self.task}: max_length asks for more than {MOST:,} entries")
        while len(self.numbers) < size:
            name, number = self.name(), code(self.random)
            if name not in self.numbers and number not in self.taken:
                self.numbers[name] = number
                self.taken.add(number)
        return list(itertools.islice(self.numbers.items(), size))

    def name(self) -> str:
        name = f"{self.random.choice(KEYS)} {self.random.choice(WORDS)}"
        if len(self.numbers) < SHORT_NAMES:
            return name
        return f"{name} {self.random.randrange(2, 1000)}"


def question(request: Request, sample: int) -> Question:
    register = Register(request.task, random_of(request, sample, "entries"))
    depth = spread_depth(request, sample)
    ((name, number),) = register.entries(1)

    def write(size: int) -> str:
        asked, *rest = register.entries(size)
        rest.insert(round(depth * len(rest)), asked)
        lines = ",\n".join(f'  "{name}": "{number}"' for name, number in rest)
        return f"{{\n{lines}\n}}"

    return Question(
        write=write,
        smallest=SMALLEST,
        asked=f'What is the value of "{name}"?',
        cue=f'"{name}": "',
        targets=(number,),
        depth=depth,
    )


def key_value(**metadata: Any) -> dict[str, Dataset]:
    return build("se_key_value", question, metadata)
