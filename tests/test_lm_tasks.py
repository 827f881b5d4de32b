"""The bundled lm-eval tasks: they load, prompts are what they say, answers are there."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest
from lm_eval.tasks import TaskManager

from sparse_eval.lm_tasks import FOLDER, GROUP, common_words, scoring
from sparse_eval.lm_tasks.fit import longest
from sparse_eval.lm_tasks.key_value import Register
from sparse_eval.lm_tasks.token_count import token_count
from tests.needles import CHAT, bpe

ROOT = Path(__file__).parent.parent
NAMES = sorted(path.stem for path in FOLDER.glob("se_*.yaml"))
GENERATED = [name for name in NAMES if name != "se_multikey_choice"]
HIDDEN = [name for name in NAMES if name not in ("se_common_words", "se_key_value")]
LENGTH = 900
DIGEST = """
import hashlib, json, sys
from lm_eval.tasks import TaskManager
import sparse_eval.lm_tasks.needles, sparse_eval.lm_tasks.scoring
heavy = {"torch", "transformers", "triton"} & set(sys.modules)
assert not heavy, heavy
metadata = json.loads(sys.argv[1])
manager = TaskManager(include_path=sys.argv[2], include_defaults=False, metadata=metadata)
for name in manager.all_subtasks:
    docs = list(manager.load([name])["tasks"][name].test_docs())
    print(name, hashlib.sha256(json.dumps(docs).encode()).hexdigest())
