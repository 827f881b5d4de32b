"""Documents for the tests: short texts of different lengths, context and question apart."""

from __future__ import annotations

import random
from typing import Any

import datasets

LETTERS = "abcdefghijklmnopqrstuvwxyz "


def documents(num: int, length: int) -> list[dict[str, Any]]:
    draw = random.Random(0)
    docs = []
    for i in range(num):
        context = "".join(draw.choices(LETTERS, k=length + 7 * i)).strip()
        choices = [
            "".join(draw.choices(LETTERS, k=draw.randint(2, 5))).strip() or "x" for _ in "abc"
        ]
        docs.append(
            {
                "context": context,
                "question": f"\nWhat is number {i}?\nAnswer:",
                "target": choices[0],
                "choices": choices,
                "answer": i % 3,
            }
        )
    return docs


def build(num_samples: int = 12, max_length: int = 150, **_: Any) -> dict[str, datasets.Dataset]:
    found = documents(num_samples, max_length)
    return {"test": datasets.Dataset.from_list(found, split=datasets.Split.TEST)}


def starts_low(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """Right where the answer's first character comes early: about half of all answers."""
    text = results[0]
    return {"low": float(bool(text) and ord(text[0]) % 2 == 0), "length": float(len(text))}


def always(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    return {"acc": 1.0}
