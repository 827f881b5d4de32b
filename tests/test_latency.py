"""task=latency: its settings, its arithmetic and its pictures; on a GPU the whole task."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import replace
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import torch
import yaml
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from sparse_eval.__main__ import main
from sparse_eval.cli.kits import KITS
from sparse_eval.kernels.ffd import ffd_select
from sparse_eval.kernels.sparse_decode import sparse_decode
from sparse_eval.kernels.thumbnail import pack_residual, pack_thumbnail
from sparse_eval.latency.baselines import (
    FLASH_ATTENTION_3,
    OTHERS,
    Attend,
    other_kernels,
    those_that_run,
)
from sparse_eval.latency.cell import Cell
from sparse_eval.latency.checks import check_latency
from sparse_eval.latency.clock import timing
from sparse_eval.latency.config import FFD_PARTS, Shapes, latency_config
from sparse_eval.latency.ffd_cell import FFDBuffer, FFDCell
from sparse_eval.latency.replay import captured_keys, captured_lists
from sparse_eval.latency.rules import kept, matched, top_p
from sparse_eval.policies.quest import Quest
from sparse_eval.policies.window import Window
from sparse_eval.reporting.compare_latency import paired_timings
from sparse_eval.reporting.page_live import live_page
from sparse_eval.reporting.plots_latency import latency_pictures
from sparse_eval.reporting.show_latency import print_results
from sparse_eval.reporting.summarise_latency import slope, speedups, split_latency
from sparse_eval.storage.table import frame_of
from tests.factories import latency_rows

TASK = yaml.safe_load((Path(__file__).parent.parent / "conf" / "task" / "latency.yaml").read_text())
INFO = SimpleNamespace(name="qwen", num_heads=12, num_kv_heads=2, head_dim=128)


def test_without_a_gpu_it_ends_with_one_line_and_exit_code_2(monkeypatch, capsys):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    monkeypatch.setattr(sys, "argv", ["sparse_eval", "task=latency", "page_size=64"])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr()
    assert ended.value.code == 2 and said.out == ""
    assert said.err.count("\n") == 1 and "needs a CUDA GPU" in said.err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"what": ["speed"]}, "task.what must be among sdpa, dense"),
        ({"batches": []}, "task.batches must have at least one value"),
        ({"batches": [0]}, "task.batches must be an integer >= 1"),
        ({"contexts": [4096, "8k"]}, "task.contexts must be an integer >= 16"),
        ({"graph": ["yes"]}, "task.graph must be a list of true and false"),
        ({"repeats": 1}, "task.repeats must be an integer >= 3"),
        ({"new_tokens": 2}, "task.new_tokens must be an integer >= 3"),
        *(
            ({"working_set": value}, "task.working_set must be a finite number > 0, got ")
            for value in (0, -4, float("nan"), float("inf"), True, "4")
        ),
        ({"densities": [0.1, 1.5]}, "task.densities must be a number between 0 and 1"),
        ({"keep_ratio": 0}, "task.keep_ratio must be a number between 0 and 1"),
        ({"scales": "head"}, "task.scales must be one of token, channel"),
        ({"lists": "nowhere.safetensors"}, "task.lists must be scattered or a capture's path"),
        ({"keys": "nowhere.safetensors"}, "task.keys must be random or a capture's path"),
        ({"keys": "k" * 260}, "task.keys must be random or a capture's path"),
        ({"lists": "l" * 260}, "task.lists must be scattered or a capture's path"),
        ({"lists": "~no-such-user/kv"}, "task.lists must be scattered or a capture's path"),
        ({"deltas": [5, -1]}, "task.deltas must be numbers >= 0, in logits, got -1"),
        ({"deltas": [float("inf")]}, "task.deltas must be numbers >= 0, in logits, got inf"),
        (
            {"shapes": {"num_heads": 5, "num_kv_heads": None, "head_dim": None}},
            "num_heads must be a multiple of num_kv_heads",
        ),
    ],
)
def test_bad_settings_are_refused_in_one_line(change, message):
    with pytest.raises(ValueError, match=message) as failure:
        latency_config(TASK | change, INFO)
    assert "\n" not in str(failure.value)


def test_policies_to_compare_are_not_ignored(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["sparse_eval", "task=latency", "compare=[window]"])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr()
    assert ended.value.code == 2 and said.out == ""
    assert said.err.count("\n") == 1 and "leave compare out, got compare=[window]" in said.err


def test_only_quest_has_a_select_to_time():
    with pytest.raises(ValueError, match="policy must be quest"):
        check_latency(TASK, INFO, Window(), "cuda")
    with pytest.raises(ValueError, match="32,768 pages"):
        check_latency(TASK, INFO, Quest(page_size=1), "cuda")
    with pytest.raises(ValueError, match="auto or int8, got quest with float32"):
        check_latency(TASK, INFO, Quest(metadata_dtype="float32"), "cuda")
    check_latency(TASK, INFO, Quest(page_size=16), "cuda")
    check_latency(TASK, INFO, Quest(page_size=16, metadata_dtype="int8"), "cuda")
    with pytest.raises(ValueError, match="powers of two up to 512, got 48"):
        check_latency(TASK | {"what": ["ffd_step"]}, INFO, Quest(page_size=48), "cuda")
    thin = {"what": ["ffd_step", "rules"], "contexts": [2**19]}  # Quest's own limit is not theirs
    check_latency(TASK | thin, INFO, Quest(page_size=16), "cuda")


def of_head_dim(value: int) -> dict[str, Any]:
    return {"shapes": {"num_heads": 12, "num_kv_heads": 2, "head_dim": value}}


@pytest.mark.parametrize(
    ("change", "pages", "message"),
    [
        *(
            ({"what": [what], "contexts": [4096, 16]}, {"page_size": 64}, "must be at least 64 for")
            for what in ("metadata", "select", "step")
        ),
        *(
            ({"what": [what], "contexts": [64]}, {"page_size": 64}, "must be at least 65 for")
            for what in FFD_PARTS
        ),
        ({"what": ["ffd_select"]}, {"sink_pages": 0, "local_pages": 1}, "got 0 and 1"),
        *(
            (
                {"what": [what], "scales": "channel"},
                {"page_size": 8},
                "page_size must be at least 16 for",
            )
            for what in ("ffd_attend_residual", "ffd_step_residual")
        ),
        ({"what": ["ffd_step"], **of_head_dim(66)}, {}, "must be a multiple of 4 for task.what"),
        ({"what": ["generate"], **of_head_dim(65)}, {}, "must be even for task.what=generate"),
        *(
            ({"what": [what], **of_head_dim(320)}, {}, f"<= 256 for task.what={what}, got 320")
            for what in ("dense", "generate", "ffd_attend")
        ),
        ({"contexts": [2**19 - 15]}, {}, "fewer than 32,768 pages, got group=max and 32,768"),
    ],
)
def test_what_a_part_could_not_do_is_refused_before_it_is_timed(change, pages, message):
    with pytest.raises(ValueError, match=message) as failure:
        check_latency(TASK | change, INFO, Quest(**pages), "cuda")
    assert "\n" not in str(failure.value)


def test_what_a_part_can_do_is_not_refused():
    accepted: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"what": ["step"], "contexts": [64]}, {"page_size": 64}),
        ({"what": ["sdpa", "dense", "attend"], "contexts": [16]}, {"page_size": 64}),
        ({"what": [*FFD_PARTS], "contexts": [65]}, {"page_size": 64}),
        ({"what": [*FFD_PARTS], "contexts": [16]}, {"page_size": 1, "sink_pages": 0}),
        ({"what": [*FFD_PARTS], "scales": "channel"}, {"page_size": 16, "sink_pages": 0}),
        ({"what": ["ffd_step"], "scales": "channel"}, {"page_size": 8}),
        ({"what": ["sdpa", "rules"], **of_head_dim(321)}, {"page_size": 16}),
    ]
    for change, pages in accepted:
        check_latency(TASK | change, INFO, Quest(**pages), "cuda")


def test_values_given_twice_are_timed_once():
    twice = {
        "what": ["step", "sdpa", "step"],
        "batches": [8, 1, 8],
        "contexts": [64, 64],
        "graph": [True, True],
        "densities": [0.1, 0.1],
        "deltas": [5, 5.0, 7],
    }
    config = latency_config(TASK | twice, INFO)
    assert {name: getattr(config, name) for name in twice} == {
        "what": ("step", "sdpa"),
        "batches": (8, 1),
        "contexts": (64,),
        "graph": (True,),
        "densities": (0.1,),
        "deltas": (5.0, 7.0),
    }


@pytest.mark.parametrize("name", ["keys", "lists"])
def test_a_capture_that_no_part_reads_is_not_opened(tmp_path, name):
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(b"no capture")
    reader = {"keys": "ffd_attend", "lists": "attend"}[name]
    task = TASK | {name: str(broken)}
    others = [what for what in ("sdpa", "step", "select", "generate") if what != reader]
    check_latency(task | {"what": others}, INFO, Quest(), "cuda")
    assert getattr(latency_config(task | {"what": others}, INFO), name) is None
    with pytest.raises(ValueError, match="not a readable capture"):
        check_latency(task | {"what": [reader]}, INFO, Quest(), "cuda")


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


def test_shapes_come_from_the_model_or_the_task():
    given = {"num_heads": 32, "num_kv_heads": None, "head_dim": 64}
    assert latency_config(TASK | {"shapes": given}, INFO).shapes == Shapes(32, 2, 64)


def test_bytes_are_those_of_the_inputs_counted_by_hand():
    cell = Cell(
        batch=32,
        context=65536,
        shapes=Shapes(12, 2, 128),
        dtype=torch.bfloat16,
        policy=Quest(page_size=64),
        budget=2048,
        device=torch.device("cpu"),
    )
    assert cell.bytes_of("dense") == 32 * 2 * 65536 * 128 * 2 * 2 == 2**31
    assert cell.bytes_of("select") == 2**31 // 64
    assert cell.bytes_of("attend") == 32 * 2 * 32 * 64 * 128 * 2 * 2
    parts = sum(cell.bytes_of(what) for what in ("metadata", "select", "attend"))
    assert cell.bytes_of("step") == parts
    eight = Cell(**vars(cell) | {"policy": Quest(page_size=64, metadata_dtype="int8")})
    assert eight.bytes_of("select") == 32 * 2 * 1024 * (128 + 128 + 4 + 4)
    longer = Cell(**vars(cell) | {"context": 2**17})
    assert longer.bytes_of("attend") == cell.bytes_of("attend")


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


def qkv(rows: int, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    rng = torch.Generator().manual_seed(0)
    shapes = ((rows, 6, 16), (rows, 2, tokens, 16), (rows, 2, tokens, 16))
    q, k, v = (torch.randn(shape, generator=rng) for shape in shapes)
    return q, k, v


def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[B, H, D] from k and v [B, G, N, D]."""
    return scaled_dot_product_attention(q[:, :, None], k, v, enable_gqa=True)[:, :, 0]


