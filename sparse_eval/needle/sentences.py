"""What one sample plants, and where: seeded keys, values, wordings; the same in every process."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from sparse_eval.needle.kinds import KEYS, Kind

VALUE_TRIES = 10_000


@dataclass(frozen=True)
class Spot:
    """What one sample plants where. role: measured, or gate (dense only, other seeds)."""

    kind: Kind
    context: int
    depth: float
    sample: int
    seed: int
    role: str = "measured"

    def random(self, what: str) -> Random:
        """A generator of its own for each thing drawn; text seeds do not depend on hashing."""
        parts = (self.seed, self.role, self.kind.name, self.context, float(self.depth), self.sample)
        return Random("/".join(map(str, (*parts, what))))

    @property
    def name(self) -> str:
        gate = "" if self.role == "measured" else f"{self.role}-"
        return f"{gate}{self.kind.name}/{self.context}/{self.depth:g}/{self.sample}"


@dataclass(frozen=True)
class Sentences:
    """What a sample plants: the needle and its distractors, with their keys and values."""

    wording: int
    key: str
    value: str
    needle: str
    others: tuple[tuple[str, str], ...]
    question: str
    cue: str

    @property
    def planted(self) -> list[str]:
        return [self.needle, *(sentence for _, sentence in self.others)]

    @property
    def distractors(self) -> tuple[str, ...]:
        return tuple(value for value, _ in self.others)


def draw(spot: Spot, text: str, num_distractors: int) -> Sentences:
    """Seeded keys, values, wording; no value is close to another or stands in the text already."""
    kind, random = spot.kind, spot.random("sentences")
    # samples take turns, from a seeded start, so that each wording is asked equally often
    first = Random(f"{spot.seed}/{spot.role}/{spot.kind.name}/{spot.depth}").randrange(1000)
    index = (first + spot.sample) % len(kind.wordings)
    wording = kind.wordings[index]
    keys = random.sample(KEYS, 1 + (num_distractors if kind.has_distractors else 0))
    lowered, values = text.lower(), list[str]()
    for _ in range(VALUE_TRIES):
        value = kind.make(random)
        if value in lowered or any(value == v or kind.form.is_close(value, v) for v in values):
            continue
        values.append(value)
        if len(values) == len(keys):
            break
    else:
        raise ValueError(
            f"{spot.name}: no {kind.name} value is left that does not stand in the text already"
        )
    planted = [wording.needle.format(key=k, value=v) for k, v in zip(keys, values, strict=True)]
    return Sentences(
        wording=index,
        key=keys[0],
        value=values[0],
        needle=planted[0],
        others=tuple(zip(values[1:], planted[1:], strict=True)),
        question=wording.question.format(key=keys[0]),
        cue=wording.cue.format(key=keys[0]),
    )
