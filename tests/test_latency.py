"""task=latency: its settings, its arithmetic and its pictures; on a GPU the whole task."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
import yaml

from sparse_eval.__main__ import main
from sparse_eval.cli.kits import KITS
from sparse_eval.latency.cell import Cell
from sparse_eval.latency.clock import timing
from sparse_eval.latency.config import Shapes, check_latency, latency_config
from sparse_eval.policies.quest import Quest
from sparse_eval.policies.window import Window
from sparse_eval.reporting.page_live import live_page
from sparse_eval.reporting.plots_latency import latency_pictures
from sparse_eval.reporting.show_latency import print_results
from sparse_eval.reporting.summarise_latency import slope, speedups, split_latency
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
        ({"lists": "nowhere.safetensors"}, "task.lists must be scattered or a capture's path"),
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


def test_only_quest_has_a_select_to_time():
    with pytest.raises(ValueError, match="policy must be quest"):
        check_latency(TASK, INFO, Window(), "cuda")
    with pytest.raises(ValueError, match="32,768 pages"):
        check_latency(TASK, INFO, Quest(page_size=1), "cuda")
    check_latency(TASK, INFO, Quest(page_size=16), "cuda")


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
    longer = Cell(**vars(cell) | {"context": 2**17})
    assert longer.bytes_of("attend") == cell.bytes_of("attend")


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


@pytest.mark.gpu
def test_the_whole_task_on_this_gpu(tmp_path):
    from sparse_eval.cli.progress import Progress
    from sparse_eval.results import CellStore

    task = TASK | {"batches": [2], "contexts": [8192], "repeats": 5}
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
    rows = next(iter(kit.task(settings, Progress()).run(CellStore(tmp_path))))  # type: ignore
    frame = pd.DataFrame(rows)
    graphs = frame[frame["graph"]].set_index("what")["median_us"]
    assert set(graphs.index) == {"sdpa", "dense", "metadata", "select", "attend", "step"}
    assert (frame["median_us"] > 0).all() and (frame["ceiling_fraction"] < 1.1).all()
    assert graphs["step"] <= 1.15 * (graphs["metadata"] + graphs["select"] + graphs["attend"])
    eager = frame[~frame["graph"]].set_index("what")["median_us"]
    assert eager["step"] > graphs["step"]
