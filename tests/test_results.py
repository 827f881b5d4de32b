"""Journal, cell store, parquet, reading back, and what identifies a cell."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from sparse_eval import provenance as provenance_module
from sparse_eval.parts import file_states
from sparse_eval.policies.quest import Quest
from sparse_eval.provenance import measuring_files
from sparse_eval.results import (
    CellStore,
    Journal,
    cell_key,
    code_hash,
    frame_of,
    load,
    provenance,
    write_parquet,
    write_summary,
)
from sparse_eval.storage.columns import COMMON_COLUMNS, RECALL_COLUMNS
from sparse_eval.storage.files import to_json, write_atomic
from tests.factories import NAN, recall_rows

KEY = "a" * 64


def few_rows(**options):
    defaults: dict[str, Any] = {"policies": ("quest", "oracle"), "budgets": (256,), "num_layers": 3}
    return recall_rows(**(defaults | {"num_kv_heads": 1} | options))


def written_run(folder: Path, rows=None) -> Path:
    Journal(folder).append(few_rows() if rows is None else rows)
    return folder


# the journal


def test_journal_returns_what_was_appended(tmp_path):
    rows = few_rows()
    journal = Journal(tmp_path)
    journal.append(rows[:2])
    journal.append(rows[2:])
    assert to_json(Journal.read(tmp_path)) == to_json(rows)


def test_nan_is_null_in_the_journal_and_nan_again_when_read(tmp_path):
    Journal(tmp_path).append([{"bytes_metadata": NAN, "revision": None, "note": None}])
    assert json.loads((tmp_path / "rows.jsonl").read_text())["bytes_metadata"] is None
    [row] = Journal.read(tmp_path)
    assert np.isnan(row["bytes_metadata"])
    assert row["revision"] is None and row["note"] is None


def test_a_torn_last_line_is_dropped(tmp_path):
    journal = written_run(tmp_path) / "rows.jsonl"
    whole = Journal.read(journal)
    journal.write_bytes(journal.read_bytes()[:-7])
    assert len(Journal.read(journal)) == len(whole) - 1


def test_a_journal_goes_on_after_a_torn_line(tmp_path):
    journal = written_run(tmp_path) / "rows.jsonl"
    kept = len(Journal.read(journal)) - 1
    journal.write_bytes(journal.read_bytes()[:-7])
    Journal(tmp_path).append(few_rows(budgets=(512,)))
    rows = Journal.read(journal)
    assert len(rows) == kept + 6
    assert rows[-1]["budget_tokens"] == 512


def test_a_damaged_line_before_the_last_is_an_error_that_names_it(tmp_path):
    journal = written_run(tmp_path) / "rows.jsonl"
    lines = journal.read_text().splitlines()
    lines[1] = lines[1][:20]
    journal.write_text("\n".join(lines) + "\n")
    with pytest.raises(ValueError, match=r"rows.jsonl, line 2: expected a row"):
        Journal.read(journal)


def test_a_failed_append_leaves_the_journal_whole(tmp_path, monkeypatch):
    journal = Journal(written_run(tmp_path))
    before = journal.path.read_bytes()

    def full_disk(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space left"):
        journal.append(few_rows(budgets=(512,)))
    assert journal.path.read_bytes() == before


def test_an_infinity_is_refused(tmp_path):
    with pytest.raises(ValueError, match="finite"):
        Journal(tmp_path).append([{"lse_error": float("inf")}])


def test_a_killed_process_keeps_every_appended_cell(tmp_path):
    code = (
        "import os, sys; from sparse_eval.storage.journal import Journal\n"
        "j = Journal(sys.argv[1])\n"
        "for i in range(5): j.append([{'cell_key': str(i)}])\n"
        "os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)])
    assert done.returncode == -9
    assert [row["cell_key"] for row in Journal.read(tmp_path)] == list("01234")


# the cell store


def test_a_cell_comes_back_and_a_missing_one_is_none(tmp_path):
    store, rows = CellStore(tmp_path), few_rows()
    assert store.get(KEY) is None and not store.has(KEY)
    store.put(KEY, rows)
    assert to_json(store.get(KEY)) == to_json(rows)
    assert store.has(KEY)
    assert (tmp_path / "cells" / KEY).is_file()


@pytest.mark.parametrize("damage", ["cut", "changed", "emptied"])
def test_a_damaged_cell_is_discarded_with_a_warning(tmp_path, damage):
    store = CellStore(tmp_path)
    store.put(KEY, few_rows())
    path = tmp_path / "cells" / KEY
    whole = path.read_bytes()
    damaged = {"cut": whole[:-30], "changed": whole.replace(b"0.9", b"0.8", 1), "emptied": b""}
    path.write_bytes(damaged[damage])
    assert path.read_bytes() != whole
    with pytest.warns(UserWarning, match="damaged cell"):
        assert store.get(KEY) is None
    assert not path.exists()


WRITE_OFTEN = """
import sys
from sparse_eval.storage.cells import CellStore
for _ in range(20):
    CellStore(sys.argv[1]).put("a" * 64, [{"mass_recall": float(sys.argv[2])}] * 200)
