"""The pieces of task=lm_eval: settings, ids, stops, stacking, scores, the gate."""

from __future__ import annotations

import copy
import math
from typing import Any

import pandas as pd
import pytest
import torch

from sparse_eval import lm_cli, models
from sparse_eval.cli.compose import Composer
from sparse_eval.cli.settings import resolve
from sparse_eval.lm import names
from sparse_eval.lm.config import FloorConfig, lm_config
from sparse_eval.lm.gate import chance_of, is_higher_better, is_possible, judge
from sparse_eval.lm.requests import generation
from sparse_eval.lm.scoring import Metric
from sparse_eval.lm.texts import TextSide, context_end, cut, until_stop
from sparse_eval.prefill import prefill
from sparse_eval.reporting.scores import difference, mark, verdict
from sparse_eval.reporting.summarise_lm_eval import over_tasks, shares_of, worst_columns, worst_of
from tests.tiny import random_ids, tiny_loaded

NAN = float("nan")
COMPOSER = Composer()


def config_of(*words: str) -> Any:
    cfg = COMPOSER.compose(["task=lm_eval", "model=tiny_llama", *words])
    return lm_config(cfg["task"], cfg["protocol"], cfg["seed"])


def test_limits_stay_per_task():
    config = config_of("task.limit={a: 3, b: 0.25}")
    assert [config.num_documents(name, 10) for name in "abc"] == [3, 3, 10]
    assert config_of("task.limit=50").num_documents("a", 10) == 10
    assert config_of("task.limit=null").num_documents("a", 10) == 10


def test_made_tasks_hear_how_many_documents_and_which_format():
    config = config_of("task.limit={a: 3, b: 7}", "task.gate.n=2", "task.chat=template")
    assert config.all_metadata["num_samples"] == 9
    assert config.all_metadata["apply_chat_template"] is True
    given = config_of("task.metadata={num_samples: 3}")
    assert given.all_metadata["num_samples"] == 3


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["task.tasks=[]"], "at least one"),
        (["task.limit=-1"], "task.limit"),
        (["task.limit=2.5"], "task.limit"),
        (["task.limit={a: {b: 2}}"], "task.limit"),
        (["task.chat=yes"], "none, template"),
        (["task.include_path=/no/such/folder"], "must be a folder"),
        (["task.gate.margin=0"], "task.gate.margin"),
        (["task.gate.floors={a: high}"], "task.gate.floors"),
        (["task.gate.floors={a: nan}"], "task.gate.floors"),
        (["task.metadata={max_seq_lengths: [64]}"], ">= 1024"),
        (["task.batch_size=0"], "task.batch_size"),
        (["protocol=question", "protocol.question_tokens=0"], "protocol.question_tokens"),
    ],
)
def test_a_bad_setting_is_one_line_before_a_model_loads(words, told):
    with pytest.raises(ValueError) as caught:
        resolve(COMPOSER, ["task=lm_eval", "model=tiny_llama", "dense_layers=[0]", *words])
    assert told in str(caught.value) and "\n" not in str(caught.value)


def test_an_unknown_task_is_told_with_the_nearest_names(monkeypatch):
    bundled = names.manager((str(names.BUNDLED),), False)
    monkeypatch.setattr(names, "manager", lambda *_: bundled)  # lm-eval's own take seconds to list
    with pytest.raises(ValueError, match="no task 'se_needle_wrod'; did you mean se_needle_word"):
        names.index_for(["se_needle_passcode", "se_needle_wrod"], ())


def test_lm_evals_own_tasks_are_found_without_reading_all_of_them():
    found = names.index_for(["ruler_vt", "se_needle_word", "longbench"], ())
    assert {"ruler_vt", "se_needle_word", "longbench_qasper"} <= set(found.all_tasks)
    assert len(found.all_tasks) < 500


def test_a_suite_belongs_to_its_task():
    with pytest.raises(ValueError, match="suite=ruler_4k needs task=lm_eval"):
        resolve(COMPOSER, ["model=tiny_llama", "suite=ruler_4k"])


@pytest.mark.parametrize("name", COMPOSER.options("suite"))
def test_every_suite_composes(name):
    cfg = COMPOSER.compose(["task=lm_eval", f"suite={name}", "model=smollm2"])
    config = lm_config(cfg["task"], cfg["protocol"], 0)
    assert cfg["suite"]["name"] == name and len(config.tasks) > 5
    if name.startswith("ruler"):
        assert config.metadata["max_seq_lengths"] == [cfg["context"]]
        assert cfg["context"] == {"ruler_4k": 4096, "ruler_32k": 32768}[name]


