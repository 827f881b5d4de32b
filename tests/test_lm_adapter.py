"""The adapter against lm-eval's own HFLM: with policy=full nothing changes, else something does."""

from __future__ import annotations

import inspect
import logging
from pathlib import Path
from typing import Any

import lm_eval.tasks
import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import CachingLM
from lm_eval.models.huggingface import HFLM

from sparse_eval import lm_cli, models
from sparse_eval.lm import adapter
from sparse_eval.lm.adapter import PolicyLM
from sparse_eval.lm.arguments import arguments_in, layers_of, lm_eval_file, make_policy
from sparse_eval.policies.full import Full
from sparse_eval.policies.snapkv import SnapKV
from sparse_eval.policies.window import Window
from tests.lm_tasks.tiny_data import documents
from tests.tiny import tiny_loaded

HERE = Path(__file__).parent / "lm_tasks"
logging.getLogger("lm_eval").setLevel(logging.ERROR)

DOCS = documents(6, 90)
PROMPTS = [doc["context"] + doc["question"] for doc in DOCS]
GREEDY = {"until": ["q", "zz"], "max_gen_toks": 14, "do_sample": False}


@pytest.fixture(scope="module")
def tiny() -> Any:
    return tiny_loaded("tiny_llama")


def lm_of(kind: Any, tiny: Any, batch_size: int = 3, **options: Any) -> Any:
    common = {"tokenizer": tiny.tokenizer, "batch_size": batch_size}
    return kind(pretrained=tiny.model, **common, **options)


def dense(tiny: Any, batch_size: int = 3) -> PolicyLM:
    return lm_of(PolicyLM, tiny, batch_size, policy=Full(page_size=8), dense_layers=[0])


def window(tiny: Any, **options: Any) -> PolicyLM:
    policy = Window(page_size=8, sink_pages=1, local_pages=2)
    return lm_of(PolicyLM, tiny, policy=policy, budget=24, dense_layers=[0], **options)


def generations(**changes: Any) -> list[Instance]:
    return [Instance("generate_until", {}, (text, GREEDY | changes), 0) for text in PROMPTS]


def choices() -> list[Instance]:
    return [
        Instance("loglikelihood", {}, (text, f" {choice}"), i)
        for text, doc in zip(PROMPTS, DOCS, strict=True)
        for i, choice in enumerate(doc["choices"])
    ]


@pytest.mark.parametrize("batch_size", [1, 3])
def test_full_writes_what_stock_hflm_writes(tiny, batch_size):
    ours = dense(tiny, batch_size)
    assert ours.generate_until(generations()) == lm_of(HFLM, tiny, batch_size).generate_until(
        generations()
    )
    assert ours.selections > 0


@pytest.mark.parametrize("opened", [[0], [1, 3], [0, 1, 2, 3, 4, 5]])
def test_every_prompt_of_a_batch_opens_with_exactly_one_bos(tiny, opened):
    """lm-eval asks only the first string of a batch whether it brings its own."""
    texts = [f"<bos>{text}" if i in opened else text for i, text in enumerate(PROMPTS)]
    lm, alone = dense(tiny, batch_size=6), tiny.tokenizer(PROMPTS)["input_ids"]
    ids_BT, mask_BT = lm.tok_batch_encode(texts)
    rows = [ids[mask.bool()].tolist() for ids, mask in zip(ids_BT, mask_BT, strict=True)]
    assert rows == alone and all(ids.count(1) == 1 for ids in rows)
    assert mask_BT[:, -1].all() and not ids_BT[~mask_BT.bool()].any()
    asked = [Instance("generate_until", {}, (text, GREEDY), 0) for text in texts]
    assert lm.generate_until(asked) == lm.generate_until(generations())
    likely = [Instance("loglikelihood", {}, (text, " so"), 0) for text in (*texts, *PROMPTS)]
    with_bos, without = torch.tensor(lm.loglikelihood(likely))[:, 0].chunk(2)
    torch.testing.assert_close(with_bos, without, rtol=0, atol=1e-4)


def test_a_bos_of_ones_own_is_known_whatever_stands_for_an_empty_context(tiny):
    lm = lm_of(PolicyLM, tiny, policy=Full(page_size=8), dense_layers=[0], prefix_token_id=7)
    assert lm.tok_encode("<bos>some") == lm.tok_encode("some") and lm.tok_encode("some")[0] == 1


def test_a_cut_prompt_keeps_its_bos(tiny):
    lm = window(tiny)
    rows, mask = lm.tok_batch_encode(PROMPTS, left_truncate_len=40)
    assert rows[:, 0].tolist() == [1] * len(PROMPTS) and mask.all()
    assert [row[1:].tolist() for row in rows] == [lm.tok_encode(t)[-39:] for t in PROMPTS]