"""


@pytest.mark.filterwarnings("error")
def test_two_processes_writing_one_cell_never_show_half_of_it(tmp_path):
    command = [sys.executable, "-c", WRITE_OFTEN, str(tmp_path)]
    writers = [subprocess.Popen([*command, value]) for value in ("0.25", "0.75")]
    seen = set()
    while any(writer.poll() is None for writer in writers):
        rows = CellStore(tmp_path).get(KEY) or []
        seen.add((len(rows), *{row["mass_recall"] for row in rows}))
    assert [writer.returncode for writer in writers] == [0, 0]
    assert seen - {(0,)} <= {(200, 0.25), (200, 0.75)} and len(seen) > 1
    assert os.listdir(tmp_path / "cells") == [KEY]


def test_a_key_that_is_a_path_is_refused(tmp_path):
    with pytest.raises(ValueError, match="64 hexadecimal"):
        CellStore(tmp_path).get("../../secret")


# identity


def test_cell_key_knows_order_of_lists_but_not_of_keys():
    key = cell_key({"a": 1, "b": [1, 2]})
    assert len(key) == 64 and key == cell_key({"b": [1, 2], "a": 1})
    assert key != cell_key({"a": 1, "b": [2, 1]})
    assert key != cell_key({"a": "1", "b": [1, 2]})


@pytest.mark.parametrize("value", [NAN, object(), {1, 2}])
def test_cell_key_refuses_what_it_cannot_write_down(value):
    with pytest.raises(ValueError):
        cell_key({"a": value})


def test_code_hash_covers_kernels_and_measuring_but_no_output_and_no_policy():
    package = provenance_module.PACKAGE
    covered = {str(path.relative_to(package)) for path in measuring_files()}
    measuring = {"kernels/sparse_decode/api.py", "metrics.py", "ledger.py"}
    measuring |= {"evaluator.py", "attention.py", "capture.py", "prefill.py", "core.py"}
    assert measuring <= covered
    assert not covered & {"plots.py", "report.py", "tracking.py", "results.py", "app.py"}
    assert not any(name.startswith("policies/") for name in covered)


def test_a_policy_answers_for_itself_and_what_it_is_built_on(tmp_path, monkeypatch):
    shutil.copytree(provenance_module.POLICIES, tmp_path / "policies")
    monkeypatch.setattr(provenance_module, "POLICIES", tmp_path / "policies")
    before = code_hash(Quest)
    (tmp_path / "policies" / "both_ends.py").write_text("new = 1\n")
    for name in ("snapkv", "oracle"):
        (tmp_path / "policies" / f"{name}.py").write_text("# edited\n")
    assert code_hash(Quest) == before
    for name in ("base", "topk", "metadata"):
        (tmp_path / "policies" / f"{name}.py").write_text("# edited\n")
        assert code_hash(Quest) != before
        before = code_hash(Quest)


def test_code_hash_changes_with_a_policy_of_ones_own(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / "own_policy.py"
    path.write_text("class Own: pass\n")
    from own_policy import Own  # type: ignore[import-not-found]

    before = code_hash(Own)
    assert before == code_hash(Own) != code_hash()
    path.write_text("class Own: x = 1\n")
    assert code_hash(Own) != before


def test_provenance_says_where_numbers_come_from():
    found = provenance(device="cpu", backend="torch", dtype="float32", started=datetime.now())
    for name in ("command", "torch", "transformers", "python", "cpu", "threads", "code_hash"):
        assert found[name], name
    assert found["gpu"] is None and found["device"] == "cpu"
    json.dumps(found, allow_nan=False)


def test_an_installed_package_takes_no_commit_from_a_strangers_repository(
    tmp_path, monkeypatch, capfd
):
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    inside = tmp_path / "site-packages" / "sparse_eval"
    inside.mkdir(parents=True)
    monkeypatch.setattr(provenance_module, "PACKAGE", inside)
    assert provenance_module.git("rev-parse", "HEAD") is None
    assert capfd.readouterr() == ("", "")


# tables


def test_columns_stand_in_the_contracts_order(tmp_path):
    rows = [dict(reversed(row.items())) | {"extra": 1} for row in few_rows()]
    expected = [name for name in COMMON_COLUMNS + RECALL_COLUMNS if name in rows[0]]
    assert list(frame_of(rows)) == [*expected, "extra"]


def test_parquet_and_journal_hold_the_same_table(tmp_path):
    written_run(tmp_path)
    write_parquet(tmp_path, tmp_path / "rows.parquet")
    from_parquet = load(tmp_path)
    (tmp_path / "rows.parquet").unlink()
    pd.testing.assert_frame_equal(from_parquet, load(tmp_path))
    assert from_parquet["dense_layers"][0] == (0, 1)
    assert json.loads(from_parquet["policy_config"][0])["page_size"] == 16
    assert np.isnan(from_parquet["bytes_metadata"]).sum() == 1


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "summary.json"
    write_summary(path, {"a": NAN})
    assert json.loads(path.read_text()) == {"a": None}
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write_atomic(path, b"half")
    assert os.listdir(tmp_path) == ["summary.json"]
    assert json.loads(path.read_text()) == {"a": None}


# load


def test_a_cell_that_lies_in_two_folders_counts_once(tmp_path):
    written_run(tmp_path / "first")
    written_run(tmp_path / "again", few_rows() + few_rows(budgets=(512,)))
    rows = load(str(tmp_path / "**"))
    assert len(rows) == 12
    assert sorted(rows["budget_tokens"].unique()) == [256, 512]


def test_load_reads_folders_files_globs_and_sweeps(tmp_path):
    for job in (0, 1):
        written_run(tmp_path / "sweep" / str(job), few_rows(seed=job))
    wanted = 12
    assert len(load(tmp_path / "sweep")) == wanted
    assert len(load(str(tmp_path / "sweep" / "*"))) == wanted
    assert len(load([tmp_path / "sweep" / "0", tmp_path / "sweep/1/rows.jsonl"])) == wanted


def test_brackets_in_a_folders_name_are_no_pattern(tmp_path):
    assert len(load(written_run(tmp_path / "0_budget=[256,512]"))) == 6


def test_rows_of_different_schemas_are_not_pooled(tmp_path):
    written_run(tmp_path / "new")
    written_run(tmp_path / "old", few_rows(schema=0))
    with pytest.raises(ValueError, match=r"different schemas cannot be pooled: 0 .*old.*1 .*new"):
        load(tmp_path)
    assert len(load(tmp_path / "old")) == 6


def test_rows_of_a_later_version_are_refused(tmp_path):
    with pytest.raises(ValueError, match="schema 99, this version reads up to 1"):
        load(written_run(tmp_path, few_rows(schema=99)))


def test_a_damaged_parquet_file_falls_back_on_the_journal(tmp_path):
    written_run(tmp_path)
    (tmp_path / "rows.parquet").write_bytes(b"PAR1 not really")
    with pytest.warns(UserWarning, match="damaged"):
        assert len(load(tmp_path)) == 6


def test_a_journal_newer_than_the_parquet_file_is_read(tmp_path):
    written_run(tmp_path)
    write_parquet(tmp_path, tmp_path / "rows.parquet")
    os.utime(tmp_path / "rows.parquet", (0, 0))
    Journal(tmp_path).append(few_rows(budgets=(512,)))
    assert len(load(tmp_path)) == 12


def test_nothing_to_load_is_one_clear_line(tmp_path):
    with pytest.raises(ValueError, match="nothing at .*missing"):
        load(tmp_path / "missing")
    with pytest.raises(ValueError, match="no rows in"):
        load(tmp_path)


def test_a_word_too_long_for_a_files_name_is_none():
    word = "l" * 300
    assert file_states([word, {"key": __file__}]).keys() == {__file__}
    with pytest.raises(ValueError, match="nothing at lll"):
        load(word)
