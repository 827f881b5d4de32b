"""Planted prompts: exact length, exact place, verbatim text, one BOS, the same in every process."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from sparse_eval.inputs.tokens import control_ids
from sparse_eval.needle.forms import WORDS
from sparse_eval.needle.haystack import Haystack, haystack_text
from sparse_eval.needle.kinds import KINDS
from tests.needles import CHAT, bpe, haystack, planted
from tests.tiny import tiny_loaded

DEPTHS = [0, 0.02, 0.25, 0.5, 0.77, 0.98, 1]


def decode(tokenizer, ids):
    return tokenizer.decode(ids.tolist(), clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("depth", DEPTHS)
def test_length_place_and_text_are_exact(kind, depth):
    for sample in range(4):
        p = planted(kind, depth, sample=sample)
        assert len(p.ids) == 600
        assert abs(p.depth_realised - depth) <= 0.02
        assert p.needle in decode(bpe(), p.ids[slice(*p.needle_span)])
        assert p.value in decode(bpe(), p.ids[slice(*p.value_span)])
        assert decode(bpe(), p.ids).count(p.value) == 1
        assert p.needle_span[0] <= p.value_span[0] < p.value_span[1] <= p.needle_span[1]


def test_depths_0_and_1_are_exact():
    for sample in range(6):
        first, last = (planted("passcode", depth, sample=sample) for depth in (0, 1))
        assert first.depth_realised == 0 and first.needle_span[0] == 0
        assert last.depth_realised == 1
        assert decode(bpe(), last.ids[: last.question_start + 1]).rstrip().endswith(last.needle)


def test_a_haystack_without_sentence_ends_takes_the_needle_where_it_was_asked():
    for text in ("lorem ipsum dolor sit amet " * 2000, "abcdefghij" * 3000):
        p = planted("passcode", 0.5, hay=haystack(4, text))
        assert abs(p.depth_realised - 0.5) <= 0.02


def test_an_empty_or_short_haystack_is_refused_fast(tmp_path):
    started = time.perf_counter()
    path = tmp_path / "empty.txt"
    path.write_text(" \n")
    with pytest.raises(ValueError, match="empty"):
        haystack_text({"source": "file", "path": str(path)}, None, 0)
    with pytest.raises(ValueError, match=r"too short: docs has \d+ tokens"):
        planted(hay=haystack(1, "A short text. " * 10))
    with pytest.raises(ValueError, match=r"context must be >= \d+ tokens"):
        planted(context=40)
    with pytest.raises(ValueError, match="transcripts"):
        haystack_text({"source": "transcripts"}, None, 0)
    assert time.perf_counter() - started < 1


@pytest.mark.parametrize(
    ("tokenizer", "chat", "num_bos"),
    [
        (bpe(chat=CHAT.replace("{{ bos }}", "<bos>")), "auto", 1),
        (bpe(chat=CHAT.replace("{{ bos }}", "<bos>"), adds_bos=True), "auto", 1),
        (bpe(chat=CHAT.replace("{{ bos }}", ""), adds_bos=True), "auto", 1),
        (bpe(chat=CHAT.replace("{{ bos }}", "")), "auto", 0),
        (bpe(adds_bos=True), "auto", 1),
        (bpe(chat=CHAT, adds_bos=True), "none", 1),
        (bpe(), "none", 0),
    ],
)
def test_one_bos_at_the_start_or_none(tokenizer, chat, num_bos):
    p = planted(tokenizer=tokenizer, chat=chat)
    assert p.ids.tolist().count(1) == num_bos
    assert num_bos == 0 or p.ids[0] == 1
    context = p.ids[p.needle_span[0] : p.needle_span[1]].tolist()
    assert control_ids(tokenizer).isdisjoint(context)


def test_chat_format_is_the_tokenizers_own_and_hashed():
    framed = planted(tokenizer=bpe(chat=CHAT.replace("{{ bos }}", "<bos>")))
    plain = planted(chat="none")
    text = decode(bpe(), framed.ids)
    assert text.startswith("<bos><user>") and "<model>" in text
    assert framed.chat.startswith("template:") and plain.chat == "none"
    with pytest.raises(ValueError, match="task.chat=template"):
        planted(chat="template")


def test_thinking_is_closed_before_the_answer():
    tokenizer = bpe(chat=CHAT.replace("{{ bos }}", "").replace("<model>", "<model><think>\n"))
    text = decode(tokenizer, planted(tokenizer=tokenizer).ids)
    assert "<think>\n\n</think>\n\n" in text


def test_special_tokens_spelled_out_in_a_haystack_stay_text():
    text = "The <eos> marker ends a text. " * 800
    p = planted(hay=haystack(2, text))
    assert control_ids(bpe()).isdisjoint(p.ids.tolist())


def test_the_true_answer_continues_the_prompt():
    for kind in KINDS:
        p = planted(kind)
        text = decode(bpe(), p.ids) + bpe().decode(list(p.answer_ids))
        assert text.endswith(f" {p.value}")
        assert p.value.startswith(bpe().decode([p.answer_ids[p.value_start]]).strip())


def test_the_question_begins_after_the_context():
    p = planted("passcode", 0.5, chat="none")
    question = decode(bpe(), p.ids[p.question_start :])
    assert p.key in question and "Question:" in question and p.value not in question
    assert p.question_tokens == len(p.ids) - p.question_start


def test_multikey_hides_the_needle_among_sentences_of_its_form():
    p = planted("multikey")
    text = decode(bpe(), p.ids)
    assert len(set(p.distractors)) == 3
    assert all(text.count(value) == 1 for value in (*p.distractors, p.value))
    assert not planted("passcode").distractors
    assert "easy" in KINDS["passcode"].label and "easy" not in KINDS["multikey"].label


def test_wordings_take_turns():
    for kind in KINDS.values():
        assert len(kind.wordings) >= 3
    seen = [planted("passcode", 0.5, sample=i).wording for i in range(6)]
    assert sorted(seen) == [0, 0, 1, 1, 2, 2]


def test_samples_depths_and_roles_have_prompts_of_their_own():
    prompts = [
        planted("passcode", depth, sample=i, role=role)
        for depth in (0.2, 0.8)
        for i in range(4)
        for role in ("measured", "gate")
    ]
    assert len({p.hash for p in prompts}) == len({p.value for p in prompts}) == len(prompts)
    assert len({p.spot.name for p in prompts}) == len(prompts)


def test_windows_of_one_cell_are_disjoint():
    text = " ".join(f"word{i}." for i in range(40_000))
    hay = Haystack(text, "numbers", 5)
    windows = [planted("passcode", 0.5, sample=i, hay=hay) for i in range(5)]
    words = [set(decode(bpe(), p.ids).split()) for p in windows]
    marks = [{w for w in each if w.startswith("word") and w.endswith(".")} for each in words]
    assert all(marks) and sum(map(len, marks)) == len(set.union(*marks))


def test_prompts_are_the_same_in_every_process():
    code = (
        "from tests.needles import planted; from sparse_eval.needle.kinds import KINDS; "
        "print(*(planted(k, d).hash for k in KINDS for d in (0, 0.3, 1)))"
    )
    other = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONHASHSEED": "12345"},
        check=True,
        capture_output=True,
        text=True,
    )
    assert other.stdout.split() == [planted(k, d).hash for k in KINDS for d in (0, 0.3, 1)]


def test_a_byte_tokenizer_works_too():
    tokenizer = tiny_loaded("tiny_llama").tokenizer
    p = planted("uuid", 0.5, context=700, tokenizer=tokenizer)
    assert len(p.ids) == 700 and p.ids[0] == tokenizer.bos_token_id
    assert p.needle in decode(tokenizer, p.ids)


def test_text_without_spaces_may_start_at_any_character():
    # three tokens a character, two at the start: some starts alone give an exact length
    text = "é" * 40 + "日本語" * 1500
    lengths = {c: planted("passcode", 1, context=c, hay=haystack(1, text)) for c in (600, 601, 602)}
    assert all(len(p.ids) == context for context, p in lengths.items())


def test_a_text_that_holds_every_value_is_an_error():
    with pytest.raises(ValueError, match="no word value is left"):
        planted("word", 0.5, hay=haystack(text=" ".join(WORDS) * 200))
