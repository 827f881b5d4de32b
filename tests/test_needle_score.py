"""Outcomes of answers: golden cases, one rule a test."""

from __future__ import annotations

import random

import pytest

from sparse_eval.inputs.texts import docs
from sparse_eval.needle.forms import DIGITS, UUID, WORD, WORDS, edit_distance
from sparse_eval.needle.kinds import KEYS, KINDS
from sparse_eval.needle.score import OUTCOMES, decided, score

FORMS = {"digits": DIGITS, "word": WORD, "uuid": UUID}
ONE_ID = "15e36f2d-dcb6-4e44-9a05-71279eb2aa69"

GOLDEN = [
    # text, truth, other planted values, form, ended, outcome
    ("The code is 4821.", "4821", [], "digits", True, "correct"),
    (" 4821", "4821", [], "digits", True, "correct"),
    ("**4821**", "4821", [], "digits", True, "correct"),
    ('"4821".', "4821", [], "digits", True, "correct"),
    (" 48,217.", "48217", [], "digits", True, "correct"),
    ("There are 3 vaults; the one you mean is 4821.", "4821", [], "digits", True, "correct"),
    (
        "Well, let me think about that for a while, since the text is long and mentions vaults in "
        "more than one place, and I want to be sure of it: the access code is 4821.",
        "4821",
        [],
        "digits",
        False,
        "correct",
    ),
    ("not 4821 but 7730", "4821", ["7730"], "digits", True, "correct"),
    ("948217", "4821", [], "digits", True, "off_topic"),
    ("x4821y.", "4821", [], "digits", True, "off_topic"),
    (" 4821.5.", "4821", [], "digits", True, "off_topic"),
    (" 4,821.50 in all.", "4821", [], "digits", True, "off_topic"),
    (" 4821.5 or so, 4821 to be exact.", "4821", [], "digits", True, "correct"),
    (" 4.4821.", "4821", [], "digits", True, "off_topic"),
    (" -4821.", "4821", [], "digits", True, "garbled"),
    (" \u22124821.", "4821", [], "digits", True, "garbled"),
    (" - 4821.", "4821", [], "digits", True, "correct"),
    ("vault-4821.", "4821", [], "digits", True, "correct"),
    (" 4821.\nThe end.", "4821", [], "digits", True, "correct"),
    (" 4821.", "4821", [], "digits", False, "correct"),
    (" 4812.", "4821", [], "digits", True, "fabricated"),
    (" 4822.", "4821", [], "digits", True, "garbled"),
    (" 482.", "4821", [], "digits", True, "garbled"),
    (" 48211.", "4821", [], "digits", True, "garbled"),
    (" 7730, not 4821.", "4821", ["7730"], "digits", True, "distractor"),
    (" 1009.", "4821", ["7730"], "digits", True, "fabricated"),
    (" a secret.", "4821", [], "digits", True, "off_topic"),
    (" a very important matter. It is not", "4821", [], "digits", False, "off_topic"),
    (" a very important matter that", "4821", [], "digits", False, "truncated"),
    (" 48", "4821", [], "digits", False, "truncated"),
    (" 4821", "4821", [], "digits", False, "truncated"),
    ("", "4821", [], "digits", True, "empty"),
    (' "…"', "4821", [], "digits", True, "empty"),
    (" pyramid.", "pyramid", [], "word", True, "correct"),
    (" Pyramid!", "pyramid", [], "word", True, "correct"),
    (" pyramids.", "pyramid", [], "word", True, "garbled"),
    (" the lighthouse.", "pyramid", [], "word", True, "fabricated"),
    (" the lighthouse.", "pyramid", ["lighthouse"], "word", True, "distractor"),
    (" not known.", "pyramid", [], "word", True, "off_topic"),
    (f" {ONE_ID}.", ONE_ID, [], "uuid", True, "correct"),
    (f" {ONE_ID.upper()}.", ONE_ID, [], "uuid", True, "correct"),
    (f" {ONE_ID[:18]}.", ONE_ID, [], "uuid", True, "garbled"),
    (f" {ONE_ID[:-1]}0.", ONE_ID, [], "uuid", True, "garbled"),
    (" 8bec01b6-df08-4776-8d4b-337646427892.", ONE_ID, [], "uuid", True, "fabricated"),
    (" deadbeef.", ONE_ID, [], "uuid", True, "off_topic"),
]


@pytest.mark.parametrize(("text", "truth", "others", "form", "ended", "outcome"), GOLDEN)
def test_golden(text, truth, others, form, ended, outcome):
    assert score(text, truth, others, FORMS[form], ended=ended).outcome == outcome


def test_every_outcome_has_a_golden_case_and_a_rule():
    assert {case[-1] for case in GOLDEN} == set(OUTCOMES)


def test_a_settled_outcome_does_not_change_as_the_answer_goes_on():
    for text, truth, others, form, _, _ in GOLDEN:
        for cut in range(len(text) + 1):
            early = decided(text[:cut], truth, others, FORMS[form])
            if early is not None:
                whole = score(text, truth, others, FORMS[form], ended=True)
                assert early == whole
                break


@pytest.mark.parametrize("name", ["passcode", "word", "uuid"])
def test_chance_values_are_close_to_the_truth_in_one_case_of_a_hundred_at_most(name):
    kind, source = KINDS[name], random.Random(0)
    pairs = [(kind.make(source), kind.make(source)) for _ in range(4000)]
    other = [(a, b) for a, b in pairs if a != b]
    assert sum(kind.form.is_close(a, b) for a, b in other) / len(other) <= 0.01


def test_running_text_is_close_to_a_planted_word_in_one_case_of_a_hundred_at_most():
    words = sorted({run.value for run in WORD.runs(docs().text)})
    source = random.Random(0)
    close = [WORD.is_close(source.choice(words), source.choice(WORDS)) for _ in range(4000)]
    assert sum(close) / len(close) <= 0.01


def test_keys_and_words_cannot_be_taken_for_one_another():
    assert len(set(KEYS)) == len(KEYS) and len(set(WORDS)) == len(WORDS)
    assert min(edit_distance(a, b) for a in KEYS for b in WORDS) > 2


def test_edit_distance():
    assert edit_distance("kitten", "sitting") == 3
    assert edit_distance("", "abc") == 3 and edit_distance("abc", "abc") == 0
