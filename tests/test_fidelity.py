"""task=fidelity: pure functions by hand, and a run on a tiny model."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from sparse_eval.app import register_resolvers
from sparse_eval.cli.compose import Composer
from sparse_eval.cli.progress import Progress
from sparse_eval.cli.settings import resolve
from sparse_eval.fidelity import NextTokens, compare, kl_of, nll_of
from sparse_eval.results import CellStore
from sparse_eval.tasks.fidelity import Fidelity


def tokens(logits: list[list[float]], text: list[int]) -> NextTokens:
    return NextTokens(torch.tensor(logits), torch.tensor(text))


def test_by_hand():
    dense = tokens([[0.0, 0.0], [math.log(3.0), 0.0]], [0, 1])
    own = tokens([[math.log(3.0), 0.0], [0.0, 0.1]], [0, 1])
    assert nll_of(dense).tolist() == pytest.approx([math.log(2), math.log(4)])
    first = 0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25)
    assert kl_of(own, dense)[0].item() == pytest.approx(first)
    assert kl_of(dense, dense).abs().max() < 1e-6
    row = compare(own, dense)
    assert row["tokens"] == 2 and row["top1_agreement"] == 0.5
    assert row["nll_sparse"] == pytest.approx(nll_of(own).mean().item())


def test_no_tokens_is_nan_and_counted():
    none = tokens([[0.0, 1.0]], [0]).where(torch.tensor([False]))
    row = compare(none, none)
    assert row["tokens"] == 0 and math.isnan(row["kl_mean"])


def run(tmp_path: Any, *more: str) -> list[dict[str, Any]]:
    register_resolvers()
    words = [
        *("task=fidelity", "model=tiny_llama", "context=300", "prompts.n=2", "task.steps=12"),
        *("budget=[64,280]", "compare=[window]", "dense_layers=[0]", "task.short_window=60"),
        *("task.long_gain=0.5", f"cache_dir={tmp_path}"),
    ]
    task = Fidelity(resolve(Composer(), [*words, *more]), Progress())
    return [row for rows in task.run(CellStore(tmp_path)) for row in rows]


def test_a_run(tmp_path, monkeypatch):
    rows = run(tmp_path)
    assert len(rows) == 2 * 5 and {row["tokens"] for row in rows} == {12}
    full = [row for row in rows if row["policy"] == "full"]
    assert all(row["kl_mean"] == 0 and row["top1_agreement"] == 1 for row in full)
    assert all(row["stock_kl_mean"] < 1e-6 and row["stock_agreement"] == 1 for row in full)
    for row in rows:
        assert row["nll_dense"] == pytest.approx(full[row["sample"]]["nll_dense"])
        assert row["long_tokens"] == full[row["sample"]]["long_tokens"] <= 12
        assert len(row["output_ids"]) == len(row["expected_ids"]) == 12
    quest = [row for row in rows if row["policy"] == "quest" and row["sample"] == 0]
    assert quest[0]["kl_mean"] > quest[1]["kl_mean"] > 0
    assert quest[0]["model_read_fraction"] < quest[1]["model_read_fraction"] < 1.1
    monkeypatch.setattr("sparse_eval.tasks.prompted.shared_model", None)
    assert repr(run(tmp_path)) == repr(rows)


def test_tokens_that_need_the_long_context_are_those_dense_gains_on(tmp_path):
    none = run(tmp_path, "task.long_gain=100", "compare=[]", "budget=64", "prompts.n=1")
    assert none[0]["long_tokens"] == 0 and math.isnan(none[0]["long_kl_mean"])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("task.short_window=300", "task.short_window must be below the context of 300"),
        ("task.long_gain=-1", "task.long_gain must be a number >= 0"),
        ("task.steps=0", "task.steps must be an integer >= 1"),
        ("protocol=question", "protocol must be decode for task=fidelity"),
    ],
)
def test_bad_settings_are_one_line(tmp_path, override, message):
    with pytest.raises(ValueError, match=message) as error:
        run(tmp_path, override)
    assert "\n" not in str(error.value)