@pytest.mark.parametrize("text", ["some words", "<bos>some words"])
def test_a_prompt_opens_with_exactly_one_bos(text):
    side = TextSide(tiny_loaded("tiny_llama").tokenizer)
    assert side.ids(text) == [1, *side.tokenizer("some words", add_special_tokens=False).input_ids]


def test_a_doubled_bos_is_an_error():
    with pytest.raises(ValueError, match="exactly one BOS"):
        TextSide(tiny_loaded("tiny_llama").tokenizer).ids("<bos><bos>some words")


def test_spaces_before_a_continuation_belong_to_it():
    side = TextSide(tiny_loaded("tiny_llama").tokenizer)
    context, continuation = side.pair("one ", "two")
    assert side.text(context) == "one" and side.text(continuation) == " two"
    assert side.pair("", "two")[0] == [1]


def test_a_tokenizer_without_bos_and_eos_is_no_obstacle():
    side = TextSide(copy.deepcopy(tiny_loaded("tiny_qwen2").tokenizer))
    plain = side.ids("some words")
    side.tokenizer.bos_token = side.tokenizer.eos_token = None
    assert side.ids("some words") == plain and side.pair("some", " words")[1]
    assert generation({"until": ["q"], "max_gen_toks": 3}, config_of(), side) == (("q",), 3)
    with pytest.raises(ValueError, match="needs a tokenizer with a BOS or an EOS"):
        side.pair("", "words")


def test_spaces_alone_before_a_continuation_are_its_own():
    side = TextSide(tiny_loaded("tiny_llama").tokenizer)
    assert side.pair("  ", "two") == ([1], side.ids("  two")[1:])
    with pytest.raises(ValueError, match="must have a token"):
        TextSide(tiny_loaded("tiny_qwen2").tokenizer).pair("  ", "two")


@pytest.mark.parametrize(
    ("kwargs", "told"),
    [
        ({"until": {"a": 1}}, "until must be"),
        ({"until": [3]}, "until must be"),
        ({"max_gen_toks": 0}, ">= 1, got 0"),
        ({"max_new_tokens": -1}, "max_new_tokens must be an integer >= 1"),
        ({"num_beams": 4}, "num_beams"),
    ],
)
def test_generation_that_cannot_be_is_one_line(kwargs, told):
    side = TextSide(tiny_loaded("tiny_llama").tokenizer)
    with pytest.raises(ValueError, match=told):
        generation(kwargs, config_of(), side)
    assert generation({"num_beams": 1, "max_gen_toks": 5}, config_of(), side) == (("<eos>",), 5)


def test_cutting_keeps_the_bos_and_the_end():
    assert cut([1, 5, 6, 7, 8], 3, [1]) == [1, 7, 8]
    assert cut([5, 6, 7, 8], 3, []) == [6, 7, 8]
    assert cut([1, 5], 3, [1]) == [1, 5]


def test_the_question_starts_where_the_context_ends():
    doc = {"context": "The sky is blue.", "question": "Which colour?"}
    prompt = "Read. The sky is blue. Now: Which colour? Answer:"
    assert prompt[context_end(prompt, doc) :].startswith(" Now:")
    assert context_end("Which colour? The sky is blue.", doc) is None
    assert context_end(prompt, {"context": "The sky is blue."}) is None


def test_text_ends_at_the_first_of_each_stop():
    assert until_stop("one\ntwo. three", ("\n", ".")) == "one"
    assert until_stop("one", ("", "x")) == "one"


def test_stacked_rows_decode_as_they_do_alone():
    from sparse_eval.lm.stack import Decoder, stack

    model = tiny_loaded("tiny_llama").model
    prompts = [random_ids(n, seed=n)[0] for n in (70, 91, 80)]
    filled = [prefill(model, ids) for ids in prompts]
    together = Decoder.of(model, stack(filled, model), 1)
    alone = [Decoder.of(model, stack([one], model), 8) for one in filled]
    for step in range(3):
        fed = [ids[-1:] if step == 0 else torch.tensor([7 + step]) for ids in prompts]
        logits = together.feed(torch.stack(fed))
        for row, (decoder, ids) in enumerate(zip(alone, fed, strict=True)):
            torch.testing.assert_close(logits[row], decoder.feed(ids[None])[0], atol=2e-5, rtol=0)


