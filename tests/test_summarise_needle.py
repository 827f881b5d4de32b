"""Needle tables: unconditional accuracy, paired comparison, the gate, ranks; and the pictures."""

from __future__ import annotations

import math
import warnings

import pandas as pd
import pytest
from PIL import Image
from rich.console import Console

from sparse_eval.reporting import plots_needle
from sparse_eval.reporting.page_live import live_page
from sparse_eval.reporting.plots_live import read_ticks, with_known_bytes
from sparse_eval.reporting.plots_needle import needle_pictures
from sparse_eval.reporting.show_needle import print_gate
from sparse_eval.reporting.summarise_needle import (
    depth_table,
    gate_table,
    hit_table,
    noise_floor,
    split_needle,
    summarise_needle,
)
from sparse_eval.reporting.tables_live import answers_table, comparison_table, gate_lines
from sparse_eval.storage.columns import ALL_COLUMNS
from sparse_eval.storage.table import frame_of
from tests.needle_rows import NAN, answer_row, needle_run


def answers(counts: dict[str, str], **more) -> pd.DataFrame:
    """Rows of one depth from a string per policy: c correct, f fabricated, t truncated."""
    names = {"c": "correct", "f": "fabricated", "t": "truncated"}
    rows = [
        answer_row(policy, NAN if policy == "full" else 256, 0.5, i, names[letter], **more)
        for policy, letters in counts.items()
        for i, letter in enumerate(letters)
    ]
    return frame_of(rows)


def line(table: pd.DataFrame, policy: str) -> pd.Series:
    return table[table["policy"] == policy].iloc[0]


def summary(counts: dict[str, str], **more) -> pd.DataFrame:
    (part,) = split_needle(answers(counts, **more)).values()
    return summarise_needle(part)


def test_accuracy_and_outcomes_by_hand():
    table = summary({"full": "c" * 10, "quest": "c" * 6 + "ff" + "tt"})
    quest = line(table, "quest")
    assert quest["n"] == 10 and quest["accuracy"] == 0.6
    assert (quest["correct"], quest["fabricated"], quest["truncated"]) == (6, 2, 2)
    assert quest["low"] < 0.6 < quest["high"]
    assert quest["same_as_dense"] == 0.6
    # wordings take turns: 0 2 of 4, 1 2 of 3, 2 2 of 3
    assert quest["wording_spread"] == pytest.approx(2 / 3 - 1 / 2)


def test_a_difference_that_n_cannot_resolve_is_not_called_one():
    few = line(summary({"full": "c" * 5, "quest": "f" * 5}), "quest")
    assert math.isnan(few["rank"]) and few["verdict"] == "not ranked: n = 5"
    small = line(summary({"full": "c" * 20, "quest": "c" * 16 + "ffff"}), "quest")
    assert small["verdict"] == "no difference resolved" and small["resolvable"] == 0.3
    large = line(summary({"full": "c" * 20, "quest": "c" * 10 + "f" * 10}), "quest")
    assert large["verdict"] == "below dense" and large["p_value"] < 0.05
    assert large["difference"] == -0.5 and large["diff_high"] < 0


def test_not_inferior_takes_enough_prompts_without_a_loss():
    few = line(summary({"full": "c" * 20, "quest": "c" * 20}), "quest")
    assert few["verdict"] == "no difference resolved"
    many = line(summary({"full": "c" * 30, "quest": "c" * 30}), "quest")
    assert many["verdict"] == "not inferior (0.1)"


def test_better_than_dense_is_a_warning():
    table = summary({"full": "c" * 10 + "f" * 10, "quest": "c" * 20})
    assert line(table, "quest")["verdict"].startswith("ABOVE dense")


def test_ranks_share_a_place_until_a_difference_is_significant():
    table = summary(
        {"full": "c" * 20, "quest": "c" * 20, "snapkv": "c" * 17 + "fff", "window": "f" * 20}
    )
    ranks = {row["policy"]: row["rank"] for row in table.to_dict("records")}
    assert ranks["quest"] == ranks["snapkv"] == 1 and ranks["window"] == 3
    assert math.isnan(ranks["full"])


def test_what_the_gate_refused_is_shown_and_not_compared():
    rows = pd.concat(
        [
            answers({"full": "f" * 10, "quest": "c" * 10}, gated=True),
            answers({"full": "f" * 10}, role="gate", gated=True),
        ]
    )
    (part,) = split_needle(rows).values()
    quest = line(summarise_needle(part), "quest")
    assert quest["accuracy"] == 1 and quest["pairs"] == 0
    assert quest["verdict"] == "not ranked: dense gate" and math.isnan(quest["rank"])
    (gate,) = gate_table(part).to_dict("records")
    assert gate["not_ranked"] and (gate["gate_correct"], gate["gate_n"]) == (0, 10)