@pytest.mark.parametrize(
    ("ask", "told"),
    [
        (lambda lm: lm.tok_batch_encode(["<bos><bos>some"]), "exactly one BOS"),
        (lambda lm: lm.loglikelihood([Instance("loglikelihood", {}, ("some", ""), 0)]), "1 to"),
    ],
)
def test_prompts_that_cannot_be_asked_are_one_line(tiny, ask, told):
    with pytest.raises(ValueError, match=told) as caught:
        ask(dense(tiny))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"max_gen_toks": 0}, "max_gen_toks must be an integer >= 1, got 0"),
        ({"max_gen_toks": -3}, "got -3"),
        ({"max_gen_toks": "many"}, "got 'many'"),
        ({"max_gen_toks": None, "max_new_tokens": 2.5}, "max_new_tokens must be .* got 2.5"),
        ({"until": {"a": 1}}, "until must be a text or a list of them"),
        ({"until": [3]}, r"got \[3\]"),
        ({"until": None}, "got None"),
        ({"max_gen_toks": 4095}, "an answer of 4095 tokens does not fit into 4096 with"),
    ],
)
def test_answers_that_cannot_be_asked_for_are_refused_before_any_is_made(tiny, changes, told):
    good, bad = generations()[:1], generations(**changes)[:1]
    with pytest.raises(ValueError, match=told) as caught:
        dense(tiny).generate_until([*good, *bad])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("size", [0, -1, "0", "many", "auto:x", None])
def test_a_batch_size_that_is_none_is_refused(tiny, size):
    with pytest.raises(ValueError, match="batch_size must be an integer >= 1"):
        lm_of(PolicyLM, tiny, size, policy=Full(page_size=8))


@pytest.mark.parametrize("stops", [[], "", [""], "<eos>", ["<eos>", "zz"]])
def test_stops_that_stop_nothing_are_as_in_hflm(tiny, stops):
    asked = generations(until=stops)
    assert dense(tiny).generate_until(asked) == lm_of(HFLM, tiny).generate_until(asked)


def test_a_prompt_that_is_nothing_but_question_is_refused(tiny):
    lm = window(tiny, question_tokens=500)
    likely = [Instance("loglikelihood", {}, (PROMPTS[0], " so"), 0)]
    for ask in (lambda: lm.generate_until(generations()), lambda: lm.loglikelihood(likely)):
        with pytest.raises(ValueError, match="500 question tokens leave no context"):
            ask()


def test_cutting_in_silence_is_refused(tiny):
    with pytest.raises(ValueError, match="cut prompts in silence"):
        window(tiny, truncation=True)


def test_full_gives_stock_log_likelihoods(tiny):
    requests = [*choices(), Instance("loglikelihood", {}, ("", "some words"), 0)]
    ours, stock = (lm.loglikelihood(requests) for lm in (dense(tiny), lm_of(HFLM, tiny)))
    for (value, greedy), (expected, expected_greedy) in zip(ours, stock, strict=True):
        assert value == pytest.approx(expected, abs=1e-4)
        assert greedy == expected_greedy


def test_the_models_own_continuation_is_greedy(tiny):
    ids = tiny.tokenizer(PROMPTS[0], return_tensors="pt").input_ids
    written = tiny.model.generate(ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :]
    request = (("", ""), ids[0].tolist(), written.tolist())
    ((of_dense, greedy),) = dense(tiny)._loglikelihood_tokens([request])
    ((of_window, still_greedy),) = window(tiny)._loglikelihood_tokens([request])
    assert greedy and not still_greedy and of_window < of_dense


def test_a_policy_changes_answers_and_log_likelihoods(tiny):
    ours, stock = window(tiny), lm_of(HFLM, tiny)
    assert ours.generate_until(generations()) != stock.generate_until(generations())
    pairs = zip(ours.loglikelihood(choices()), stock.loglikelihood(choices()), strict=True)
    assert max(abs(a - b) for (a, _), (b, _) in pairs) > 1e-2


def test_a_context_is_prefilled_once_for_all_its_continuations(tiny, monkeypatch):
    prefilled = []

    def counting(model: Any, ids: torch.Tensor, **options: Any) -> Any:
        prefilled.append(tuple(ids.tolist()))
        return original(model, ids, **options)

    original = adapter.prefill
    monkeypatch.setattr(adapter, "prefill", counting)
    dense(tiny, batch_size=2).loglikelihood(choices())
    assert len(prefilled) == len(set(prefilled)) == len(DOCS)


