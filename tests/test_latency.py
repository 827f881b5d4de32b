"""task=latency: its arithmetic, tables and pictures; on a GPU the whole task."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pandas as pd
import pytest
import torch

from sparse_eval.cli.kits import KITS
from sparse_eval.kernels.thumbnail import pack_residual, pack_thumbnail
from sparse_eval.latency.baselines import (
    OTHERS,
)
from sparse_eval.latency.cell import Cell
from sparse_eval.latency.clock import timing
from sparse_eval.latency.config import FFD_PARTS, Shapes
from sparse_eval.latency.ffd_cell import FFDBuffer, FFDCell
from sparse_eval.latency.rules import kept, matched, top_p
from sparse_eval.policies.quest import Quest
from sparse_eval.reporting.compare_latency import paired_timings
from sparse_eval.reporting.page_live import live_page
from sparse_eval.reporting.plots_latency import latency_pictures
from sparse_eval.reporting.show_latency import print_results
from sparse_eval.reporting.summarise_latency import slope, speedups, split_latency
from sparse_eval.storage.table import frame_of
from tests.factories import latency_rows, latency_settings


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

    task = {"batches": [2], "contexts": [8192], "repeats": 5} | change
    settings = latency_settings(task, Shapes(12, 2, 128), 64, 2048, "cuda", "bfloat16")
    batches = KITS["latency"].task(settings, Progress()).run(CellStore(tmp_path))
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
