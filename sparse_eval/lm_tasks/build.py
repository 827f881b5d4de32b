"""Questions into an lm-eval data set: each with the longest context that fits, and its fields.

A prompt is `context` + `question`, verbatim; the question ends with `gen_prefix`, where the answer
goes on. `target` is the answer, or `targets` are its parts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Any

from datasets import Dataset

from sparse_eval.lm_tasks.fit import longest
from sparse_eval.lm_tasks.request import Request, request_of


@dataclass(frozen=True)
class Question:
    """write(size): the context of so many units, smallest or more. targets: parts of the answer.
    others: values of the same form that the context holds. depth: where the answer stands, 0
    first, 1 last; None: all over the context. choices: of a multiple-choice task."""

    write: Callable[[int], str]
    smallest: int
    asked: str
    cue: str
    targets: tuple[str, ...]
    others: tuple[str, ...] = ()
    depth: float | None = None
    choices: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        return f"\n\nQuestion: {self.asked}\nAnswer: {self.cue}"

    def prompt(self, size: int) -> str:
        return self.write(size) + self.text


Make = Callable[[Request, int], Question]


def random_of(request: Request, sample: int, what: str) -> Random:
    """A generator of its own for each thing drawn; text seeds do not depend on hashing."""
    return Random(f"{request.seed}/{request.task}/{sample}/{what}")


def build(task: str, make: Make, metadata: Mapping[str, Any]) -> dict[str, Dataset]:
    """make(request, sample): the question. Raises ValueError in one line, also for a max_length
    that is too short for one of the questions."""
    request = request_of(task, metadata)
    questions = [make(request, sample) for sample in range(request.num_samples)]
    needed = max(request.count(question.prompt(question.smallest)) for question in questions)
    if needed > request.max_length:
        raise ValueError(
            f"{task}: max_length must be >= {needed} tokens for its sentences and questions, "
            f"got {request.max_length}"
        )
    docs, size = list[dict[str, Any]](), questions[0].smallest + 1
    for sample, question in enumerate(questions):
        count = counter(request, question)
        size = longest(count, question.smallest, request.max_length, size)
        refuse_special_tokens(request, question.prompt(size))
        docs.append(doc_of(request, sample, question, size) | {"length": count(size)})
    return {"test": Dataset.from_list(docs)}


def refuse_special_tokens(request: Request, prompt: str) -> None:
    found = request.count.special_in(prompt)
    if found:
        raise ValueError(
            f"{request.task}: the text holds {found}, which this tokenizer reads as a special token"
        )


def counter(request: Request, question: Question) -> Callable[[int], int]:
    """Tokens of the prompt with a context of some size, each counted once."""
    return cache(lambda size: request.count(question.prompt(size)))


def doc_of(request: Request, sample: int, question: Question, size: int) -> dict[str, Any]:
    doc = {
        "sample": sample,
        "context": question.write(size),
        "question": question.text,
        "gen_prefix": question.cue,
        "target": ", ".join(question.targets),
        "targets": list(question.targets),
        "others": list(question.others),
        "depth": question.depth,
        "max_length": request.max_length,
        "seed": request.seed,
    }
    if question.choices:
        gold = question.choices.index(question.targets[0])
        doc |= {"choices": list(question.choices), "gold": gold}
    return doc


def prompt_of(doc: Mapping[str, Any]) -> str:
    """lm-eval's doc_to_text."""
    return doc["context"] + doc["question"]