def test_contexts_shorter_than_a_policys_window_are_answered(tiny):
    texts = ["a", "Hi you?", PROMPTS[0][:25], PROMPTS[1]]
    policy = SnapKV(page_size=4)
    together, alone = (
        lm_of(PolicyLM, tiny, size, policy=policy, budget=16, dense_layers=[0]) for size in (4, 1)
    )
    asked = [Instance("generate_until", {}, (text, GREEDY), 0) for text in texts]
    assert together.generate_until(asked) == alone.generate_until(asked)
    likely = [Instance("loglikelihood", {}, (text, " so be it, more or less"), 0) for text in texts]
    stock = lm_of(HFLM, tiny).loglikelihood(likely)
    pairs = zip(together.loglikelihood(likely), stock, strict=True)
    assert all(0 < abs(ours - theirs) < 20 for (ours, _), (theirs, _) in pairs)


def test_a_policy_that_never_selects_is_an_error(tiny):
    every = list(range(tiny.model.config.num_hidden_layers))
    idle = lm_of(PolicyLM, tiny, policy=Full(page_size=8), dense_layers=every)
    with pytest.raises(RuntimeError, match="never selected"):
        idle.generate_until(generations()[:1])
    with pytest.raises(RuntimeError, match="never selected"):
        idle.loglikelihood(choices()[:2])


def test_rolling_and_the_response_cache_are_refused(tiny, tmp_path):
    with pytest.raises(ValueError, match="rolling"):
        dense(tiny).loglikelihood_rolling([Instance("loglikelihood_rolling", {}, ("text",), 0)])
    with pytest.raises(ValueError, match="knows no policy"):
        CachingLM(dense(tiny), str(tmp_path / "answers.db"))


def test_prompts_that_do_not_fit_are_counted_and_told_or_refused(tiny, caplog):
    caplog.set_level(logging.WARNING, "lm_eval.sparse_eval")
    short = window(tiny, max_length=80)
    short.generate_until(generations())
    assert short.truncated == len(PROMPTS)
    told = [record.getMessage() for record in caplog.records if "cut from" in record.getMessage()]
    assert len(told) == len(PROMPTS) and told[-1].endswith(f"{len(PROMPTS)} so far")
    with pytest.raises(ValueError, match="does not fit"):
        window(tiny, max_length=80, strict=True).generate_until(generations())


def test_continuations_that_cannot_be_scored_are_refused(tiny):
    for continuation in ([], [5] * 81):
        with pytest.raises(ValueError, match="1 to 80 tokens"):
            window(tiny, max_length=80)._loglikelihood_tokens([(("", ""), [1, 4, 5], continuation)])


RUN = ["run", "--tasks", "x"]


def command_line(monkeypatch: Any, run: Any, *words: str) -> int:
    """lm_cli with these words, `run` in place of lm-eval's own."""
    from lm_eval import __main__ as lm_eval_main

    monkeypatch.setattr(lm_cli.sys, "argv", ["lm_cli", *words])
    monkeypatch.setattr(lm_eval_main, "cli_evaluate", run)
    return lm_cli.main()


@pytest.mark.parametrize("own", [None, str(HERE), HERE, [str(HERE)]])
def test_the_bundled_tasks_stand_beside_those_of_ones_own_folder(monkeypatch, own):
    before, found = lm_eval.tasks.TaskManager, []

    def run() -> None:
        made = lm_eval.tasks.TaskManager(include_path=own, include_defaults=False)
        found.extend(made.all_tasks)

    assert command_line(monkeypatch, run, "run", "--tasks", "x") == 0
    assert "se_multikey" in found and ("tiny_say" in found) == (own is not None)
    assert lm_eval.tasks.TaskManager is before