def test_a_gate_that_was_not_run_is_said_to_be():
    rows = answers({"full": "c" * 10, "quest": "c" * 10}, gated=True)
    (part,) = split_needle(rows).values()
    quest = line(summarise_needle(part), "quest")
    assert quest["verdict"] == "not ranked: dense gate not run"
    console = Console(record=True, width=120)
    print_gate(part, console)
    told = console.export_text()
    assert "not ranked, dense gate not run: passcode" in told and "not passed" not in told
    assert gate_lines(gate_table(part)).lines[0][-1] == "not run"


def test_the_picture_counts_heads_as_the_table_does():
    """The mean over answers of how many heads are above one half, not of a mean over answers."""
    rows = frame_of(needle_run(n=2, budgets=[96], policies=["quest"]))
    rows = rows.assign(page_hit_heads=rows["page_hit_heads"].astype(object))
    inner = rows["layer"].notna() & (rows["policy"] == "quest")
    odd = rows["sample"].str.endswith("/1")
    rows.loc[inner, "page_hit_heads"] = rows[inner].apply(
        lambda row: [0.9, 0.1, 0.6] if odd[row.name] else [0.2, 0.1, 0.6], axis=1
    )
    hits = hit_table(rows)
    above = hits[hits["policy"] == "quest"]["above_half"].sum()
    assert above == pytest.approx(28 * (2 + 1) / 2)


def test_an_adaptive_policy_is_labelled_by_what_it_reads(monkeypatch, tmp_path):
    figures = []
    monkeypatch.setattr(plots_needle, "save", lambda figure, path: figures.append(figure))
    rows = frame_of(needle_run(n=1, budgets=[96], policies=["quest", "window"]))
    is_ours = rows["policy"] == "window"
    rows.loc[is_ours, ["budget_tokens", "adaptive", "density"]] = [NAN, True, 0.183]
    (part,) = split_needle(rows).values()
    plots_needle.needle_heatmap(part, tmp_path / "x.png", gate_ran=False)
    plots_needle.needle_hits(rows, part, tmp_path / "x.png")
    depth, hits = figures
    labels = {
        a.get_title(loc="left"): [x.get_text() for x in a.get_xticklabels()] for a in depth.axes
    }
    assert labels["window"] == ["adaptive: 18.3%"] and labels["quest"] == ["96"]
    assert labels["full"] == ["all"] and "dense gate not run" in depth.get_supxlabel()
    titles = [axes.get_title(loc="left") for axes in hits.axes]
    assert titles[0].startswith("quest, 96 tokens: ") and "of the value's pages read" in titles[0]
    assert "tokens" not in hits.get_suptitle()
    assert titles[1].startswith("window (adaptive: 18.3%): ")


def test_dense_alone_has_every_picture_but_the_one_of_who_read(tmp_path):
    rows = frame_of(needle_run(n=1, policies=[]))
    (part,) = split_needle(rows).values()
    names = {path.name for path in plots_needle.needle_pictures(rows, part, tmp_path, "")}
    assert names == {f"needle_{x}_passcode.png" for x in ("depth", "read", "outcomes")}


def test_gate_samples_are_in_no_average():
    rows = pd.concat([answers({"full": "c" * 6}), answers({"full": "f" * 6}, role="gate")])
    (part,) = split_needle(rows).values()
    assert line(summarise_needle(part), "full")["accuracy"] == 1


def test_protocols_and_chat_formats_are_never_pooled():
    rows = pd.concat(
        [
            answers({"full": "c" * 4}),
            answers({"full": "f" * 4}, protocol="question"),
            answers({"full": "f" * 4}, chat="template:12345678"),
        ]
    )
    parts = split_needle(rows)
    assert len(parts) == 3 and all("protocol" in name and "chat" in name for name in parts)


def test_noise_floor_and_hits():
    rows = frame_of(needle_run(n=2))
    (part,) = split_needle(rows).values()
    floor = noise_floor(part)
    assert floor["n"] == 6 and floor["same_choice"] == 1
    hits = hit_table(rows)
    assert set(hits["kv_head"]) == {0, 1, 2} and hits["layer"].nunique() == 28
    assert len(hits) == 9 * 28 * 3


