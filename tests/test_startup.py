"""What each command imports: a bad value or a plan waits for no library that it does not need."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

LIBRARIES = {"torch", "transformers", "pandas", "matplotlib", "plotly", "wandb", "hydra", "triton"}
TINY = ["model=tiny_llama", "context=200", "budget=64"]


def libraries_of(code: str, *words: str) -> set[str]:
    """Of LIBRARIES, those that a fresh process has loaded when `code` has run."""
    end = "\nimport json; print('\\n' + json.dumps([m for m in sys.modules if '.' not in m]))"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys\n{code}{end}", *words],
        capture_output=True,
        text=True,
        check=True,
    )
    return LIBRARIES & set(json.loads(done.stdout.splitlines()[-1]))


MAIN = """
from sparse_eval.__main__ import main
try:
    main()
except SystemExit as end:
    assert end.code in (0, None, 2), end.code
"""


def test_help_loads_nothing():
    assert not libraries_of(MAIN, "--help")


@pytest.mark.parametrize("word", ["budget=abc", "budgt=64", "dense_layers=[-1]", "tracking.mode=x"])
def test_a_bad_value_is_told_before_torch_is_loaded(word):
    extra = ["tracking=wandb"] if word.startswith("tracking") else []
    assert libraries_of(MAIN, *TINY, *extra, word) == {"hydra"}


def test_a_plan_draws_nothing_and_runs_no_model():
    loaded = libraries_of(MAIN, *TINY, "plan=true", "prompts.n=1", "task.prompt_queries=8")
    assert not loaded & {"pandas", "matplotlib", "plotly", "wandb"}


def test_a_report_needs_no_model():
    assert not libraries_of("import sparse_eval.report") & {"torch", "transformers", "hydra"}


LM_CLI = """
from sparse_eval.lm_cli import main
sys.argv = ["lm_cli", *sys.argv[1:]]
try:
    code = main()
except SystemExit as end:
    code = end.code
assert code == (0 if "--help" in sys.argv else 2), code
assert not {"lm_eval.tasks", "lm_eval.models.huggingface"} & set(sys.modules)
"""
GOOD = "pretrained=smollm2,budget=1024"


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["--model", "sparse_eval", "--modelargs", "x", "--tasks", "x"],
        ["--model", "sparse_evl", "--model_args", GOOD, "--tasks", "x"],
        ["--model", "sparse_eval", "--model_args", GOOD],
        ["--model", "sparse_eval", "--model_args", f"{GOOD},polcy=quest", "--tasks", "x"],
        ["--model", "sparse_eval", "--model_args", f"{GOOD},policy=qest", "--tasks", "x"],
        ["--model", "sparse_eval", "--model_args", f"{GOOD},budget=half", "--tasks", "x"],
        ["--model", "sparse_eval", "--model_args", f"{GOOD},dense_layers=x", "--tasks", "x"],
        ["--model", "sparse_eval", "--model_args", f"{GOOD},batch_size=x", "--tasks", "x"],
        ["--model", "sparse_eval", "--model_args", "pretrained=smolm2,budget=64", "--tasks", "x"],
        ["--model", "sparse_eval", "--model_args", GOOD, "--tasks", "x", "--include_path", "no/x"],
        ["--model", "sparse_eval", "--model_args", GOOD, "--tasks", "x", "--cache_requests=true"],
    ],
)
def test_lm_evals_command_line_refuses_words_before_anything_large_is_loaded(words):
    assert not libraries_of(LM_CLI, "run", *words) & {"torch", "transformers", "triton"}
