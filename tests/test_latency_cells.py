"""A cell's buffers and work, over random and captured caches."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from sparse_eval.kernels.ffd import ffd_select
from sparse_eval.kernels.sparse_decode import sparse_decode
from sparse_eval.latency.cell import Cell
from sparse_eval.latency.checks import check_latency
from sparse_eval.latency.config import Shapes
from sparse_eval.latency.ffd_cell import FFDCell
from sparse_eval.latency.replay import captured_keys, captured_lists
from sparse_eval.policies.quest import Quest

TASK = yaml.safe_load((Path(__file__).parent.parent / "conf" / "task" / "latency.yaml").read_text())
INFO = SimpleNamespace(name="qwen", num_heads=12, num_kv_heads=2, head_dim=128)


def test_the_shortest_cells_work(capture):
    if torch.cuda.is_available():
        pytest.skip("the kernel is compiled in this process")
    cell = cell_of(capture, context=16, policy=Quest(page_size=64))
    work: dict[str, Any] = dict(cell.work([cell.buffer(cell.scattered_lists)]))
    torch.testing.assert_close(work["dense"](0)[0], work["attend"](0)[0])
    assert cell.bytes_of("attend") == cell.bytes_of("dense")
    for page_size, sink_pages, local_pages in ((16, 0, 9), (1, 0, 1)):
        pages = (page_size, sink_pages, local_pages, "token")
        top = FFDCell(1, 17, cell.shapes, torch.float32, *pages, torch.device("cpu"))
        x = top.buffer()
        reading = top.reading(x, 0.5)
        assert 0 < reading.density <= 1
        assert all(step(0) is not None for step in top.work([x], [reading]).values())


@pytest.fixture
def saved(capture, tmp_path) -> Path:
    capture.save(tmp_path / "capture.safetensors")
    return tmp_path / "capture.safetensors"


def cell_of(capture, **changes: Any) -> Cell:
    """A cell of a capture's shapes whose context holds it."""
    kv_heads, _, head_dim = capture.layers[0].keys_GND.shape
    fields: dict[str, Any] = {
        "batch": 3,
        "context": 176,
        "shapes": Shapes(capture.layers[0].queries_THD.shape[1], kv_heads, head_dim),
        "dtype": torch.float32,
        "policy": Quest(page_size=16, select_backend="torch"),
        "budget": 64,
        "device": torch.device("cpu"),
    }
    return Cell(**fields | changes)


def test_lists_of_a_capture_are_those_of_its_single_steps(capture, saved):
    quest = Quest(page_size=16)
    lists = captured_lists(saved, quest, 64, "cpu")
    steps = [(layer, t) for layer in capture.layers for t in range(capture.num_queries)]
    assert len(lists.pages_NGW) == len(steps) > 1
    for entry, (layer, step) in enumerate(steps):
        call = capture.step_call(layer, step)
        want = quest.select(call, quest.init(call), 64)
        assert torch.equal(lists.pages_NGW[entry], want.pages_BSK[0])
        assert torch.equal(lists.counts_NG[entry], want.counts_BS[0])
    pages, counts = lists.drawn(2 * len(steps))()  # each entry twice
    assert sorted(pages[:, 0].tolist()) == sorted(2 * lists.pages_NGW[:, 0].tolist())
    assert counts.shape == (2 * len(steps), lists.counts_NG.shape[1])


def test_attend_alone_reads_a_captures_lists(capture, saved):
    lists = captured_lists(saved, Quest(page_size=16), 64, "cpu")
    cell = cell_of(capture, listed_tokens=lists.mean_tokens)
    buffer = cell.buffer(lists.drawn(3))
    if torch.cuda.is_available():
        pytest.skip("the kernel is compiled in this process")
    attend: Any = cell.work([buffer])["attend"]
    out, lse = attend(0)
    lengths = torch.full((3,), 176, dtype=torch.int32)
    want, want_lse = sparse_decode(
        *(buffer.q, buffer.k, buffer.v, buffer.pages, buffer.counts, None, lengths),
        page_size=16,
        scale=cell.shapes.head_dim**-0.5,
        backend="torch",
    )
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(lse, want_lse)


@pytest.mark.parametrize("metadata_dtype", ["auto", "int8"])
def test_every_part_of_a_cell_runs_on_its_buffers(capture, metadata_dtype):
    if torch.cuda.is_available():
        pytest.skip("the kernel is compiled in this process")
    quest = Quest(page_size=16, metadata_dtype=metadata_dtype)
    cell = cell_of(capture, batch=1, policy=quest)
    buffer = cell.buffer(cell.scattered_lists)
    before = [buffer.mid.clone(), buffer.half.clone()]
    work: dict[str, Any] = dict(cell.work([buffer]))
    work["metadata"](0)  # what a page that just filled already holds
    assert torch.equal(buffer.mid, before[0]) and torch.equal(buffer.half, before[1])
    pages, counts = work["select"](0)
    out, lse, of_step, _ = work["step"](0)
    assert torch.equal(pages, of_step) and (counts == 4).all()
    dense, dense_lse = work["dense"](0)
    assert out.shape == dense.shape and (lse <= dense_lse + 1e-5).all()


