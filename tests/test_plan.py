"""What plan=true predicts: from the machine's speed, and near to what a step takes."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch

from sparse_eval.app import register_resolvers
from sparse_eval.cli.compose import Composer
from sparse_eval.cli.machine import Machine, measured_now, seconds_of
from sparse_eval.cli.plan import (
    LAYER_NORMS,
    POLICY_NORMS,
    _time,
    live_cost,
    print_plan,
    step_seconds,
)
from sparse_eval.cli.settings import resolve
from sparse_eval.inputs import checkpoint
from sparse_eval.live import patched
from sparse_eval.models import model_info
from sparse_eval.policies.quest import Quest
from sparse_eval.prefill import feed, prefill
from sparse_eval.tasks.live_task import Work
from tests.tiny import random_ids, tiny_model

SLOW = Machine(flops=1e9, bytes_per_second=1e6, norm_seconds=1e-3)


@pytest.fixture(scope="module")
def settings(tmp_path_factory) -> Any:
    register_resolvers()
    words = ["task=fidelity", "model=tiny_llama", "context=400", "budget=64", "compare=[]"]
    return resolve(Composer(), [*words, f"cache_dir={tmp_path_factory.mktemp('cache')}"])


@pytest.mark.parametrize(
    ("fewest", "most", "told"),
    [(12.2, 12.4, "12 s"), (8, 31, "8 to 31 s"), (20, 600, "0 to 10 min"), (None, None, "unknown")],
)
def test_a_range_is_told_where_answers_may_be_short(fewest, most, told):
    assert _time(fewest, most) == told


def plan_of(capsys, *words: str) -> str:
    print_plan([("", resolve(Composer(), list(words)))])
    return " ".join(capsys.readouterr().out.split())


def test_a_plan_says_where_a_model_that_is_not_here_comes_from(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(checkpoint, "cached", lambda *_: None)
    where = [f"model_cache={tmp_path}", f"cache_dir={tmp_path}", "context=512", "budget=64"]
    assert "a run first fetches it from the model hub (as deepseek-ai/" in plan_of(capsys, *where)
    assert "from the package index" in plan_of(capsys, *where, "model=smollm2")
    assert "not on this machine" not in plan_of(
        capsys, *where, "model=tiny_llama", "dense_layers=[0]"
    )


def cost(settings: Any, machine: Machine, steps: int, prefills: tuple[int, ...] = ()) -> float:
    found = live_cost(settings, Work(list(prefills), steps, steps, steps, 0), machine).seconds
    assert found is not None
    return found


def test_a_step_reads_weights_and_cache_and_starts_its_operations(settings):
    info = model_info(settings.model)
    assert info.num_layers and info.num_kv_heads and info.head_dim and info.num_parameters
    step = step_seconds(settings, info, 400, SLOW, 10)
    cache = 2 * info.num_layers * info.num_kv_heads * info.head_dim * 4 * 400
    moved = (4 * info.num_parameters + 3 * cache) / 1e6
    assert step == pytest.approx(moved + info.num_layers * 10 * 1e-3)


def test_a_live_tasks_time_is_of_its_prefills_and_its_steps(settings):
    one, ten = cost(settings, SLOW, 1), cost(settings, SLOW, 10)
    assert one > 0 and ten == pytest.approx(10 * one)
    faster = replace(SLOW, flops=2e9)
    assert cost(settings, faster, 10) == ten  # no product of matrices in it
    assert cost(settings, faster, 0, (400,)) == pytest.approx(cost(settings, SLOW, 0, (400,)) / 2)
    more = [replace(SLOW, bytes_per_second=2e6), replace(SLOW, norm_seconds=5e-4)]
    assert all(cost(settings, machine, 10) < ten for machine in more)


def test_the_first_run_is_not_counted():
    waits = iter([0.2, *[0.001] * 5])
    assert 0.001 <= seconds_of(lambda: time.sleep(next(waits)), "cpu") < 0.1


def test_what_is_predicted_is_near_to_what_a_step_takes(settings):
    """Of a tiny model, whose steps are all starts of operations and which nothing was fitted to. A
    factor of 5, for versions and what else runs; without those starts it would be a hundred."""
    model = tiny_model("tiny_llama")
    filled = prefill(model, random_ids(400)[0])
    machine = measured_now("cpu", torch.float32)
    norms = LAYER_NORMS + POLICY_NORMS
    predicted = step_seconds(settings, model_info(settings.model), 400, machine, norms)
    cache = filled.fork()
    with patched(model, Quest(), budget=64, dense_layers=[0]):
        taken = seconds_of(lambda: feed(model, cache, torch.tensor([5])), "cpu", times=4)
    assert predicted / 5 < taken < predicted * 5