def test_decoding_leaves_the_stack_as_it_was():
    from sparse_eval.lm.stack import Decoder, stack

    model = tiny_loaded("tiny_llama").model
    whole = stack([prefill(model, random_ids(n)[0]) for n in (70, 80)], model)
    before = [layer.keys.clone() for layer in whole.cache.layers]
    logits = [Decoder.of(model, whole, 2).feed(torch.tensor([[5], [6]])) for _ in range(2)]
    assert torch.equal(*logits)
    for layer, keys in zip(whole.cache.layers, before, strict=True):
        assert torch.equal(layer.keys, keys)


def test_one_prompt_for_several_rows_is_stored_once():
    from sparse_eval.lm.stack import stack

    model = tiny_loaded("tiny_llama").model
    filled = prefill(model, random_ids(70)[0])
    whole = stack([filled] * 5, model)
    assert whole.cache.layers[0].keys.shape[0] == 5
    assert whole.cache.layers[0].keys.data_ptr() == filled.cache.layers[0].keys.data_ptr()


def test_rulers_lengths_that_a_document_has_not_are_no_scores():
    from sparse_eval.lm.scoring import metrics_of

    class Task:
        def get_config(self, key: str) -> Any:
            return [{"metric": "4096"}, {"metric": "8192"}]

    logged = [
        {"doc_id": 0, "filter": "none", "4096": -1.0, "8192": 1.0},
        {"doc_id": 1, "filter": "none", "4096": -1.0, "8192": 0.5},
    ]
    found = {"4096,none": -1, "8192,none": 0.75, "8192_stderr,none": "N/A", "alias": "x"}
    (metric,) = metrics_of(Task(), found, logged, {"8192": True})
    assert (metric.name, metric.value, metric.values) == ("8192", 0.75, {0: 1.0, 1: 0.5})
    assert metric.is_primary and math.isnan(metric.stderr)


def test_a_score_that_is_no_mean_of_its_documents_is_not_compared_by_them():
    """lm-eval keeps a log-likelihood a document where the task's score is their perplexity."""
    from sparse_eval.lm.scoring import metrics_of

    class Task:
        def get_config(self, key: str) -> Any:
            return [{"metric": "perplexity"}, {"metric": "acc"}]

    logged = [
        {"doc_id": i, "filter": "none", "perplexity": -float(i + 1), "acc": 1.0} for i in range(20)
    ]
    found = {"perplexity,none": math.exp(10.5), "acc,none": 1.0}
    better = {"perplexity": False, "acc": True}
    perplexity, acc = metrics_of(Task(), found, logged, better)
    assert not perplexity.measured and len(acc.measured) == 20
    nothing = difference(list(perplexity.values.values()), list(acc.values.values()))
    told = verdict(nothing, nothing.p, gated=False, higher_is_better=False)
    assert told == "not ranked: its score is no mean over documents"
    for floor, gated in ((20.0, True), (50_000.0, False)):
        config = gate_config("lambada", floor)
        gate = judge("lambada", NAN, perplexity, "own", config, higher_is_better=False)
        assert (gate.gated, gate.n, gate.value) == (gated, 20, perplexity.value)
        assert (gate.floor, gate.lower) == (floor, perplexity.value)


def gate_config(task: str, floor: float | None, n: int = 10) -> FloorConfig:
    return FloorConfig(0.1, {} if floor is None else {task: floor}, n, 0.95)


def shares(wrong: int, of: int, *, higher_is_better: bool) -> Metric:
    values = {i: float(i < wrong) for i in range(of)}
    return Metric("error", wrong / of, NAN, values, higher_is_better, True)


@pytest.mark.parametrize(
    ("wrong", "floor", "chance", "gated"),
    [
        (0, 0.3, NAN, False),
        (5, 0.3, NAN, True),
        (20, 0.3, NAN, True),  # always wrong: a floor from below would let it pass
        (0, None, 0.5, False),  # at most chance less the margin
        (10, None, 0.5, True),
        (0, None, NAN, True),  # nothing says what guessing scores
    ],
)
def test_a_score_that_is_better_when_lower_must_stay_below_its_floor(wrong, floor, chance, gated):
    config = gate_config("task", floor)
    metric = shares(wrong, 20, higher_is_better=False)
    gate = judge("task", chance, metric, "own", config, higher_is_better=False)
    assert gate.gated == gated and gate.lower >= gate.value
    told = gate.line
    assert ("upper bound" in told and "at most" in told) or "task.gate.floors" in told
    mirrored = judge("task", 0.0, shares(20 - wrong, 20, higher_is_better=True), "own", config)
    assert gate.lower == pytest.approx(1 - mirrored.lower)


