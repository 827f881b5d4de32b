"""The forms a value can have: how it is found in an answer, and what counts as close to the truth.

A value is only read at its boundaries: 948217, 48217.5 and -48217 are not 48217. Close means closer
than a chance value of the form comes in one case of a hundred.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from sparse_eval.storage.columns import names

WORDS = names(
    "accordion avalanche bicycle boulder butterfly cabinet candle carnival cathedral chimney"
    " cinnamon compass cottage curtain diamond dragon engine furnace galaxy gondola guitar"
    " hammock harvest hurricane iceberg jungle kettle kitchen lantern lemonade lighthouse machine"
    " marathon mirror monsoon mountain mushroom notebook octopus oxygen parachute pelican penguin"
    " piano planet puzzle pyramid rainbow rocket sandwich satellite saucepan saxophone scissors"
    " skeleton snowflake squirrel statue submarine sunflower tambourine telescope thunder tornado"
    " trumpet turtle typewriter umbrella volcano waterfall windmill wizard"
)


@dataclass(frozen=True)
class Found:
    """A run of characters in an answer that may be a value: normalised, and where it lies."""

    value: str
    start: int
    end: int


@dataclass(frozen=True)
class Form:
    """pattern: a maximal run that could be meant as a value. is_full(run, truth): a normalised run
    has the right form. is_close(run, truth): it is close to the true value beyond chance. joint:
    characters after which a run may go on."""

    name: str
    pattern: re.Pattern[str]
    joint: str
    normal: Callable[[str], str]
    is_full: Callable[[str, str], bool]
    is_close: Callable[[str, str], bool]

    def runs(self, text: str) -> Iterator[Found]:
        for match in self.pattern.finditer(text):
            yield Found(self.normal(match[0]), match.start(), match.end())


def edit_distance(a: str, b: str) -> int:
    """Levenshtein's: insertions, deletions and substitutions."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, start=1):
        previous, row[0] = row[0], i
        for j, y in enumerate(b, start=1):
            previous, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, previous + (x != y))
    return row[-1]


def shares_run(a: str, b: str, length: int) -> bool:
    """True if some `length` consecutive characters of a occur in b."""
    return any(a[i : i + length] in b for i in range(len(a) - length + 1))


DIGITS = Form(
    "digits",
    # not inside a longer number or name; 48,217 is 48217, but -48217 and 48217.5 are other numbers
    re.compile(
        r"(?<![0-9A-Za-z])(?<![0-9][.,])[-\u2212]?"
        r"[0-9]+(?:,[0-9]{3})*(?:\.[0-9]+)?(?![0-9A-Za-z]|[.,][0-9])"
    ),
    ",.",
    lambda run: run.replace(",", ""),
    lambda value, truth: len(value) == len(truth),
    lambda value, truth: edit_distance(value, truth) <= 1,
)
WORD = Form(
    "word",
    re.compile(r"(?<![0-9A-Za-z])[A-Za-z]+(?![0-9A-Za-z])"),
    "",
    str.lower,
    lambda value, truth: value in WORDS,
    lambda value, truth: edit_distance(value, truth) <= 2,
)
UUID = Form(
    "uuid",
    re.compile(r"(?<![0-9A-Za-z-])[0-9A-Fa-f]+(?:-[0-9A-Fa-f]+)*(?![0-9A-Za-z]|-[0-9A-Za-z])"),
    "-",
    str.lower,
    lambda value, truth: [len(part) for part in value.split("-")] == [8, 4, 4, 4, 12],
    lambda value, truth: shares_run(value, truth, 8),
)