"""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("tokenizer")
    bpe(adds_bos=True, chat=CHAT.replace("{{ bos }}", "<bos>")).save_pretrained(folder)
    return str(folder)


def metadata_of(tokenizer: str) -> dict[str, Any]:
    return {"tokenizer": tokenizer, "max_length": LENGTH, "num_samples": 3, "seed": 0}


def manager(metadata: dict[str, Any]) -> TaskManager:
    return TaskManager(include_path=str(FOLDER), include_defaults=False, metadata=metadata)


def load(tokenizer: str, name: str, **changes: Any) -> Any:
    return manager(metadata_of(tokenizer) | changes).load([name])["tasks"][name]


@pytest.fixture(scope="module")
def tasks(tokenizer) -> dict[str, Any]:
    return manager(metadata_of(tokenizer)).load([GROUP])["tasks"]


def docs_of(task: Any) -> list[dict[str, Any]]:
    return list(task.test_docs())


def digest(docs: list[dict[str, Any]]) -> str:
    return hashlib.sha256(json.dumps(docs).encode()).hexdigest()


def test_the_group_holds_every_task_of_the_folder(tasks):
    assert sorted(tasks) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_prompt_is_context_and_question_verbatim(tasks, name):
    task = tasks[name]
    for doc in docs_of(task):
        prompt = task.doc_to_text(doc)
        assert prompt == doc["context"] + doc["question"]
        assert task.fewshot_context(doc, num_fewshot=0) == prompt
        assert doc["question"].endswith(doc["gen_prefix"])
        assert prompt == prompt.strip()
        assert "\\n" not in doc["question"]


@pytest.mark.parametrize("name", NAMES)
def test_no_prompt_is_longer_than_asked_and_none_much_shorter(tokenizer, tasks, name):
    count = bpe(adds_bos=True)
    for doc in docs_of(tasks[name]):
        length = len(count(doc["context"] + doc["question"])["input_ids"])
        assert length == doc["length"] <= LENGTH
        assert length > LENGTH - 40
    long = docs_of(load(tokenizer, name, max_length=5000, num_samples=1))[0]
    assert 5000 - 40 < long["length"] <= 5000


@pytest.mark.parametrize("name", NAMES)
def test_a_chat_format_counts(tokenizer, name):
    task = load(tokenizer, name, apply_chat_template=True, num_samples=1)
    tok = bpe(adds_bos=True, chat=CHAT.replace("{{ bos }}", "<bos>"))
    doc = docs_of(task)[0]
    rendered = task.fewshot_context(
        doc,
        num_fewshot=0,
        apply_chat_template=True,
        chat_template=lambda chat, add_generation_prompt: tok.apply_chat_template(
            chat, add_generation_prompt=add_generation_prompt, tokenize=False
        ),
    )
    ids = tok(rendered, add_special_tokens=False)["input_ids"]
    assert ids.count(tok.bos_token_id) == 1
    assert len(ids) == doc["length"] <= LENGTH


@pytest.mark.parametrize("name", NAMES)
def test_too_short_is_refused_with_the_length_that_is_enough(tokenizer, name):
    with pytest.raises(ValueError, match=rf"{name}: max_length must be >= (\d+)") as refused:
        load(tokenizer, name, max_length=20)
    assert "\n" not in str(refused.value)
    needed = int(re.findall(r">= (\d+)", str(refused.value))[0])
    docs = docs_of(load(tokenizer, name, max_length=needed))
    assert max(doc["length"] for doc in docs) == needed
    with pytest.raises(ValueError, match=f">= {needed} "):
        load(tokenizer, name, max_length=needed - 1)


def test_docs_are_the_same_in_another_process_under_another_hash_seed(tokenizer, tasks):
    done = subprocess.run(
        [sys.executable, "-c", DIGEST, json.dumps(metadata_of(tokenizer)), str(FOLDER)],
        cwd=ROOT,
        env=os.environ | {"PYTHONHASHSEED": "7", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    there = dict(line.split() for line in done.stdout.splitlines() if line.startswith("se_"))
    assert there == {name: digest(docs_of(task)) for name, task in tasks.items()}


@pytest.mark.parametrize("name", NAMES)
def test_seeds_and_samples_differ_and_more_samples_leave_the_first_as_they_were(
    tokenizer, tasks, name
):
    docs = docs_of(tasks[name])
    other = docs_of(load(tokenizer, name, seed=1))
    contexts = [doc["context"] for doc in docs + other]
    assert len(set(contexts)) == len(contexts)
    assert docs_of(load(tokenizer, name, num_samples=5))[:3] == docs


@pytest.mark.parametrize("name", HIDDEN)
def test_every_value_stands_in_the_context_once_and_nowhere_else(tasks, name):
    for doc in docs_of(tasks[name]):
        for value in (*doc["targets"], *doc["others"]):
            assert doc["context"].count(value) == 1
            assert value not in doc["question"]


@pytest.mark.parametrize("name", [name for name in HIDDEN if name.startswith("se_needle")])
def test_a_needle_lies_at_its_depth(tokenizer, name):
    docs = docs_of(load(tokenizer, name, num_samples=8))
    for doc in docs:
        before, after = (len(part.split()) for part in doc["context"].split(doc["target"]))
        assert abs(before / (before + after) - doc["depth"]) < 0.06
    depths = sorted(doc["depth"] for doc in docs)
    assert max(b - a for a, b in zip([0.0, *depths], [*depths, 1.0], strict=True)) < 0.3


def test_a_chain_of_variables_leads_to_the_answer(tasks):
    for doc in docs_of(tasks["se_variable_tracking"]):
        given = dict(re.findall(r"VAR (\w+) = (?:VAR )?(\w+)\.", doc["context"]))
        assert len(given) == 12
        found = re.findall(r"VAR (\w+) =", doc["gen_prefix"])[0]
        hops = 0
        while found in given:
            found, hops = given[found], hops + 1
        assert (found, hops) == (doc["target"], 3)


def test_the_common_words_are_the_most_frequent_at_any_length(tokenizer, tasks):
    long = docs_of(load(tokenizer, "se_common_words", max_length=4000, num_samples=1))
    for doc in docs_of(tasks["se_common_words"]) + long:
        listed = doc["context"].partition("\n\n")[2].removesuffix(".").split(", ")
        (*common, (_, least)), rest = (
            Counter(listed).most_common(3),
            Counter(listed).most_common()[3:],
        )
        assert {word for word, _ in Counter(listed).most_common(3)} == set(doc["targets"])
        assert len(common) == 2
        assert least >= 4 * max(number for _, number in rest)


def test_the_key_asked_for_stands_in_the_object_once(tokenizer, tasks):
    long = docs_of(load(tokenizer, "se_key_value", max_length=70_000, num_samples=1))
    for doc in docs_of(tasks["se_key_value"]) + long:
        pairs = json.loads(doc["context"], object_pairs_hook=list)
        assert len(pairs) >= 20
        names, numbers = zip(*pairs, strict=True)
        assert len(set(names)) == len(set(numbers)) == len(pairs)
        asked = json.loads("{" + doc["gen_prefix"] + doc["target"] + '"}')
        assert list(asked.items())[0] in {tuple(pair) for pair in pairs}
    assert len(pairs) > 2000
    with pytest.raises(ValueError, match="more than 50,000 entries"):
        Register("se_key_value", Random(0)).entries(50_001)


def test_choices_hold_the_answer_at_every_place(tokenizer):
    docs = docs_of(load(tokenizer, "se_multikey_choice", num_samples=16))
    for doc in docs:
        assert doc["choices"][doc["gold"]] == doc["target"]
        assert len(set(doc["choices"])) == 4
        assert set(doc["choices"]) <= {doc["target"], *doc["others"]}
    assert {doc["gold"] for doc in docs} == {0, 1, 2, 3}


@pytest.mark.parametrize("name", GENERATED)
def test_the_true_answer_scores_one_and_no_other_does(tasks, name):
    task = tasks[name]
    generation = task.config.generation_kwargs
    assert generation["do_sample"] is False and generation["max_gen_toks"] <= 16
    docs = docs_of(task)
    for doc, other in zip(docs, docs[1:] + docs[:1], strict=True):
        assert not any(stop in f" {doc['target']}" for stop in generation["until"])
        assert task.process_results(doc, [f" {doc['target']}"]) == {"acc": 1.0}
        assert task.process_results(doc, [""]) == {"acc": 0.0}
        assert task.process_results(doc, [f" {other['target']}"])["acc"] < 1


NUMBER = {"target": "48217", "others": ["90551"]}
NOUN = {"target": "lantern", "others": []}
START = {"target": "3f2a9c41"}
PARTS = {"targets": ["lantern", "wizard", "gondola"]}


@pytest.mark.parametrize(
    ("score", "doc", "answer", "acc"),
    [
        (scoring.digits, NUMBER, " 48217", 1),
        (scoring.digits, NUMBER, "The number is 48,217", 1),
        (scoring.digits, NUMBER, " 948217", 0),
        (scoring.digits, NUMBER, " 48218", 0),
        (scoring.digits, NUMBER, " 90551, not 48217", 0),
        (scoring.word, NOUN, " Lantern", 1),
        (scoring.word, NOUN, ' the word "lantern"', 1),
        (scoring.word, NOUN, " lanterns", 0),
        (scoring.word, NOUN, " wizard or lantern", 0),
        (scoring.uuid_start, START, " 3F2A9C41", 1),
        (scoring.uuid_start, START, " 3f2a9c41-77b0-4c", 1),
        (scoring.uuid_start, START, " 3f2a9c4", 0),
        (scoring.uuid_start, START, " 3f2a9c412", 0),
        (scoring.uuid_start, START, " 00000000 3f2a9c41", 0),
        (scoring.values, PARTS, " gondola, lantern, and wizard", 1),
        (scoring.values, PARTS, " gondola, gondola, gondola, lantern", 2 / 3),
        (scoring.values, PARTS, " engine, kettle, piano, lantern, wizard", 0),
        (scoring.values, PARTS, " lanterns", 0),
        (scoring.listed, {"targets": ["amber", "lantern", "onyx"]}, "amber, onyx, cat", 2 / 3),
    ],
)
def test_scores(score, doc, answer, acc):
    assert score(doc, [answer]) == {"acc": pytest.approx(acc)}


def test_every_task_records_what_guessing_scores(tasks):
    chances = {name: task.config.metadata["chance"] for name, task in tasks.items()}
    assert all(0 <= chance < 1 for chance in chances.values())
    for name in ("se_multikey", "se_variable_tracking"):
        doc = docs_of(tasks[name])[0]
        assert chances[name] == 1 / (1 + len(doc["others"]))
    choice = docs_of(tasks["se_multikey_choice"])[0]
    assert chances["se_multikey_choice"] == 1 / len(choice["choices"])
    # one of the first three words of the list, copied, is a common one as often as they stand there
    shares = common_words.counts(["a", "b", "c"], list("defghijkl"), 1200)
    assert chances["se_common_words"] == sum(shares[w] for w in "abc") / 1200


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer": None}, "must name the tokenizer"),
        ({"tokenizer": "no/such-folder"}, "no tokenizer at 'no/such-folder'"),
        ({"max_length": "1024"}, "max_length must be an integer >= 1, got '1024'"),
        ({"num_samples": 0}, "num_samples must be an integer >= 1, got 0"),
        ({"seed": -1}, "seed must be an integer >= 0, got -1"),
        ({"text": "no/such.txt"}, "must be docs or a UTF-8 file's path, got 'no/such.txt'"),
        ({"text": 3}, "must be docs or a file's path, got 3"),
        ({"apply_chat_template": "yes"}, "must be true or false, got 'yes'"),
    ],
)
def test_metadata_that_cannot_be_right_is_one_line(tokenizer, changes, message):
    asked = manager(metadata_of(tokenizer) | changes)
    with pytest.raises(ValueError, match=re.escape(message)) as refused:
        asked.load(["se_needle_word"])
    assert "\n" not in str(refused.value)


def test_a_chat_format_is_not_assumed(tmp_path):
    bpe().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="needs a tokenizer with a chat template"):
        token_count(str(tmp_path), True)


TEXTS = ["One short line about nothing. Another one follows it.\n", "没有空格的文字" * 90, "x"]


@pytest.mark.parametrize("text", TEXTS)
def test_another_text_is_repeated_as_often_as_it_takes(tokenizer, tmp_path, text):
    path = tmp_path / "text.txt"
    path.write_text(text, encoding="utf-8")
    doc = docs_of(load(tokenizer, "se_needle_passcode", text=str(path), num_samples=1))[0]
    assert doc["context"].count(text[:5]) > 10
    assert LENGTH - 80 < doc["length"] <= LENGTH
    path.write_text("Changed.", encoding="utf-8")
    doc = docs_of(load(tokenizer, "se_needle_passcode", text=str(path), num_samples=1))[0]
    assert doc["context"].count("Changed.") > 10


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b" \n", "metadata text is empty"),
        (b"\xff\xfe", "must be UTF-8"),
        (b"One message. <user>And another. ", "holds <user>, which this tokenizer reads as a spe"),
    ],
)
def test_a_text_that_cannot_be_used_is_refused(tokenizer, tmp_path, content, message):
    path = tmp_path / "text.txt"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load(tokenizer, "se_needle_passcode", text=str(path))


@pytest.mark.parametrize("guess", [0, 1500, 10**6])
@pytest.mark.parametrize("limit", [7, 10, 11, 5000, 123_456])
def test_the_longest_size_that_fits_is_found_in_few_calls(limit, guess):
    calls = []

    def count(size: int) -> int:
        calls.append(size)
        return 7 + size * 3 + (size // 50) * 40  # uneven

    size = longest(count, 0, limit, guess)
    assert len(calls) < 25
    assert count(size) <= limit < count(size + 1)


def test_a_wheel_holds_every_yaml(monkeypatch):
    from setuptools import Distribution

    monkeypatch.chdir(ROOT)
    distribution = Distribution()
    distribution.parse_config_files(["pyproject.toml"])
    distribution.include_package_data = False  # what pyproject.toml names, whatever git knows
    command: Any = distribution.get_command_obj("build_py")
    command.ensure_finalized()
    held = {package: names for package, *_, names in command.data_files}
    assert set(held["sparse_eval.lm_tasks"]) == {path.name for path in FOLDER.glob("*.yaml")}