@pytest.mark.parametrize(("chance", "possible"), [(0.5, True), (0.3, False), (NAN, False)])
def test_an_error_rate_no_record_could_make_good_asks_no_gate_documents(chance, possible):
    """Ten of ten right bound an error rate by 0.21."""
    config = gate_config("task", None)
    assert is_possible("task", chance, config, higher_is_better=False) == possible
    assert is_possible("task", 1 - chance, config, higher_is_better=True) == possible


def test_scores_of_no_known_range_say_how_to_give_them_a_floor():
    rouge = Metric("rouge", 31.0, NAN, dict.fromkeys(range(4), 31.0), True, True)
    gate = judge("task", 0.0, rouge, "own", gate_config("task", None))
    assert gate.gated and "task.gate.floors" in gate.line
    assert not judge("task", 0.0, rouge, "own", gate_config("task", 30.0)).gated


def test_the_first_metric_says_which_way_a_task_is_better():
    class Task:
        def __init__(self, *listed: tuple[str, bool]) -> None:
            self.listed = dict(listed)

        def get_config(self, key: str) -> Any:
            return [{"metric": name} for name in self.listed] if key == "metric_list" else None

        def higher_is_better(self) -> dict[str, bool]:
            return dict(reversed(self.listed.items()))

    assert is_higher_better(Task(("acc", True), ("loss", False)))
    assert not is_higher_better(Task(("loss", False), ("acc", True)))
    assert math.isnan(chance_of(Task(("loss", False)), []))


def test_choices_asked_without_the_prompt_are_no_further_choices():
    from sparse_eval.lm.requests import Ask, Sample
    from sparse_eval.lm.results import said

    class Task:
        OUTPUT_TYPE = "multiple_choice"

        def get_config(self, key: str) -> Any:
            metrics = [{"metric": "acc"}, {"metric": "acc_mutual_info"}]
            return metrics if key == "metric_list" else None

        def higher_is_better(self) -> dict[str, bool]:
            return {"acc": True, "acc_mutual_info": True}

    asks = tuple(Ask((1, 2), 1, 0, "", continuation=(3,)) for _ in range(2 * 4))
    assert chance_of(Task(), [Sample(0, asks, "0")]) == pytest.approx(1 / 4)
    given = [[-3.0, False], [-2.0, False], [-9.0, False], [-4.0, False]]
    assert said(Task(), [*given, *([-1.0, False] for _ in given)]) == "1"


def test_successes_are_compared_by_mcnemar_and_other_scores_by_sign_flips():
    found = difference([1.0] * 8 + [0.0] * 2, [0.0] * 6 + [1.0] * 2 + [0.0] * 2)
    assert found.mean == pytest.approx(-0.6) and found.p == pytest.approx(2 / 2**6)
    assert found.low < -0.6 < found.high < 0 and found.resolvable == pytest.approx(0.6)
    scores = difference([0.5, 0.7, 0.9], [0.4, 0.6, 0.8])
    assert scores.mean == pytest.approx(-0.1) and scores.p == 0.25 and math.isnan(scores.resolvable)
    assert difference([NAN, 1.0], [0.0, 1.0]).n == 1
    alike = difference([0.5] * 10, [0.5] * 10)
    assert (alike.low, alike.high) == (-0.3, 0.3)
    two = difference([0.9, 0.2], [0.1, 0.1])
    assert (two.low, two.high) == (-1, 1) and -1 <= two.low_90 <= two.mean <= two.high_90 <= 1
    assert difference([9.0, 2.0], [1.0, 1.0]).low < -1  # no shares: no such bound


def test_verdicts():
    worse = difference([1.0] * 20, [0.0] * 10 + [1.0] * 10)
    same = difference([1.0] * 40, [1.0] * 40)
    few = difference([1.0] * 3, [0.0] * 3)
    higher = {"gated": False, "higher_is_better": True}
    assert verdict(worse, worse.p, **higher) == "below dense"
    told = verdict(worse, worse.p, gated=False, higher_is_better=False)
    assert told == "BELOW dense: suspect the set-up"  # of an error rate: better
    assert verdict(worse, 0.2, **higher) == "no difference resolved"
    assert verdict(same, 1.0, **higher) == "not inferior (0.1)"
    assert verdict(few, few.p, **higher) == "not ranked: n = 3"
    gated = {"gated": True, "higher_is_better": True}
    assert verdict(worse, NAN, **gated) == "not ranked: dense gate"
    assert verdict(worse, NAN, **gated, gate_ran=False) == "not ranked: dense gate not run"