def test_wide_tables_are_in_one_piece():
    """Rows of all tasks have over a hundred columns, from which on pandas warns of pieces."""
    rows = needle_run(n=1, depths=[0.5], budgets=[96], policies=["quest"])
    wide = [dict.fromkeys(ALL_COLUMNS) | row for row in rows]
    with warnings.catch_warnings():
        warnings.simplefilter("error", pd.errors.PerformanceWarning)
        table = frame_of(wide)
        table["one more"] = 1.0
        (part,) = split_needle(table).values()
        hit_table(table)
    assert len(part) == 2


def test_pictures_of_a_setting_are_of_its_own_cells_under_its_labels():
    rows = pd.DataFrame(
        needle_run(n=1, depths=[0.5], budgets=[96], policies=["quest"])
        + [
            row | {"protocol": "question", "cell_key": row["cell_key"] + "q"}
            for row in needle_run()
        ]
    )
    part = next(iter(split_needle(rows).values()))
    layers = plots_needle.layers_of(frame_of(rows), part.assign(policy=part["policy"] + ":a=1"))
    assert set(layers["protocol"]) == {"decode"}
    assert set(layers["policy"]) == {"full:a=1", "quest:a=1"}


def test_depths_by_hand():
    rows = frame_of(needle_run(n=4, gated=[0.5]))
    (part,) = split_needle(rows).values()
    table = depth_table(part)
    assert (table["n"] == 4).all() and len(table) == 3 * 9
    assert set(table[table["gated"]]["depth"]) == {0.5}


@pytest.mark.parametrize(
    "options",
    [
        {"n": 3, "gated": [0.5]},
        {"n": 2, "contexts": [1024, 2048], "budgets": [128]},
        {"n": 1, "depths": [0.5], "budgets": [96], "policies": ["quest"]},
    ],
)
def test_pictures_are_drawn_and_the_page_holds_them(tmp_path, options):
    rows = frame_of(needle_run(**options))
    (part,) = split_needle(rows).values()
    pictures = needle_pictures(rows, part, tmp_path, "")
    assert len({p.name for p in pictures}) == len(pictures) >= 4
    assert all(min(Image.open(path).size) > 300 for path in pictures)
    page = live_page(rows, [{"folder": "run", "wall_seconds": 1.0}], pictures)
    assert page.count("data:image/png") == len(pictures)
    assert "protocol decode, chat none" in page and "http" not in page.split("</style>")[1]


def test_what_an_oracle_reads_is_not_known_and_told(tmp_path):
    rows = frame_of(needle_run(n=2, budgets=[96], policies=["quest"]))
    oracle = rows[rows["policy"] == "quest"].assign(policy="oracle", model_read_fraction=NAN)
    rows = pd.concat([rows, oracle.assign(cell_key="oracle" + oracle["cell_key"])])
    (part,) = split_needle(rows).values()
    found = answers_table(summarise_needle(part)).lines
    assert {cells[0]: cells[2] for cells in found} == {
        "full": "100.0%",
        "quest": "14.7%",
        "oracle": "n/a",
    }
    drawn, label = with_known_bytes(summarise_needle(part))
    assert set(drawn["policy"]) == {"full", "quest"} and "not drawn: oracle" in label
    page = live_page(rows, [], [])
    assert "nan" not in page.split("</style>")[1]


def test_a_gate_that_was_not_run_and_too_few_prompts_say_so():
    rows = frame_of(needle_run(n=1, depths=[0.5], budgets=[96], policies=["quest"]))
    (part,) = split_needle(rows).values()
    assert gate_lines(gate_table(part)).lines[0][3] == "not run"
    note = comparison_table(summarise_needle(part)).note
    assert "n too small to resolve any difference" in note


@pytest.mark.parametrize(
    ("least", "labelled"),
    [
        (0.55, [0.5, 0.6, 0.7, 0.8, 1]),
        (0.3, [0.3, 0.4, 0.5, 0.7, 1]),
        (0.12, [0.15, 0.2, 0.3, 0.5, 0.7, 1]),
        (0.02, [0.02, 0.05, 0.1, 0.2, 0.5, 1]),
    ],
)
def test_shares_are_labelled_as_they_fit(least, labelled):
    assert read_ticks(least / 1.15, 1.15) == labelled


def test_no_needle_rows_is_one_line():
    with pytest.raises(ValueError, match="expected rows of task needle"):
        split_needle(pd.DataFrame([{"task": "recall"}]))
