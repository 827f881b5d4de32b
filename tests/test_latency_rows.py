"""The rows of task=latency, every part once, with the interpreter's kernels and times made up."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from sparse_eval.cli.progress import Progress
from sparse_eval.latency.baselines import Tried
from sparse_eval.latency.clock import Ceiling, Timing
from sparse_eval.latency.config import FFD_PARTS, Shapes
from sparse_eval.storage.cells import CellStore
from sparse_eval.storage.table import frame_of
from sparse_eval.tasks import latency, latency_bench, latency_ffd, latency_quest
from tests.factories import latency_settings

QUEST_PARTS = {"dense", "metadata", "select", "attend", "step"}

if torch.cuda.is_available():
    pytest.skip("kernels are compiled in this process", allow_module_level=True)


@pytest.fixture(autouse=True)
def no_gpu_but_its_words(monkeypatch):
    """Kernels run once in the interpreter; a piece of work takes as many µs as its name is long."""

    def measure(work: dict[str, Any], **options: Any) -> dict[str, Timing]:
        for timed in work.values():
            timed.step(0)
        return {name: Timing(len(name), len(name), len(name)) for name in work}

    def sdpa(q, k, v):
        return scaled_dot_product_attention(q[:, :, None], k, v, enable_gqa=True)

    others = Tried({"flashinfer": sdpa}, {"flash_attention_3": "is not installed"})
    for module in (latency_bench, latency_ffd, latency_quest):
        monkeypatch.setattr(module, "measure", measure)
    monkeypatch.setattr(latency_bench, "sdpa_variants", lambda: {"cudnn gqa": sdpa})
    monkeypatch.setattr(latency_bench, "other_kernels", lambda: others)
    monkeypatch.setattr(latency_bench, "memory_ceiling", lambda device: Ceiling(4e12, 4.5e12))
    cuda = {
        "empty_cache": lambda: None,
        "mem_get_info": lambda device: (1 << 34, 1 << 34),
        "graph": lambda graph: contextlib.nullcontext(),
        "get_device_properties": lambda device: SimpleNamespace(L2_cache_size=1 << 8),
    }
    for name, value in cuda.items():
        monkeypatch.setattr(torch.cuda, name, value)


def rows_of(tmp_path, **change: Any) -> pd.DataFrame:
    few = {"batches": [1], "contexts": [96], "graph": [True], "repeats": 3}
    shapes = Shapes(4, 2, 16)
    settings = latency_settings(few | change, shapes, 16, 64, "cpu", "float32")
    task = latency.Latency(settings, Progress())
    rows = [row for rows in task.run(CellStore(tmp_path)) for row in rows]
    frame = frame_of(rows)
    assert len(frame) == len(rows)  # each is a measurement of its own
    assert task.facts()["ceiling"]["read_terabytes_per_s"] == 4.5
    if "sdpa" in task.bench.config.what:
        assert task.facts()["baselines_not_timed"] == {"flash_attention_3": "is not installed"}
    return frame


def test_every_part_of_quests_step_is_compared_with_the_fastest_dense(tmp_path):
    rows = rows_of(tmp_path, batches=[1, 2]).set_index(["batch", "what"])
    for batch in (1, 2):
        here = rows.loc[batch]
        assert {*here.index} == {*QUEST_PARTS, "sdpa", "flashinfer"}
        sdpa, dense = len("sdpa cudnn gqa"), len("dense")
        assert here.loc["step", "speedup_vs_sdpa"] == sdpa / len("step")
        assert here.loc["step", "speedup_vs_best"] == dense / len("step")
        assert here.loc["step", "model_speedup_bound"] > 0
    assert rows["bytes"].loc[2, "step"] == 2 * rows["bytes"].loc[1, "step"]


def test_top_delta_is_timed_at_every_density_and_the_rules_once(tmp_path):
    what = ["sdpa", *FFD_PARTS, "rules"]
    rows = rows_of(tmp_path, what=what, densities=[0.4, 0.8])
    parts = rows[rows["what"].isin(FFD_PARTS)]
    assert parts.groupby("density_target")["what"].apply(set).tolist() == [{*FFD_PARTS}] * 2
    assert (parts["keys"] == "random").all() and "layer" not in rows
    by_target = parts.groupby("density_target")["density"].mean()
    assert by_target[0.4] < by_target[0.8]
    assert {*rows["what"]} == {*FFD_PARTS, "sdpa", "flashinfer", "top_delta", "top_k", "top_p"}


def test_top_delta_over_a_captures_keys_has_a_row_for_each_layer_and_delta(tmp_path, capture):
    file = tmp_path / "capture.safetensors"
    capture.save(file)
    change = {"keys": str(file), "deltas": [0.5, 2], "contexts": [160]}
    select = rows_of(tmp_path, what=["ffd_select"], **change)
    found = {*zip(select["layer"], select["delta_target"], strict=True)}
    assert found == {(layer, delta) for layer in capture.layers for delta in (0.5, 2.0)}
    assert (select["delta"] == select["delta_target"]).all()
    wide, narrow = (select[select["delta_target"] == x]["density"].mean() for x in (2.0, 0.5))
    assert narrow <= wide
