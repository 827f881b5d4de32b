"""The cache folder: its listing, its cap, files of killed processes; and what a process keeps."""

from __future__ import annotations

import os
import time
from pathlib import Path

from sparse_eval.cache import entries, main, make_room, making, touch
from sparse_eval.storage import keep


def put(folder: Path, kind: str, name: str, size: int, age: float = 0) -> Path:
    path = folder / kind / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(size))
    os.utime(path, (time.time() - age,) * 2)
    return path


def test_room_is_made_by_what_was_used_longest_ago(tmp_path):
    old, used, new = (
        put(tmp_path, "captures", name, 1000, age)
        for name, age in (("old", 300), ("used", 400), ("new", 10))
    )
    touch(used)
    cell = put(tmp_path, "cells", "cell", 5000, 900)
    removed = make_room(tmp_path, 2e-6)
    assert [entry.path for entry in removed] == [old]
    assert used.exists() and new.exists() and cell.exists()


def test_what_was_just_written_stays(tmp_path):
    path = put(tmp_path, "captures", "large", 10_000)
    assert make_room(tmp_path, 1e-6, keep=path) == [] and path.exists()


def test_what_killed_processes_left_goes_after_an_hour(tmp_path):
    stale = put(tmp_path, "captures", ".x.1.partial", 10, 7200)
    young = put(tmp_path, "captures", ".y.2.partial", 10, 60)
    make_room(tmp_path, 1)
    assert not stale.exists() and young.exists()
    assert entries(tmp_path) == []


def test_the_command_lists_and_prunes(tmp_path, capsys):
    put(tmp_path, "captures", "a", 2_000_000)
    put(tmp_path, "cells", "b", 1000)
    assert main([str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert "captures" in told and "2.0" in told and "cells" in told
    assert main([str(tmp_path), "--prune", "0"]) == 0
    assert "removed 1 files, 2.0 MB" in capsys.readouterr().out
    assert main([str(tmp_path), "--clear", "cells"]) == 0
    assert entries(tmp_path) == []
    assert main([str(tmp_path / "nothing")]) == 2
    assert capsys.readouterr().err.startswith("error: no cache folder at")


def test_of_two_processes_one_makes_and_the_other_waits(tmp_path):
    import threading

    order = []

    def second() -> None:
        with making(tmp_path / "captures" / "x", "making x"):
            order.append("second")

    with making(tmp_path / "captures" / "x", "making x"):
        thread = threading.Thread(target=second)
        thread.start()
        time.sleep(0.2)
        order.append("first")
    thread.join()
    assert order == ["first", "second"]


def test_where_no_lock_can_be_written_the_work_goes_on(tmp_path):
    (tmp_path / "file").write_text("")
    with making(tmp_path / "file" / "x", "making x"):
        pass


def test_a_process_keeps_no_more_captures_than_its_share(capture, monkeypatch):
    keep.forget_captures()
    made = []

    def make():
        made.append(1)
        return capture

    for key in ("a", "a", "b", "a"):
        assert keep.shared_capture(key, "cpu", make) is capture
    assert len(made) == 2
    monkeypatch.setattr(keep, "CAPTURE_BYTES", int(1.5 * keep.bytes_of(capture)))
    keep.shared_capture("c", "cpu", make)
    keep.shared_capture("b", "cpu", make)
    assert len(made) == 4
    keep.forget_captures()