def test_a_folder_that_is_not_there_is_told(monkeypatch, capsys):
    def run() -> None:
        lm_eval.tasks.TaskManager(include_path="no/such/folder", include_defaults=False)

    assert command_line(monkeypatch, run, *RUN) == 1
    assert "--include_path must be a folder, got 'no/such" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("one\ntwo"), "error: one two"),
        (
            ValueError("Tasks not found: list"),
            "error: Tasks not found: list; `ls tasks` lists them",
        ),
        (KeyError("boom"), "error: KeyError in fails: 'boom'; LMEVAL_LOG_LEVEL=DEBUG shows where"),
        (AssertionError("too long"), "error: AssertionError in fails: too long"),
    ],
)
def test_whatever_a_task_or_lm_eval_raises_is_one_line(monkeypatch, capsys, error, line):
    def fails() -> None:
        raise error

    assert command_line(monkeypatch, fails, *RUN) == 1
    told = capsys.readouterr().err
    assert told.startswith(line) and told.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--cache_requests", "true"], 2),
        (["--cache_requests=refresh"], 2),
        (["--cache_requests", "delete"], 0),
        (["--config", "cache_requests: true"], 2),
        (["--config", "cache_requests: {cache_requests: true}"], 2),
        (["-C", "cache_requests: {delete_requests_cache: true}"], 0),
        (["--config", "tasks: [x]"], 0),
        (["--tasks", "x"], 0),
    ],
)
def test_lm_evals_cache_of_prompts_is_refused(monkeypatch, capsys, tmp_path, words, code):
    """It is keyed by a task's name alone: another --metadata max_length would get old prompts."""
    if words[0] in ("--config", "-C"):
        (tmp_path / "config.yaml").write_text(words[1])
        words = [words[0], str(tmp_path / "config.yaml")]
    assert command_line(monkeypatch, lambda: None, "run", *words, "--tasks", "x") == code
    assert ("knows no --metadata" in capsys.readouterr().err) == bool(code)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("pretrained=smollm2,bugdet=128", "unknown key 'bugdet'; did you mean budget? sparse_eval"),
        ("pretrained=smollm2 policy=qest budget=128", "did you mean quest?"),
        ("pretrained=smollm2,budget=16", "budget must be >= 48 tokens"),
        ("pretrained=smollm2", "Quest needs a budget in tokens, got None"),
        ("pretrained=smollm2,policy=ffd,budget=64", "is adaptive and takes no budget"),
        ("pretrained=smolm2,budget=128", "did you mean smollm2?"),
        ('{"pretrained": "smollm2", "bugdet": 128}', "did you mean budget?"),
        ("pretrained=smollm2,budget=64,select_backend=torch", "is a field of the policy"),
        ("pretrained=smollm2,budget=64,dense_layers=first", "0:1"),
        ("pretrained=smollm2,budget=64,policy_config=4", "policy_config must be fields"),
    ],
)
@pytest.mark.parametrize("by_file", [False, True])
def test_bad_model_args_are_told_before_anything_loads(
    monkeypatch, capsys, tmp_path, words, line, by_file
):
    def run() -> None:
        raise AssertionError("lm-eval was started")

    if by_file:
        text = words if words.startswith("{") else f'"{",".join(words.split())}"'
        (tmp_path / "c.yaml").write_text(f"model: sparse_eval\nmodel_args: {text}\n")
        given = ["--config", str(tmp_path / "c.yaml")]
    else:
        parts = [words] if words.startswith("{") else words.split()
        given = ["--model", "sparse_eval", "--model_args", *parts]
    monkeypatch.setattr(models, "model_folder", lambda name: run())
    assert command_line(monkeypatch, run, "run", *given, "--tasks", "x") == 2
    told = capsys.readouterr().err
    assert line in told and told.count("\n") == 1


@pytest.mark.parametrize(
    "words",
    [
        [],
        [*RUN, "--model", "hf", "--model_args", "pretrained=org/x,bugdet=1"],
        [*RUN, "--model", "sparse_eval", "-a", "pretrained=org/x,budget=64,use_kernels=True"],
        [*RUN, "--model", "sparse_eval", "-a", "pretrained=org/x,policy=ffd,parallelize=True"],
    ],
)
def test_what_is_not_ours_is_lm_evals_to_judge(monkeypatch, words):
    assert command_line(monkeypatch, lambda: None, *words) == 0


def test_a_policy_without_its_budget_is_refused_before_weights_load(monkeypatch):
    monkeypatch.setattr(HFLM, "__init__", lambda *_, **__: pytest.fail("weights were loaded"))
    with pytest.raises(ValueError, match="needs a budget"):
        PolicyLM(pretrained="org/x", policy="quest")


def test_policies_by_name_and_by_class():
    quest = make_policy("quest", {"page_size": 32})
    assert (type(quest).__name__, quest.page_size) == ("Quest", 32)
    named = make_policy("sparse_eval.policies.window.Window", {"page_size": 8})
    assert named == Window(page_size=8)
    with pytest.raises(ValueError, match="did you mean quest"):
        make_policy("qest", {})
    with pytest.raises(ValueError, match="colour"):
        make_policy("quest", {"colour": 1})


@pytest.mark.parametrize(("given", "layers"), [("0:1", (0, 1)), (0, (0,)), ("", ()), ([2], (2,))])
def test_dense_layers_of_a_command_line(given, layers):
    assert layers_of(given) == layers


@pytest.mark.parametrize("model", [PolicyLM, HFLM])
def test_arguments_read_from_the_source_are_those_of_the_class(model):
    file = Path(inspect.getfile(model))
    assert model is PolicyLM or file == lm_eval_file("models/huggingface.py")
    taken = inspect.signature(model.__init__).parameters.values()
    named = {x.name for x in taken if x.kind not in (x.VAR_KEYWORD, x.VAR_POSITIONAL)}
    assert arguments_in(file, model.__name__) == named - {"self"}


def test_a_model_that_is_nearly_ours_is_told(monkeypatch, capsys):
    words = [*RUN, "--model", "sparse-eval"]
    assert command_line(monkeypatch, lambda: pytest.fail("started"), *words) == 2
    assert "did you mean sparse_eval?" in capsys.readouterr().err


def test_dense_layers_that_are_no_indices():
    with pytest.raises(ValueError, match="0:1"):
        layers_of("first")
