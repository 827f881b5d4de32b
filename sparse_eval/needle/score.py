"""What an answer is: correct, garbled, distractor, fabricated, off_topic, empty or truncated.

The first run in the answer that can be told decides; each rule is one line of `OUTCOMES`.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from sparse_eval.needle.forms import Form

OUTCOMES = {
    "correct": "the first value given is the true one, with a boundary on either side",
    "garbled": "the first value given is close to the true one, closer than 1 in 100 chance values",
    "distractor": "the first value given is another one that was planted",
    "fabricated": "the first value given has the right form and was never planted",
    "off_topic": "the answer ended, or finished a sentence, without any value",
    "empty": "the answer ended with no letter or digit in it",
    "truncated": "the token limit came before a value, or the end of a sentence, was complete",
}
_SENTENCE_END = re.compile(r"\w[\"')\]*]*[.!?][\"')\]*]*(\s|$)|\w\s*\n")


@dataclass(frozen=True)
class Score:
    """outcome: a key of OUTCOMES. end: where in the answer the deciding value ends, if any does."""

    outcome: str
    end: int | None = None

    @property
    def is_correct(self) -> bool:
        return self.outcome == "correct"


def decided(text: str, truth: str, others: Collection[str], form: Form) -> Score | None:
    """The outcome that the answer so far settles, whatever follows; None: go on reading.

    A run at the end of the text may still grow, and settles nothing."""
    truth, planted = truth.lower(), {other.lower() for other in others}
    for run in form.runs(text):
        if text[run.end :] in ("", *form.joint):
            return None
        if run.value == truth:
            return Score("correct", run.end)
        if run.value in planted:
            return Score("distractor", run.end)
        if form.is_close(run.value, truth):
            return Score("garbled", run.end)
        if form.is_full(run.value, truth):
            return Score("fabricated", run.end)
    return None


def score(text: str, truth: str, others: Collection[str], form: Form, *, ended: bool) -> Score:
    """The outcome of a finished answer. ended: the model stopped by itself; False: the token limit
    cut it. others: the values of the other planted sentences."""
    # a model that stopped has said all it will: the end of the text is a boundary, as a full stop
    # is where the limit cut
    is_whole = ended or text.endswith(".")
    found = decided(f"{text}\n" if is_whole else text, truth, others, form)
    if found is not None:
        return found
    if not re.search(r"[^\W_]", text):
        return Score("empty" if ended else "truncated")
    if ended or _SENTENCE_END.search(text):
        return Score("off_topic")
    return Score("truncated")
