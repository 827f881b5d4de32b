"""An answer's score in [0, 1]: lm-eval's process_results.

Values are read at their boundaries only (sparse_eval.needle.forms): "948217" is not 48217. The
end of an answer is a boundary.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from sparse_eval.lm_tasks.common_words import POOL
from sparse_eval.lm_tasks.needles import UUID_START
from sparse_eval.needle.forms import DIGITS, WORD, WORDS, Form
from sparse_eval.needle.score import score

Doc = Mapping[str, Any]
LETTERS = re.compile(r"[a-z]+")
HEX_START = re.compile(rf"(?<![0-9a-z-])[0-9a-f]{{{UUID_START}}}(?![0-9a-z])")


def digits(doc: Doc, results: Sequence[str]) -> dict[str, float]:
    """1 if the first number in the answer that is meant as a value is the true one."""
    return _first(doc, results, DIGITS)


def word(doc: Doc, results: Sequence[str]) -> dict[str, float]:
    """1 if the first word of the known ones is the true one."""
    return _first(doc, results, WORD)


def uuid_start(doc: Doc, results: Sequence[str]) -> dict[str, float]:
    """1 if the first run of the right length is the true first group of the UUID."""
    found = HEX_START.search(results[0].lower())
    return {"acc": float(found is not None and found[0] == doc["target"])}


def values(doc: Doc, results: Sequence[str]) -> dict[str, float]:
    """The share of the true words among as many known words as were asked for, the first ones."""
    return _share(doc, results, WORDS)


def listed(doc: Doc, results: Sequence[str]) -> dict[str, float]:
    """As `values`, of the words that lists are made of."""
    return _share(doc, results, POOL)


def _first(doc: Doc, results: Sequence[str], form: Form) -> dict[str, float]:
    found = score(results[0], doc["target"], doc["others"], form, ended=True)
    return {"acc": float(found.is_correct)}


def _share(doc: Doc, results: Sequence[str], known: Sequence[str]) -> dict[str, float]:
    """A known word counts once, however often it is repeated."""
    wanted = set(doc["targets"])
    given = dict.fromkeys(w for w in LETTERS.findall(results[0].lower()) if w in known)
    first = list(given)[: len(wanted)]
    return {"acc": len(wanted.intersection(first)) / len(wanted)}