@pytest.mark.parametrize("count", [1, 2])
def test_the_mean_of_one_task_has_the_tasks_interval_and_no_mean_leaves_its_range(count):
    names = [f"task {i}" for i in range(count)]
    own = pd.DataFrame({"lm_task": names, "n": 2, "value": 0.0, "stderr": 0.1, "difference": -0.5})
    own = own.assign(is_dense=False, difference_low=-0.87, difference_high=0.41)
    samples = pd.DataFrame({"lm_task": names * 2, "difference": [-1.0] * count + [0.0] * count})
    found = over_tasks(own, samples)
    ends = (found["low"], found["high"])
    assert ends == (-0.87, 0.41) if count == 1 else ends == (-1, pytest.approx(0.193, abs=1e-3))


def test_a_verdict_turns_with_the_direction_of_its_score():
    """An error rate differs as an accuracy does, its sign turned: the same is said of both, in the
    words of its own direction."""
    turned_words = {
        "below dense": "above dense, worse",
        "ABOVE dense: suspect the set-up": "BELOW dense: suspect the set-up",
    }
    for right, kept in ((10, 0), (10, 4), (10, 9), (10, 10), (0, 10)):
        dense = [1.0] * right + [0.0] * (40 - right) + [1.0] * 40
        sparse = [1.0] * kept + [0.0] * (40 - kept) + [1.0] * 40
        found = difference(dense, sparse)
        turned = difference([1 - x for x in dense], [1 - x for x in sparse])
        assert turned.high_90 == pytest.approx(-found.low_90)
        for p in (found.p, 0.5):
            told = verdict(found, p, gated=False, higher_is_better=True)
            other = verdict(turned, p, gated=False, higher_is_better=False)
            assert other == turned_words.get(told, told) and mark(other) == mark(told)


def test_the_worst_task_and_those_that_lose_may_be_better_when_lower():
    columns = ["lm_task", "value", "dense_value", "difference", "difference_low", "difference_high"]
    columns += ["higher_is_better", "verdict"]
    passed = pd.DataFrame(
        [
            ("acc", 0.6, 0.7, -0.1, -0.2, 0.0, True, "no difference resolved"),
            ("errors", 0.5, 0.1, 0.4, 0.2, 0.5, False, "above dense, worse"),
            ("words", 1e6, 20.0, 1e6, NAN, NAN, False, "below dense"),
        ],
        columns=columns,
    )
    found = worst_columns(passed)
    assert found["worse"] == 2 and found["worst_task"] == "errors"
    assert (found["worst"], found["worst_low"], found["worst_high"]) == (-0.4, -0.5, -0.2)
    assert worst_columns(passed[:1])["worst_task"] == "acc"
    assert worst_columns(passed[2:]) == {"worse": 1}


def test_only_scores_that_are_shares_enter_the_mean_over_tasks():
    table = pd.DataFrame(
        [("a", 0.5, True), ("a", 1.0, True), ("words", 4e11, False), ("rouge", 31.0, True)],
        columns=["lm_task", "value", "higher_is_better"],
    )
    assert shares_of(table) == ["a"]


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("pretrained=smollm2,policy=quest", "pretrained=/here,policy=quest"),
        ("policy=quest,pretrained=smollm2", "policy=quest,pretrained=/here"),
        ('{"pretrained": "smollm2", "budget": 64}', '{"pretrained": "/here", "budget": 64}'),
        ("pretrained=org/smollm2", "pretrained=org/smollm2"),
        ("pretrained=gpt2,policy=quest", "pretrained=gpt2,policy=quest"),
        ("smollm2", "smollm2"),
    ],
)
def test_lm_evals_command_line_takes_names_of_shipped_models(monkeypatch, word, told):
    monkeypatch.setattr(models, "model_folder", {"smollm2": "/here"}.__getitem__)
    assert lm_cli.with_folders(word) == told


def test_an_unknown_models_name_lists_what_there_is():
    with pytest.raises(ValueError, match="smollm2.*got 'smollm3'"):
        models.model_folder("smollm3")
    assert models.model_folder("org/name") == "org/name"


@pytest.mark.parametrize("flags", [[True, True, False], [1.0, 1.0, 0.0]])
def test_the_worst_task_is_the_one_that_loses_most(flags):
    own = pd.DataFrame(
        {"lm_task": ["a", "b", "loss"], "difference": [-0.1, -0.3, 0.2], "higher_is_better": flags}
    )
    assert worst_of(own)["lm_task"] == "b"
    assert worst_of(own.assign(difference=[-0.1, -0.3, 0.4]))["lm_task"] == "loss"
