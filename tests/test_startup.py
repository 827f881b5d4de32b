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