def test_bytes_of_attend_are_those_of_the_lists_it_reads(capture, saved):
    lists = captured_lists(saved, Quest(page_size=16), 64, "cpu")
    assert lists.mean_tokens == 64  # four pages each
    cell, shorter = cell_of(capture), cell_of(capture, listed_tokens=40.0)
    assert cell.bytes_of("attend") == cell_of(capture, listed_tokens=64.0).bytes_of("attend")
    assert shorter.bytes_of("attend") * 64 == cell.bytes_of("attend") * 40
    assert shorter.bytes_of("step") == cell.bytes_of("step")  # it selects for itself


def test_lists_that_do_not_fit_the_cells_are_refused_in_one_line(capture, saved):
    kv_heads, tokens, _ = capture.layers[0].keys_GND.shape
    info = SimpleNamespace(name="tiny", num_heads=4 * kv_heads, num_kv_heads=kv_heads, head_dim=16)
    task = TASK | {"lists": str(saved), "contexts": [tokens, 4096]}
    check_latency(task, info, Quest(page_size=16), "cuda")
    short = task | {"contexts": [4096, tokens - 1]}
    other = task | {"shapes": {"num_heads": 12, "num_kv_heads": kv_heads + 1, "head_dim": 16}}
    other["shapes"]["num_heads"] = 4 * (kv_heads + 1)
    saved.with_name("torn").write_bytes(saved.read_bytes()[:-9])
    torn = task | {"lists": str(saved.with_name("torn"))}
    for changed, message in (
        (short, f"holds {tokens} tokens, so task.contexts must be at least that"),
        (other, f"has {kv_heads} KV heads, but task.shapes has {kv_heads + 1}"),
        (torn, "not a readable capture"),
    ):
        with pytest.raises(ValueError, match=message) as failure:
            check_latency(changed, info, Quest(page_size=16), "cuda")
        assert "\n" not in str(failure.value)


def test_a_layers_keys_are_laid_end_to_end(capture, saved):
    layer = captured_keys(saved, "cpu", torch.float32)[1]
    held = capture.layers[layer.layer]
    live = int(capture.lengths_T.max())
    q, k, v = layer.tiled(3, 2 * live + 40, turn=1)
    assert k.shape == (3, held.keys_GND.shape[0], 2 * live + 40, held.keys_GND.shape[2])
    for row in range(3):
        assert torch.equal(k[row, :, :40], held.keys_GND[:, :40])
        assert torch.equal(k[row, :, 40 : 40 + live], held.keys_GND[:, :live])
        assert torch.equal(v[row, :, -live:], held.values_GNE[:, :live])
        step = capture.num_queries - 1 - (3 + row) % capture.num_queries
        torch.testing.assert_close(q[row], held.queries_THD[step])


def test_top_delta_over_a_captured_layer_reads_what_its_policy_would(capture, saved):
    if torch.cuda.is_available():
        pytest.skip("the kernel is compiled in this process")
    layer = captured_keys(saved, "cpu", torch.float32)[0]
    shapes = Shapes(layer.queries_THD.shape[1], *layer.keys_GND.shape[::2])
    cell = FFDCell(2, 320, shapes, torch.float32, 16, 1, 2, "token", torch.device("cpu"))
    x = cell.replayed(layer, 0)
    some, all_ = cell.reading_at(x, 1.0), cell.reading_at(x, 1e9)
    assert 0 < some.density < all_.density == 1.0
    pages, counts = ffd_select(
        *(x.q, x.k, x.thumbnail, None, cell.lengths()),
        delta=1.0,
        sink_pages=1,
        local_pages=2,
        scale=cell.scale,
        backend="torch",
    )
    assert torch.equal(some.pages, pages) and torch.equal(some.counts, counts)


def test_keys_that_do_not_fit_the_cells_are_refused_in_one_line(capture, saved):
    kv_heads, tokens, head_dim = capture.layers[0].keys_GND.shape
    heads = capture.layers[0].queries_THD.shape[1]
    info = SimpleNamespace(num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, name="tiny")
    task = TASK | {"what": ["ffd_step"], "keys": str(saved), "contexts": [tokens, 4096]}
    check_latency(task, info, Quest(page_size=16), "cuda")
    shorter = task | {"contexts": [4096, tokens - 1]}
    other = task | {"shapes": {"num_heads": None, "num_kv_heads": None, "head_dim": 2 * head_dim}}
    last = max(capture.layers)

    def odd(**tensors: Tensor) -> dict[str, Any]:
        """The capture with another last layer."""
        layer = replace(capture.layers[last], **tensors)
        path = saved.with_name("odd.safetensors")
        replace(capture, layers=capture.layers | {last: layer}).save(path)
        return task | {"keys": str(path)}

    x = capture.layers[last]
    narrow = {
        name: getattr(x, name)[..., : head_dim // 2]
        for name in ("keys_GND", "queries_THD", "prompt_queries_WHD")
    }
    for changed, message in (
        (shorter, f"holds {tokens} tokens, so task.contexts must be at least that"),
        (other, f"has head_dim {head_dim}, but task.shapes has {2 * head_dim}"),
        (odd(**narrow), f"layer {last} of .* has head_dim {head_dim // 2}, but"),
    ):
        with pytest.raises(ValueError, match=message) as failure:
            check_latency(changed, info, Quest(page_size=16), "cuda")
        assert "\n" not in str(failure.value)
    values = {"values_GNE": x.values_GNE[..., :4], "outputs_THE": x.outputs_THE[..., :4]}
    for changed, message in ((odd(**values), f"layer {last} of .* has values of 4 channels"),):
        with pytest.raises(ValueError, match=message) as failure:
            check_latency(changed, info, Quest(page_size=16), "cuda")
        assert "\n" not in str(failure.value)
