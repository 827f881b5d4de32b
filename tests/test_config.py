"""Every yaml composes; every bad input is one line, before a model loads."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import sparse_eval
from sparse_eval.__main__ import check
from sparse_eval.budgets import parse_budget, resolve_budget
from sparse_eval.cli.compose import Composer
from sparse_eval.cli.settings import resolve

CONF = Path(sparse_eval.__file__).parent / "conf"
TINY = ["model=tiny_llama", "context=200", "budget=64"]

BAD = {
    "budget=abc": "budget must be tokens (an integer >= 1) or a fraction in (0, 1), got 'abc'",
    "budget=0": "budget must be tokens (an integer >= 1) or a fraction in (0, 1), got 0",
    "budget=-5": "got -5",
    "budget=1.5": "got 1.5",
    "budget=true": "got True",
    "budget=[]": "got []",
    "budget=32": "budget must be >= 48 tokens",
    "budget=[64,16]": "budget must be >= 48 tokens",
    "budget=0.01": "budget must be >= 48 tokens",
    "policy=quset": "did you mean quest?",
    "model=qwen": "model=hub model.id=ORG/NAME",
    "prompts=bible": "prompts must be one of",
    "task=latnecy": "task must be one of",
    "budgt=5": "unknown key 'budgt'; did you mean budget?",
    "policy.sink=3": "unknown key 'policy.sink'",
    "+policy.foo=1": "adds a key",
    "++foo=1": "adds a key",
    "~policy": "cannot be deleted",
    "policy.group=mean": "group must be one of max, sum, softmax_sum, per_head, got 'mean'",
    "policy=quest,window": "python -m sparse_eval -m",
    "budget=64,128": "python -m sparse_eval -m",
    "task=null": "task must be one of",
    "tracking=null": "tracking must be one of",
    "task.name=x": "task.name must be one of",
    "name=../x": "name must be a folder's name under outputs/",
    "name=größe": "letters beyond ASCII need quotes: \"name='größe'\"",
    "model_cache=5": "model_cache must be a non-empty text, got 5",
    "policy._target_=5": "must be an import path such as mypkg.MyPolicy, got 5",
    "compare=quest": "compare must be a list",
    "compare=[nothing]": "compare must be names among",
    "compare=window": "such as 'compare=[window,random]', got 'window'",
    "compare=window,random": "compare takes a list: 'compare=[window,random]'",
    "dense_layers=0,1": "dense_layers takes a list: 'dense_layers=[0,1]'",
    'compare=["quest:gruop=sum"]': "compare, quest:gruop=sum: unknown key 'policy.gruop'; did you",
    "policy.gruop=sum": "unknown key 'policy.gruop'; did you mean group? accepted: page_size, ",
    "task.stpes=3": "unknown key 'task.stpes'; did you mean steps? accepted: name, steps, ",
    "budget=1.0": "got 1.0: all tokens are policy=full",
    "budget=0.2": "got 0.2 of 200 tokens = 40; use context >= 240",
    'compare=["quest:group=mean"]': "group must be one of",
    "compare=[quest:group=sum]": "needs quotes",
    "page_size=0": "page_size must be an integer >= 1, got 0",
    "page_size=16.5": "page_size must be an integer >= 1, got 16.5",
    "sink_pages=-1": "sink_pages must be an integer >= 0, got -1",
    "local_pages=0": "local_pages must be an integer >= 1, got 0",
    "context=0": "context must be an integer >= 2, got 0",
    "context=99999999": "context must be <=",
    "context=long": "context must be an integer >= 2, got 'long'",
    "dense_layers=3": "dense_layers must be a list",
    "dense_layers=[-1]": "dense_layers must be a list of layer indices >= 0",
    "dense_layers=[99]": "dense_layers must be below the model's",
    "backend=cuda": "backend must be auto, triton, torch, got 'cuda'",
    "backend=triton": "TRITON_INTERPRET=1",
    "device=tpu": "device must be auto, cpu, cuda or cuda:N, got 'tpu'",
    "device=cuda": "needs a CUDA GPU",
    "dtype=fp4": "dtype must be auto, float32, bfloat16, float16, got 'fp4'",
    "seed=-1": "seed must be an integer >= 0, got -1",
    "seed=x": "seed must be an integer >= 0, got 'x'",
    "prompts.n=0": "prompts.n must be an integer >= 1, got 0",
    "queries=sampled": "queries must be one of greedy, text, got 'sampled'",
    "protocol=question": "protocol must be decode",
    "plan=maybe": "plan must be true or false, got 'maybe'",
    "name=": "name must be a non-empty text",
    "task.steps=0": "task.steps must be an integer >= 1, got 0",
    "nonsense": "cannot read 'nonsense', expected key=value",
}


@pytest.fixture(autouse=True)
def no_gpu_no_interpreter(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


@pytest.mark.parametrize("word", BAD)
def test_bad_input_is_one_line_that_names_what_was_given(word):
    key = word.split("=")[0]
    words = [w for w in TINY if w.split("=")[0] != key] + [word]
    with pytest.raises(ValueError) as caught:
        check(words)
    line = str(caught.value)
    assert BAD[word] in line and "\n" not in line


def test_a_bad_run_exits_with_2_within_seconds():
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "sparse_eval", "model=tiny_llama", "budget=abc"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.strip().splitlines() == [
        "error: budget must be tokens (an integer >= 1) or a fraction in (0, 1), got 'abc'"
    ]
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # processor time: what a quiet machine's clock would say
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 10


def test_every_option_of_every_group_composes():
    composer = Composer()
    for group in ("policy", "prompts", "task", "tracking", "protocol"):
        for option in composer.options(group):
            if option != "external":
                extra = {"file": ["prompts.path=x"], "dataset": ["prompts.path=x"]}.get(option, [])
                cfg = composer.compose([*TINY, f"{group}={option}", *extra])
                assert cfg[group]
    for path in (CONF / "model").glob("*.yaml"):
        assert yaml.safe_load(path.read_text())["source"]


def test_every_policy_yaml_resolves_to_its_class():
    composer = Composer()
    for option in composer.options("policy"):
        if option != "external":
            settings = resolve(composer, [*TINY, f"policy={option}"])
            assert settings.policies[0].label == option


def test_labels_carry_the_fields_that_were_changed():
    words = ["policy.group=sum", 'compare=["quest:group=per_head",window,quest]', "page_size=8"]
    labels = [n.label for n in resolve(Composer(), [*TINY, *words]).policies]
    assert labels == ["quest:group=sum", "quest:group=per_head", "window", "quest"]
    policies = [n.policy for n in resolve(Composer(), [*TINY, *words]).policies]
    assert {p.page_size for p in policies} == {8}


def test_equal_policies_are_measured_once():
    settings = resolve(Composer(), [*TINY, "policy=window"])
    assert [n.label for n in settings.policies] == ["window", "oracle", "random"]


def test_a_policy_from_a_folder_of_ones_own(tmp_path):
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy" / "mine.yaml").write_text(
        "_target_: sparse_eval.policies.window.Window\npage_size: ${page_size}\n"
        "sink_pages: 2\nlocal_pages: ${local_pages}\n"
    )
    settings = resolve(Composer((str(tmp_path),)), [*TINY, "policy=mine"])
    assert settings.policies[0].label == "mine" and settings.policies[0].policy.sink_pages == 2


BROKEN_YAMLS = {
    "page_size: 16\n": "policy mine: its yaml must name _target_, .* got page_size",
    "- a\n": "policy mine: its yaml must be a mapping",
    "": "policy mine: its yaml must name _target_, .* got no fields",
    "_target_: [x\n}": "broken yaml: .*mine.yaml",
    "_target_: größe\n": "a yaml must be UTF-8",
}


@pytest.mark.parametrize("text", BROKEN_YAMLS)
def test_a_broken_yaml_of_ones_own_is_one_line(tmp_path, text):
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy" / "mine.yaml").write_bytes(text.encode("latin1"))
    with pytest.raises(ValueError, match=BROKEN_YAMLS[text]) as caught:
        resolve(Composer((str(tmp_path),)), [*TINY, "policy=mine"])
    assert "\n" not in str(caught.value)


def test_what_a_yaml_of_ones_own_leaves_out_is_the_runs(tmp_path):
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy" / "mine.yaml").write_text("_target_: sparse_eval.policies.quest.Quest\n")
    words = [*TINY, "policy=mine", "page_size=8", "sink_pages=2", "local_pages=3"]
    policies = [n.policy for n in resolve(Composer((str(tmp_path),)), words).policies]
    assert {(p.page_size, p.sink_pages, p.local_pages) for p in policies} == {(8, 2, 3)}


def test_every_tiny_model_runs_with_the_defaults():
    for name in ("tiny_llama", "tiny_qwen2", "tiny_gemma3"):
        assert resolve(Composer(), [f"model={name}"]).budgets == (64,)


def test_an_external_policy_by_its_import_path():
    words = ["policy=external", "policy.target=sparse_eval.policies.quest.Quest"]
    named = resolve(Composer(), [*TINY, *words, "policy.config={group: sum}"]).policies[0]
    assert named.label == "Quest:group=sum" and named.policy.config()["group"] == "sum"
    with pytest.raises(ValueError, match="policy.target must be given"):
        resolve(Composer(), [*TINY, "policy=external"])
    with pytest.raises(ValueError, match="cannot import nowhere.Policy"):
        resolve(Composer(), [*TINY, "policy=external", "policy.target=nowhere.Policy"])
    with pytest.raises(ValueError, match="policy.config must be a mapping .* got 5"):
        resolve(Composer(), [*TINY, *words, "policy.config=5"])


def test_budgets_are_resolved_once_and_in_tokens():
    settings = resolve(Composer(), ["model=tiny_llama", "context=200", "budget=[0.5,100,64]"])
    assert settings.budgets == (100, 64)


@pytest.mark.parametrize(
    ("value", "tokens"), [(0.125, 512), (0.9999, 4096), (1, 1), (2048.0, 2048), (0.5, 2048)]
)
def test_budget_in_tokens(value, tokens):
    assert resolve_budget(value, 4096) == tokens


@pytest.mark.parametrize("value", ["512", None, 0, -1, 1.5, float("nan"), float("inf"), True, [5]])
def test_budget_that_is_none(value):
    with pytest.raises(ValueError, match="budget must be tokens"):
        parse_budget(value)


def test_glob_names_the_policies_that_match():
    checked = check(["-m", *TINY, "policy=glob(wi*)", "compare=[]"])
    assert checked and checked.jobs == [[*TINY, "policy=window", "compare=[]"]]
    with pytest.raises(ValueError, match="names nothing"):
        check(["-m", *TINY, "policy=glob(nothing*)"])


def test_a_sweep_validates_every_job():
    with pytest.raises(ValueError, match=">= 48"):
        check(["-m", *TINY[:2], "budget=64,16"])
    checked = check(["-m", *TINY[:2], "policy=quest,window", "budget=64,128"])
    assert checked and checked.jobs and len(checked.jobs) == 1