def install(monkeypatch, name: str, **members: Any) -> None:
    """A module of this name, as if it were installed."""
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    vars(module).update(members)
    monkeypatch.setitem(sys.modules, name, module)


def test_what_is_not_installed_is_said():
    tried = other_kernels()
    modules = {**FLASH_ATTENTION_3, "flashinfer": "flashinfer"}
    assert set(tried.good) | set(tried.refused) == set(modules)
    for name, module in modules.items():
        if find_spec(module) is None:
            assert tried.refused[name] == f"{module} is not installed"


def test_a_package_that_cannot_be_loaded_says_why(monkeypatch):
    install(monkeypatch, "fa3_fwd_interface")
    refused = other_kernels().refused["flash_attention_3 fa3_fwd"]
    assert refused.startswith("AttributeError: ") and "flash_attn_with_kvcache" in refused


@pytest.mark.parametrize("kind", [RuntimeError, AssertionError, FileNotFoundError, KeyError])
def test_whatever_a_baseline_raises_refuses_it_alone(kind):
    q, k, v = qkv(2, 128)

    def fails(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        raise kind("ninja")

    tried = those_that_run({"fails": fails, "right": dense}, q, k, v, dense(q, k, v))
    assert list(tried.good) == ["right"]
    assert tried.refused["fails"].startswith(f"{kind.__name__}: ")


def test_a_baseline_that_fails_or_errs_says_why():
    q, k, v = qkv(2, 128)

    def fails(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        raise RuntimeError("no kernel\nfor this GPU")

    variants: dict[str, Attend] = {
        "right": dense,
        "wrong": lambda q, k, v: 2 * dense(q, k, v),
        "fails": fails,
    }
    tried = those_that_run(variants, q, k, v, dense(q, k, v))
    assert list(tried.good) == ["right"]
    assert tried.refused == {
        "wrong": "its output is 100% off",
        "fails": "RuntimeError: no kernel for this GPU",
    }


@pytest.mark.parametrize(("name", "module"), FLASH_ATTENTION_3.items())
def test_flash_attention_3_gets_what_its_documentation_asks_for(monkeypatch, name, module):
    q, k, v = qkv(3, 100)

    def flash_attn_with_kvcache(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        """q [B, 1, H, D]; caches [B, N, G, D] with a contiguous last dimension."""
        assert q.shape == (3, 1, 6, 16) and k_cache.shape == v_cache.shape == (3, 100, 2, 16)
        assert k_cache.stride(-1) == v_cache.stride(-1) == 1
        out = dense(q[:, 0], k_cache.transpose(1, 2), v_cache.transpose(1, 2))
        return out[:, None]

    install(monkeypatch, module, flash_attn_with_kvcache=flash_attn_with_kvcache)
    tried = those_that_run({name: other_kernels().good[name]}, q, k, v, dense(q, k, v))
    assert list(tried.good) == [name]


class FakeDecode:
    """FlashInfer's documented decode wrapper, over a pool in HND, in plain torch."""

    plans = 0

    def __init__(self, workspace, kv_layout, **options):
        assert workspace.dtype == torch.uint8 and not workspace.any() and kv_layout == "HND"
        assert options["use_cuda_graph"] and options["use_tensor_cores"]
        assert len(options["paged_kv_indptr_buffer"]) == 1 + len(
            options["paged_kv_last_page_len_buffer"]
        )

    def plan(self, indptr, indices, last, heads, kv_heads, head_dim, page_size, **dtypes):
        assert indptr.dtype == indices.dtype == last.dtype == torch.int32
        assert dtypes == {"q_data_type": torch.float32, "kv_data_type": torch.float32}
        FakeDecode.plans += 1
        self.planned = (indptr, indices, last, heads, kv_heads, head_dim, page_size)

    def run(self, q, pool):
        indptr, indices, last, heads, kv_heads, head_dim, page_size = self.planned
        assert q.shape == (len(last), heads, head_dim)
        assert pool[0].shape[1:] == (kv_heads, page_size, head_dim)
        rows = []
        for i in range(len(last)):
            ids = indices[int(indptr[i]) : int(indptr[i + 1])].long()
            live = (len(ids) - 1) * page_size + int(last[i])
            k, v = (x[ids].transpose(0, 1).flatten(1, 2)[None, :, :live] for x in pool)
            rows.append(dense(q[i : i + 1], k, v))
        return torch.cat(rows)


@pytest.mark.parametrize("tokens", [128, 100])
def test_flashinfer_gets_what_its_documentation_asks_for_and_plans_once(monkeypatch, tokens):
    install(monkeypatch, "flashinfer", BatchDecodeWithPagedKVCacheWrapper=FakeDecode)
    FakeDecode.plans = 0
    q, k, v = qkv(3, tokens)
    truth = dense(q, k, v)
    tried = those_that_run(other_kernels().good, q, k, v, truth)
    torch.testing.assert_close(tried.good["flashinfer"](q, k, v), truth)
    assert FakeDecode.plans == 1


def test_bytes_of_a_top_delta_step_counted_by_hand():
    cell = FFDCell(
        *(2, 4096, Shapes(12, 2, 128), torch.bfloat16, 16, 1, 2, "token"),
        device=torch.device("cpu"),
    )
    k = torch.zeros(2, 2, 4096, 128, dtype=torch.bfloat16)
    t = pack_thumbnail(k, page_size=16)
    buffer = FFDBuffer(k[:, :, 0], k, k, t, pack_residual(k, t))
    tokens = 2 * 2 * 4096
    assert cell.dense_bytes == tokens * 512
    assert cell.bytes_of("ffd_select", buffer, 0.25) == tokens * (32 + 2)
    assert cell.bytes_of("ffd_attend", buffer, 0.25) == tokens * 512 // 4
    refined = tokens * (32 + 2 + 128 + 256) // 4
    assert cell.bytes_of("ffd_step_residual", buffer, 0.25) == tokens * 34 + refined
    assert (cell.length, cell.full_pages, cell.local_full) == (4095, 255, 1)


def test_three_rules_keep_one_share_of_the_same_scores():
    scores = torch.randn(2, 3, 4000, generator=torch.Generator().manual_seed(0))
    m = matched(scores, 0.25, 16, 32)
    forced = torch.cat([scores[..., :16], scores[..., -32:]], -1).amax(-1, keepdim=True)
    by_delta = (scores >= forced - m.delta).float().mean()
    assert m.k == 1000 and float(by_delta) == pytest.approx(0.25, abs=0.002)
    _, counts = top_p(scores, m.p)
    assert float(counts.float().mean()) / 4000 == pytest.approx(0.25, abs=0.01)
    shares = kept(
        {"top_k": lambda i: scores.topk(m.k), "top_p": lambda i: top_p(scores, m.p)}, scores
    )
    assert shares["top_k"] == 0.25 and shares["top_p"] == pytest.approx(0.25, abs=0.01)


def test_top_delta_rows_have_pictures_and_tables_of_their_own(tmp_path, capsys):
    from rich.console import Console

    quest = pd.DataFrame(latency_rows())
    step = quest[quest["what"] == "step"].assign(what="ffd_step", budget_tokens=float("nan"))
    rows = pd.concat(
        [
            quest,
            step.assign(density_target=0.05, density=0.052),
            step.assign(density_target=0.18, density=0.183),
            step.assign(what="top_k", keep_ratio=0.273, density=0.273),
            step.assign(keys="/a/long/way/to/kv.safetensors", layer=18, delta_target=5.0),
        ]
    )
    parts = split_latency(rows)
    assert [len(part) for part in parts.values()] == [16, 8, 8, 8, 8]
    assert "top-δ, 18% read" in list(parts)[2] and "rules, 27.3% kept" in list(parts)[3]
    assert list(parts)[4].endswith("top-δ at δ = 5, layer 18 of kv.safetensors")
    keyed = rows.assign(cell_key=rows["context"].astype(str))
    assert len(frame_of(keyed)) == len(rows)  # each is a measurement of its own
    assert len(latency_pictures(rows, tmp_path)) == 3 + 4 * 2
    print_results(rows.to_dict("records"), None, Console(width=200))  # type: ignore
    assert "ffd_step, 18.3%" in capsys.readouterr().out
    pairs = paired_timings(rows, rows.assign(median_us=rows["median_us"] * 2))
    steps = pairs[pairs["work"] == "ffd_step"]  # each density, layer and δ meets its own
    assert len(steps) == 24 and set(steps["density_target"].dropna()) == {0.05, 0.18}
    assert (pairs["ratio"] == 2).all()


def test_timing_is_a_median_with_its_tenths():
    spread = timing([*range(1, 100), 10_000])
    assert (spread.median_us, round(spread.p10_us), round(spread.p90_us)) == (50.5, 11, 90)


def test_speedups_are_those_of_graphs_and_losing_cells_are_there():
    table = speedups(pd.DataFrame(latency_rows()))
    assert table.loc[1, 4096] == pytest.approx(4.096 / 6) and table.loc[8, 8192] > 10
    line = pd.DataFrame(latency_rows()).query("what == 'dense' and graph and batch == 8")
    assert slope(line["context"], line["median_us"]) == pytest.approx(8.0)


def test_pictures_page_and_table_are_made_from_rows(tmp_path):
    rows = pd.DataFrame(latency_rows())
    pictures = latency_pictures(rows, tmp_path)
    assert [p.name for p in pictures] == [
        "latency.png",
        "latency_speedup.png",
        "latency_ceiling.png",
    ]
    assert all(p.stat().st_size > 10_000 for p in pictures)
    page = live_page(rows, [], pictures)
    assert "Latency, qwen shapes" in page and "vs best" in page
    two = pd.concat([rows, rows.assign(page_size=16)])
    assert len(split_latency(two)) == 2 and len(latency_pictures(two, tmp_path / "two")) == 6


def test_the_table_stars_what_fits_in_the_cache(capsys):
    from rich.console import Console

    print_results(latency_rows(), None, Console(width=160))  # type: ignore
    shown = capsys.readouterr().out
    assert "1.00 (25%)*" in shown and "0.68×" in shown and "eager" in shown


def whole_task(tmp_path, **change: Any) -> pd.DataFrame:
    from sparse_eval.cli.progress import Progress
    from sparse_eval.results import CellStore

    task = TASK | {"batches": [2], "contexts": [8192], "repeats": 5} | change
    shapes = {"num_heads": 12, "num_kv_heads": 2, "head_dim": 128}
    settings = SimpleNamespace(
        task=task | {"shapes": shapes},
        model=yaml.safe_load(
            (
                Path(__file__).parent.parent / "conf/model/deepseek_r1_distill_qwen_1_5b.yaml"
            ).read_text()
        ),
        policies=[SimpleNamespace(label="quest", policy=Quest(page_size=64))],
        budgets=(2048,),
        protocol={"name": "decode"},
        dense_layers=(0, 1),
        backend="triton",
        device="cuda",
        dtype="bfloat16",
        seed=0,
    )
    kit = KITS["latency"]
    batches = kit.task(settings, Progress()).run(CellStore(tmp_path))  # type: ignore
    return pd.DataFrame([row for rows in batches for row in rows])


def ours(names: Iterable[str]) -> set[str]:
    """Without the kernels of other packages that happen to be installed."""
    return {*names} - {*OTHERS}


@pytest.mark.gpu
def test_top_delta_and_the_rules_on_this_gpu(tmp_path):
    frame = whole_task(tmp_path, what=["sdpa", *FFD_PARTS, "rules"], densities=[0.1, 0.3])
    graphs = frame[frame["graph"]]
    assert ours(graphs["what"]) == {"sdpa", *FFD_PARTS, "top_delta", "top_k", "top_p"}
    assert (graphs["median_us"] > 0).all()
    parts = graphs[graphs["what"].isin(FFD_PARTS)]
    assert (abs(parts["density"] - parts["density_target"]) < 0.02).all()
    rules = graphs[graphs["keep_ratio"].notna()]
    assert len(rules) == 3 and (abs(rules["density"] - 0.273) < 0.02).all()


@pytest.mark.gpu
def test_the_whole_task_on_this_gpu(tmp_path):
    frame = whole_task(tmp_path)
    graphs = frame[frame["graph"]].set_index("what")["median_us"]
    assert ours(graphs.index) == {"sdpa", "dense", "metadata", "select", "attend", "step"}
    assert (frame["median_us"] > 0).all() and (frame["ceiling_fraction"] < 1.1).all()
    assert graphs["step"] <= 1.15 * (graphs["metadata"] + graphs["select"] + graphs["attend"])
    eager = frame[~frame["graph"]].set_index("what")["median_us"]
    assert eager["step"] > graphs["step"]
