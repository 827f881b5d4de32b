"""Every shipped policy keeps the contract, and every promise of it can be broken."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from sparse_eval.check import build, check_policy, check_types, main, name_of
from sparse_eval.contract.behaviour import BEHAVIOUR_CHECKS
from sparse_eval.contract.selections import SELECTION_CHECKS
from tests import broken_policies
from tests.broken_policies import HeavyHitters, NearTheBest, broken

CONF = Path(__file__).parent.parent / "conf" / "policy"
SHARED: dict[str, Any] = {"page_size": 16, "sink_pages": 1, "local_pages": 2, "seed": 0}
YAMLS = sorted(p.stem for p in CONF.glob("*.yaml") if p.stem != "external")
VARIANTS = [
    ("quest", {"group": "sum"}),
    ("quest", {"group": "softmax_sum"}),
    ("quest", {"group": "per_head"}),
    ("quest", {"metadata_dtype": "float32"}),
    ("quest", {"metadata_dtype": "int8"}),
    ("oracle", {"per_head": True}),
    ("snapkv", {"pooling": "max", "kernel_size": 3, "window": 8}),
    ("window", {"page_size": 1, "sink_pages": 4, "local_pages": 1}),
    ("ffd", {"attend": "residual", "bits": 4}),
    ("ffd", {"scales": "token", "pseudo_max": "exact", "max_tokens": 20}),
    ("quest_topdelta", {"peak": "forced", "max_tokens": 20, "score": "mean"}),
]


def from_yaml(name: str, fixed: dict, **fields):
    """Without Hydra, which is not on every GPU machine: "${page_size}" is SHARED["page_size"]."""
    config = yaml.safe_load((CONF / f"{name}.yaml").read_text())
    own = {key: SHARED[v[2:-1]] if str(v).startswith("${") else v for key, v in config.items()}
    return build(own.pop("_target_"), fixed, **own | fields)


def faults(results) -> list[str]:
    assert len(results) == 1 + len(SELECTION_CHECKS) + len(BEHAVIOUR_CHECKS)
    return [str(r) for r in results if r.outcome == "failed"]


@pytest.mark.parametrize("name", YAMLS)
def test_every_shipped_policy_keeps_the_contract(name):
    assert not faults(check_policy(partial(from_yaml, name, {})))


@pytest.mark.parametrize(("name", "fixed"), VARIANTS)
def test_their_options_keep_it_too(name, fixed):
    assert not faults(check_policy(partial(from_yaml, name, fixed)))


@pytest.mark.gpu
@pytest.mark.parametrize("name", YAMLS)
def test_on_a_gpu_as_well(name):
    assert not faults(check_policy(partial(from_yaml, name, {}), "cuda"))


@pytest.mark.parametrize("name", YAMLS)
def test_a_yaml_lists_every_field_and_shares_the_runs_pages(name):
    config = yaml.safe_load((CONF / f"{name}.yaml").read_text())
    assert set(config) - {"_target_"} == set(from_yaml(name, {}).config())
    for field in ("page_size", "sink_pages", "local_pages"):
        assert config[field] == f"${{{field}}}"


def test_external_names_a_target_and_its_own_fields():
    config = yaml.safe_load((CONF / "external.yaml").read_text())
    assert set(config) == {"target", "config", "page_size", "sink_pages", "local_pages"}


@pytest.mark.parametrize("policy", [HeavyHitters, NearTheBest])
def test_policies_with_history_and_without_budget_keep_the_contract(policy):
    assert not faults(check_policy(policy))


@pytest.mark.parametrize("policy", broken(), ids=lambda p: p.__name__)
def test_a_broken_policy_is_caught_by_the_promise_it_breaks(policy):
    failed = {r.name: r.detail for r in check_policy(policy) if r.outcome == "failed"}
    assert policy.promise in failed
    assert len(failed[policy.promise]) > 20


def test_every_promise_is_broken_by_some_policy():
    checks: list[Any] = [*SELECTION_CHECKS, *BEHAVIOUR_CHECKS]
    names = {name_of(check) for check in checks}
    assert {p.promise for p in broken()} == names | {"select runs on every shape"}


def test_a_dropped_page_is_named():
    failed = check_policy(broken_policies.ForgetsTheCurrentPage)
    (line,) = [str(r) for r in failed if r.name == "current page is read"]
    assert "page_size 4" in line and "its current page is" in line


def test_command_line_prints_a_line_a_promise_and_returns_0(capsys):
    assert main(["sparse_eval.policies.quest.Quest", "group=sum"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + len(SELECTION_CHECKS) + len(BEHAVIOUR_CHECKS)
    assert lines[-1].endswith("0 failed, 3 do not apply")


def test_one_error_that_many_promises_fail_by_is_told_once(capsys):
    assert main(["tests.broken_policies.Crashes"]) == 1
    *told, summary = capsys.readouterr().out.splitlines()
    assert sum("ZeroDivisionError" in line for line in told) == 1
    assert any(" more fail by it: " in line for line in told)
    num_failed = sum(r.outcome == "failed" for r in check_policy(broken_policies.Crashes))
    assert num_failed > 10 and f" {num_failed} failed" in summary


def test_command_line_returns_1_for_a_broken_policy(capsys):
    assert main(["tests.broken_policies.ReadsOnePageMore"]) == 1
    assert "failed  budget is kept: page_size 4" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["nowhere.Policy"], "cannot import nowhere.Policy: ModuleNotFoundError"),
        (["sparse_eval.policies.quest.Qest"], "cannot import sparse_eval.policies.quest.Qest"),
        (["Quest"], "target must be an import path such as mypkg.MyPolicy, got 'Quest'"),
        (["torch.Tensor"], "torch.Tensor is no subclass of sparse_eval.policies.base.Policy"),
        (["sparse_eval.policies.quest.Quest", "grup=sum"], "does not take these fields"),
        (["sparse_eval.policies.quest.Quest", "group=avg"], "group must be one of max, sum"),
        (["sparse_eval.policies.quest.Quest", "page_size=0"], "page_size must be an integer >= 1"),
        (["sparse_eval.policies.quest.Quest", "sum"], "fields are given as field=value, got 'sum'"),
        (["sparse_eval.policies.quest.Quest", "--device", "abc"], "device must be auto, cpu, cuda"),
    ],
)
def test_command_line_returns_2_and_one_line_for_a_bad_target(words, line, capsys):
    assert main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and line in error and error.count("\n") == 1


def test_a_field_of_another_type_is_one_line():
    @dataclass(frozen=True, kw_only=True)
    class Mine:
        alpha: float = 0.5
        most: int | None = None
        other: list[int] | None = None

    fitting: list[dict[str, Any]] = [{"alpha": 1}, {"most": None}, {"most": 3}, {"other": "x"}]
    for fields in fitting:
        check_types("Mine", Mine, fields)
    for wrong, told in (
        ({"alpha": "x"}, "Mine: alpha must be float, got 'x'"),
        ({"most": 0.5}, "Mine: most must be int or none, got 0.5"),
        ({"most": True}, "got True"),
    ):
        with pytest.raises(ValueError, match=told):
            check_types("Mine", Mine, wrong)


def test_fixed_fields_win_over_those_the_checks_vary():
    fixed = partial(build, "sparse_eval.policies.quest.Quest", {"page_size": 7})
    assert fixed(page_size=4, sink_pages=3).config() | {"page_size": 7, "sink_pages": 3} == (
        fixed(sink_pages=3).config()
    )


RAISES = """
from dataclasses import dataclass
import numpy as np
import torch
from sparse_eval.policies.window import Window

@dataclass(frozen=True)
class Raises(Window):
    @torch.no_grad()
    def select(self, call, state, budget):
        return self.deeper(call)

    def deeper(self, call):
        return np.zeros(3).reshape(5, 5)

@dataclass(frozen=True)
class RaisesBelow(Window):
    def select(self, call, state, budget):
        return super().select(call, None, "many")
"""


@pytest.mark.parametrize(("name", "line"), [("Raises", 14), ("RaisesBelow", 19)])
def test_what_a_policy_raises_is_told_with_its_own_line(monkeypatch, tmp_path, name, line):
    """The innermost line of the author's file, whatever called it and whatever it calls."""
    module = f"with_{name.lower()}"
    (tmp_path / f"{module}.py").write_text(RAISES)
    monkeypatch.syspath_prepend(str(tmp_path))
    results = check_policy(partial(build, f"{module}.{name}", {}))
    details = [r.detail for r in results if r.detail.startswith("raised ")]
    where = f"({tmp_path / module}.py:{line}, in "
    assert details and all(where in detail for detail in details)
