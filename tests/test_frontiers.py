"""Recall at equal tokens and at equal bytes, who is ahead by which, and the pictures of it."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
from PIL import Image
from rich.console import Console

from sparse_eval import frontiers as command
from sparse_eval.report import page_of
from sparse_eval.reporting import plots, plots_density, plots_frontier
from sparse_eval.reporting.frontiers import (
    Ranking,
    equal_shares,
    gaps,
    held_at,
    line_of,
    points,
    rank_pairs,
    ranking_sentence,
)
from sparse_eval.reporting.tables_live import budget_of
from sparse_eval.reporting.tables_lm_eval import scores_table
from sparse_eval.results import write_parquet
from tests.factories import NAN, recall_rows

SHARES = (0.0625, 0.125, 0.25, 0.5)


def rows_of(policy: str, recall: list[float], metadata: float, **common) -> pd.DataFrame:
    """Two prompts, two layers (one dense), one head; metadata as a share of what dense reads."""
    budgets = [int(4096 * share) for share in SHARES]
    rows = pd.DataFrame(
        recall_rows((policy,), budgets, num_samples=2, num_layers=3, num_kv_heads=1, **common)
    )
    held = dict(zip(budgets, recall, strict=True))
    rows["mass_recall"] = rows["budget_tokens"].map(held) + 0.002 * rows["sample"]
    rows["lse_error"] = -np.log(rows["mass_recall"])
    rows["bytes_metadata"] = np.where(rows["dense_layer"], 0, metadata * rows["bytes_dense"])
    return rows


def adaptive_rows(policy: str, recall: float, share: float) -> pd.DataFrame:
    rows = rows_of(policy, [recall] * 4, 1 / 16)
    rows = rows[rows["budget_tokens"] == 256]
    sparse = ~rows["dense_layer"]
    tokens = np.where(sparse, share, 1.0) * 4096
    return rows.assign(
        budget_tokens=NAN,
        adaptive=True,
        tokens_read=tokens,
        density=tokens / 4096,
        bytes_kv=tokens / 4096 * rows["bytes_dense"],
        density_head=np.where(sparse, share / 2, NAN),
    )


# `dear` holds more at every budget and reads a quarter of the cache more to choose
DEAR = rows_of("dear", [0.80, 0.86, 0.92, 0.98], 0.25)
CHEAP = rows_of("cheap", [0.78, 0.84, 0.90, 0.96], 0.0)
ORACLE = rows_of("oracle", [0.9, 0.93, 0.96, 0.99], NAN)
BOTH = pd.concat([DEAR, CHEAP, ORACLE])


def test_shares_are_of_what_dense_reads_in_the_layers_that_policies_act_on():
    table = points(BOTH).set_index(["policy", "budget_tokens", "prompt"])
    dear, oracle = table.loc["dear"], table.loc["oracle"]
    assert sorted(set(dear["tokens_share"])) == pytest.approx(SHARES)
    assert sorted(set(dear["bytes_share"])) == pytest.approx([s + 0.25 for s in SHARES])
    assert oracle["bytes_share"].isna().all()


def test_recall_between_points_is_on_the_line_and_beyond_them_unknown():
    table = equal_shares(BOTH, [0.05, 0.1875, 0.375], "cheap").set_index(
        ["axis", "policy", "share"]
    )
    assert table.loc[("tokens", "cheap", 0.1875), "recall"] == pytest.approx(0.87 + 0.001)
    assert math.isnan(table.loc[("tokens", "cheap", 0.05), "recall"])
    assert table.loc[("tokens", "dear", 0.375), "difference"] == pytest.approx(0.02)
    assert table.loc[("bytes", "dear", 0.375), "recall"] == pytest.approx(0.861)
    assert table.loc[("bytes", "dear", 0.375), "difference"] == pytest.approx(0.86 - 0.93)
    assert table.loc[("bytes", "dear", 0.1875), "n"] == 0
    assert table.loc[("bytes", "oracle", 0.375), "n"] == 0


def test_a_reference_that_was_not_measured_is_refused():
    with pytest.raises(ValueError, match="against must be one of dear, cheap, oracle, got 'quest'"):
        equal_shares(BOTH, [0.1], "quest")


def test_who_is_ahead_at_equal_tokens_may_be_behind_at_equal_bytes():
    (turn,) = rank_pairs(BOTH).turned
    assert (turn.first, turn.second) == ("dear", "cheap")
    assert turn.by_tokens.mean == pytest.approx(0.02) and turn.by_bytes.mean < -0.05
    sentence = ranking_sentence(BOTH)
    share = f"{turn.share:.1%}"
    assert f"reading {share} of the tokens dear holds 0.020 ± 0.000 more of the mass" in sentence
    assert f"reading {share} of the bytes 0.106" in sentence and "n = 2 prompts" in sentence


def test_policies_that_rank_alike_are_said_to():
    alike = pd.concat([rows_of("dear", [0.80, 0.86, 0.92, 0.98], 0.01), CHEAP])
    assert rank_pairs(alike).turned == []
    assert ranking_sentence(alike).startswith("Tokens read and bytes read rank the policies alike")


def test_a_difference_within_its_error_turns_nothing():
    noisy = DEAR.copy()
    noisy["mass_recall"] -= np.where(noisy["sample"] == 1, 0.06, 0.0)
    noise, calm = (held_at(points(x), "tokens", [0.25]) for x in (noisy, CHEAP))
    assert gaps(noise, calm)[0.25].error == pytest.approx(0.03)
    assert rank_pairs(pd.concat([noisy, CHEAP])).turned == []


def test_a_pair_is_named_above_two_standard_errors_only():
    def pair(spread: float) -> pd.DataFrame:
        wide = DEAR.copy()
        wide["mass_recall"] += np.where(wide["sample"] == 1, spread, -spread)
        return pd.concat([wide, CHEAP])

    assert rank_pairs(pair(0.009)).turned and not rank_pairs(pair(0.011)).turned  # of 0.020


@pytest.mark.parametrize("metadata", [0.0, 0.1, 0.25])
def test_policies_that_read_the_same_metadata_are_ranked_alike(metadata):
    """Their curves cross: the same share of tokens and of bytes stand on two sides of it."""
    early = rows_of("early", [0.90, 0.91, 0.92, 0.93], metadata)
    late = rows_of("late", [0.80, 0.90, 0.95, 0.99], metadata)
    both = pd.concat([early, late])
    assert rank_pairs(both) == Ranking([], 1, 2)
    assert ranking_sentence(both).startswith("Tokens read and bytes read rank the policies alike")


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        (DEAR, "there are no two policies that leave something out"),
        (pd.concat([DEAR, adaptive_rows("ffd", 0.9, 0.9)]), "no two policies read the same share"),
        (pd.concat([DEAR, ORACLE]), "no two policies read the same share of tokens and of bytes"),
        (BOTH[BOTH["sample"] == 0], "one prompt has no standard error"),
    ],
)
def test_what_cannot_be_compared_is_not_said_to_rank_alike(rows, why):
    told = ranking_sentence(rows)
    assert f"nothing could be compared, {why}" in told and "alike" not in told


def test_variants_of_a_threshold_are_points_of_one_line():
    assert line_of("ffd:delta=7.0") == "ffd" and line_of("ffd:bits=4:delta=7.0") == "ffd:bits=4"
    assert line_of("oracle_topp:p=0.9,peak=all") == "oracle_topp:peak=all"
    two = pd.concat([adaptive_rows("ffd", 0.9, 0.2), adaptive_rows("ffd:delta=7.0", 0.95, 0.4)])
    table = equal_shares(pd.concat([two, CHEAP]), [0.3], "cheap").set_index(["axis", "policy"])
    assert table.loc[("tokens", "ffd"), "recall"] == pytest.approx(0.926)
    assert table.loc[("tokens", "ffd"), "difference"] == pytest.approx(0.925 - 0.912)


def test_a_line_of_one_policy_is_drawn_under_its_own_name():
    name = "quest_topdelta:score.name=mean:delta=4"
    assert set(points(adaptive_rows(name, 0.9, 0.2))["line"]) == {name}


def test_the_command_prints_both_axes_and_the_sentence(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(command, "make_console", lambda _: Console(width=150))
    write_parquet(BOTH, tmp_path / "rows.parquet")
    table = tmp_path / "table.csv"
    words = [str(tmp_path), "--against", "cheap", "--at", "0.125,0.5", "--csv", str(table)]
    assert command.main(words) == 0
    said = capsys.readouterr().out
    assert "recall at equal tokens" in said and "recall at equal bytes" in said
    assert "0.861 ± 0.001 (+0.020 ± 0.000)" in said and "rank policies differently" in said
    assert len(pd.read_csv(table)) == 2 * 2 * 3


def test_what_was_not_measured_says_why(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(command, "make_console", lambda _: Console(width=150))
    write_parquet(pd.concat([BOTH, adaptive_rows("ffd", 0.9, 0.4)]), tmp_path / "rows.parquet")
    assert command.main([str(tmp_path), "--at", "0.05,0.125,0.6"]) == 0
    said = capsys.readouterr().out
    tokens, in_bytes = said.split("recall at equal bytes")
    (ffd,) = [line for line in tokens.splitlines() if "ffd" in line]
    assert ffd.count("reads ≥ 40.0%") == 2 and ffd.count("reads ≤ 40.0%") == 1
    (oracle,) = [line for line in in_bytes.splitlines() if "oracle" in line]
    assert oracle.count("unknown") == 3 and "12.5%" in tokens and "in brackets" not in said


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--at", "5"], "--at must be shares in (0, 1] with commas, got '5'"),
        (["--at", ""], "--at must be shares in (0, 1] with commas, got ''"),
        (["--against", "full"], "against must be one of dear, cheap, oracle, got 'full'"),
    ],
)
def test_a_bad_argument_is_one_line(words, line, tmp_path, capsys):
    write_parquet(BOTH, tmp_path / "rows.parquet")
    assert command.main([str(tmp_path), *words]) == 2
    assert line in capsys.readouterr().err


# Pictures


@pytest.fixture
def drawn(monkeypatch, tmp_path):
    """Draws a picture, checks that it is one, and returns its axes."""
    figures = []

    def watched(figure, path):
        figures.append(figure)
        return plots.save(figure, path)

    monkeypatch.setattr(plots_frontier, "save", watched)
    monkeypatch.setattr(plots_density, "save", watched)

    def draw(plot, *arguments):
        path = tmp_path / "picture.png"
        assert plot(arguments[0], path, *arguments[1:]) == path
        with Image.open(path) as image:
            assert image.format == "PNG" and image.width > 1000
        return figures[-1].axes

    return draw


ADAPTIVE = pd.concat(
    [BOTH, adaptive_rows("ffd", 0.9, 0.2), adaptive_rows("ffd:delta=7.0", 0.95, 0.4)]
)


def test_frontiers_stand_side_by_side_and_an_oracle_has_no_bytes(drawn):
    tokens, in_bytes = drawn(plots_frontier.frontiers, ADAPTIVE)[:2]
    names = {c.get_label(): c.lines[0].get_xydata() for c in tokens.containers}
    assert set(names) == {"dear", "cheap", "oracle (not realisable)", "ffd"}
    assert len(names["ffd"]) == 2
    bytes_of = {c.get_label(): c.lines[0].get_xydata() for c in in_bytes.containers}
    assert np.isnan(bytes_of["oracle (not realisable)"][:, 0]).all()
    assert bytes_of["dear"][0, 0] == pytest.approx(0.3125)
    assert "bytes" in in_bytes.get_xlabel() and "tokens" in tokens.get_xlabel()


def test_the_lse_error_stands_beside_recall_on_a_log_scale(drawn):
    recall, error = drawn(plots_frontier.lse_curve, ADAPTIVE)[:2]
    assert "recall" in recall.get_ylabel() and "log-sum-exp" in error.get_ylabel()
    assert error.get_yscale() == "log"
    lines = {c.get_label(): c.lines[0].get_xydata() for c in error.containers}
    assert lines["cheap"][0, 1] == pytest.approx(-np.log([0.78, 0.782]).mean())


def test_without_any_lse_error_the_panel_says_so(drawn):
    rows = BOTH.assign(lse_error=0.0)
    recall, error = drawn(plots_frontier.lse_curve, rows)[:2]
    assert recall.containers and error.get_yscale() == "linear"
    assert [t.get_text() for t in error.texts] == ["nothing above 0 to draw"]
    assert error.get_position().width > 0.3


def test_density_is_drawn_per_head_and_as_read(drawn):
    assert plots_density.choosing_policies(ADAPTIVE) == ["ffd", "ffd:delta=7.0"]
    assert plots_density.choosing_policies(BOTH) == []
    own, union = drawn(plots_density.density_heatmap, ADAPTIVE, "ffd")[:2]
    assert "chosen by a query head: 10.0%" in own.get_title(loc="left")
    assert "What ffd reads" in own.figure.get_suptitle()
    assert "20.0%" in union.get_title(loc="left")
    assert len(union.patches) == 2  # dense layers
    assert np.nanmax(union.images[0].get_array()) == pytest.approx(0.2)


def test_the_page_shows_the_sentence_and_the_pictures(tmp_path):
    path = plots_frontier.frontiers(BOTH, tmp_path / "read_frontiers.png")
    page = page_of(BOTH, [], [path])
    assert "rank policies differently" in page and 'alt="read_frontiers"' in page


def test_live_tables_tell_adaptive_from_all():
    assert budget_of({"budget_tokens": 512.0}) == "512"
    assert budget_of({"budget_tokens": NAN, "density": 1.0}) == "all"
    assert budget_of({"budget_tokens": NAN, "density": 0.183}) == "adaptive: 18.3%"


def test_an_adaptive_arm_is_one_column_whatever_it_read_in_each_task():
    lines = [
        {"policy": policy, "budget_tokens": budget, "is_dense": policy == "full", "density": read}
        for policy, budget, reads in (
            ("full", NAN, (1.0, 1.0)),
            ("ffd", NAN, (0.2, 0.3)),
            ("quest", 512.0, (0.1, 0.2)),
        )
        for read in reads
    ]
    table = pd.DataFrame(lines).assign(
        lm_task=["a", "b"] * 3, gated=False, n=4, value=0.5, verdict=""
    )
    shown = scores_table(table)
    assert shown.head == ["task", "n", "full all", "ffd", "quest 512"]
    assert shown.lines == [[task, "4", "0.50", "0.50", "0.50"] for task in ("a", "b")]
