"""What can be planted: a value of some form, in a sentence, with the question that asks for it.

`multikey` hides the needle among sentences of its own form, so that it is no outlier; the others
plant one alien sentence alone, which any bound on the keys finds: an easy needle.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from sparse_eval.needle.forms import DIGITS, UUID, WORD, WORDS, Form
from sparse_eval.storage.columns import names

KEYS = names(
    "amber anchor apricot arrow aspen badger bamboo basalt beacon bison bronze cactus canyon"
    " cedar cobalt copper coral cotton crimson crystal dolphin ebony ember emerald falcon feather"
    " fennel garnet ginger glacier granite hazel heron indigo ivory jasmine juniper kestrel"
    " lagoon lavender lilac linen lotus magnet maple marble meadow mercury nectar nickel olive"
    " onyx orchid otter pebble pepper pewter quartz raven saffron sapphire scarlet sequoia silver"
    " sparrow tangerine thistle topaz turquoise velvet violet walnut willow zephyr"
)


@dataclass(frozen=True)
class Wording:
    """needle: the planted sentence with {key} and {value}. question, cue: with {key}; the answer
    goes on where the cue ends."""

    needle: str
    question: str
    cue: str


@dataclass(frozen=True)
class Kind:
    """make: a value from a seeded generator. has_distractors: the sentence has others of its form
    around it, each with a key of its own."""

    name: str
    form: Form
    make: Callable[[Random], str]
    wordings: tuple[Wording, ...]
    has_distractors: bool = False

    @property
    def label(self) -> str:
        return self.name if self.has_distractors else f"{self.name} (lone, easy)"


CODE_WORDINGS = (
    Wording(
        "The access code for the {key} vault is {value}.",
        "What is the access code for the {key} vault?",
        "The access code for the {key} vault is",
    ),
    Wording(
        "The magic number for {key} is: {value}.",
        "What is the magic number for {key}?",
        "The magic number for {key} is",
    ),
    Wording(
        "Remember that the {key} locker opens with the number {value}.",
        "Which number opens the {key} locker?",
        "The {key} locker opens with the number",
    ),
)
WORD_WORDINGS = (
    Wording(
        "The password of the {key} gate is {value}.",
        "What is the password of the {key} gate?",
        "The password of the {key} gate is",
    ),
    Wording(
        "The secret word chosen by the {key} team is {value}.",
        "Which secret word did the {key} team choose?",
        "The secret word chosen by the {key} team is",
    ),
    Wording(
        "Remember that the {key} lodge answers to the word {value}.",
        "Which word does the {key} lodge answer to?",
        "The {key} lodge answers to the word",
    ),
)
UUID_WORDINGS = (
    Wording(
        "The identifier of the {key} archive is {value}.",
        "What is the identifier of the {key} archive?",
        "The identifier of the {key} archive is",
    ),
    Wording(
        "The magic uuid for {key} is: {value}.",
        "What is the magic uuid for {key}?",
        "The magic uuid for {key} is",
    ),
    Wording(
        "Remember that the {key} engine has the serial number {value}.",
        "Which serial number does the {key} engine have?",
        "The {key} engine has the serial number",
    ),
)


def code(random: Random) -> str:
    """Five digits, the first not 0."""
    return str(random.randrange(10_000, 100_000))


def word(random: Random) -> str:
    return random.choice(WORDS)


def identifier(random: Random) -> str:
    return str(uuid.UUID(int=random.getrandbits(128), version=4))


KINDS = {
    kind.name: kind
    for kind in (
        Kind("multikey", DIGITS, code, CODE_WORDINGS, has_distractors=True),
        Kind("passcode", DIGITS, code, CODE_WORDINGS),
        Kind("word", WORD, word, WORD_WORDINGS),
        Kind("uuid", UUID, identifier, UUID_WORDINGS),
    )
}
