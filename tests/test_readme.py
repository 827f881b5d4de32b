"""What the README shows works: its policy keeps the contract."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from sparse_eval import models
from sparse_eval.check import check_policy
from sparse_eval.storage.columns import SCHEMA
from tests.tiny import tiny_loaded

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_the_readmes_policy_keeps_every_promise(tmp_path, monkeypatch):
    found = re.search(r"```python\n(# policies/both_ends\.py\n.*?)```", README, re.S)
    assert found
    (tmp_path / "both_ends.py").write_text(found[1])
    monkeypatch.syspath_prepend(tmp_path)
    from both_ends import BothEnds

    broken = [result for result in check_policy(BothEnds) if result.outcome == "failed"]
    assert not broken


def test_the_readme_links_to_files_that_exist():
    links = re.findall(r"\]\(([^)#]+)\)", README)
    missing = [link for link in links if "://" not in link and not (ROOT / link).exists()]
    assert links and not missing


UNQUOTED = re.compile(r"(?<![\w'\"./{\[])[\w.]+=[\[{][^\s]*(?!['\"])")


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_overrides_with_brackets_are_quoted_on_command_lines(path):
    """zsh reads a bare one as a pattern and refuses the command."""
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.S)
    commands = [line for line in text.splitlines() if line.startswith("    ")]
    assert not [found[0] for line in commands for found in UNQUOTED.finditer(line)]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_extras_are_installed_from_the_repository_in_quotes(path):
    """The package is on no index."""
    found = re.findall(r"pip install .*?sparse-eval\b|pip install -e \.\[", path.read_text())
    assert not found


def test_the_readmes_python_runs_as_written(tmp_path, monkeypatch, capture, capsys):
    """With a tiny model in the place of the fetched one."""
    (snippet,) = re.findall(r"From Python:\n\n```python\n(.*?)```", README, re.S)
    model = tmp_path / "model"
    tiny = tiny_loaded("tiny_llama")
    tiny.model.save_pretrained(model)
    tiny.tokenizer.save_pretrained(model)
    monkeypatch.setattr(models, "model_folder", {"smollm2": str(model)}.__getitem__)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "README.md").write_text(README[:700])
    captures = tmp_path / "outputs" / "cache" / "captures"
    captures.mkdir(parents=True)
    capture.save(captures / "0.safetensors")
    row = f'{{"schema": {SCHEMA}, "task": "recall", "policy": "window"}}\n'
    (tmp_path / "outputs" / "recall").mkdir()
    (tmp_path / "outputs" / "recall" / "rows.jsonl").write_text(row)
    found: dict[str, Any] = {}
    exec(snippet, found)
    assert set(found["table"]["policy"]) == {"quest", "window"}
    assert 0 < found["trace"].density < 1 and 0 < found["trace"].read_fraction < 1
    assert len(found["rows"]) == 1
    assert str(found["trace"].tokens_read) in capsys.readouterr().out
