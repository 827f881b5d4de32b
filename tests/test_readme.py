"""What the README shows works: its policy keeps the contract."""

from __future__ import annotations

import re
from pathlib import Path

from sparse_eval.check import check_policy

README = (Path(__file__).parent.parent / "README.md").read_text()


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
    root = Path(__file__).parent.parent
    missing = [link for link in links if "://" not in link and not (root / link).exists()]
    assert links and not missing
