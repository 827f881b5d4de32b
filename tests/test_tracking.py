"""W&B offline, read back from its own files; and W&B broken, with the run going on."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pandas as pd
import pytest

from sparse_eval.results import write_summary
from sparse_eval.tracking import curves
from sparse_eval.tracking.tracker import NoTracker, make_tracker, track_sweep
from sparse_eval.tracking.wandb_run import run_id
from sparse_eval.tracking.wandb_service import has_key
from tests.factories import recall_rows

WANDB = {
    "name": "wandb",
    "mode": "offline",
    "project": "sparse_eval",
    "entity": None,
    "group": None,
    "tags": ["test"],
    "init_timeout": 5,
    "finish_timeout": 5,
}
CONFIG = {"policy": "quest", "budget": [256, 512], "model": {"id": "a/b"}}


def rows():
    return recall_rows(("quest", "oracle"), (256, 512), num_layers=4, num_kv_heads=1)


@pytest.fixture(autouse=True)
def no_credentials(monkeypatch, tmp_path):
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "no_netrc"))
    for name in ("DATA", "CACHE", "CONFIG"):
        monkeypatch.setenv(f"WANDB_{name}_DIR", str(tmp_path / "wandb_home"))


def tracked(folder: Path, config=CONFIG, say=print, cache_dir=None, **options):
    return make_tracker(
        WANDB | options,
        config=config,
        folder=folder,
        task="recall",
        say=say,
        cache_dir=cache_dir,
    )


def records(folder: Path) -> Iterator:
    """Records of the one offline run in a folder: LevelDB's log format, see its documentation."""
    from wandb.proto import wandb_internal_pb2 as pb

    [path] = folder.glob("wandb/offline-run-*/*.wandb")
    data, position, buffer = path.read_bytes(), 7, b""
    while position + 7 <= len(data):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        _, size, kind = struct.unpack("<IHB", data[position : position + 7])
        position += 7
        if kind == 0 and size == 0:
            break
        buffer += data[position : position + size]
        position += size
        if kind in (1, 4):
            record = pb.Record()  # type: ignore[attr-defined]
            record.ParseFromString(buffer)
            buffer = b""
            yield record


def items(entries) -> dict:
    return {(e.key or "/".join(e.nested_key)): json.loads(e.value_json) for e in entries}


class Logged:
    """What a finished offline run's file says; W&B's service may still be writing its end."""

    def __init__(self, folder: Path, said: Sequence[str] = ()) -> None:
        deadline = time.monotonic() + 10
        while not any(r.WhichOneof("record_type") == "exit" for r in records(folder)):
            assert time.monotonic() < deadline, "the run's file never ended"
            time.sleep(0.05)
        self.folder, self.said = folder, said
        self.history: list[dict] = []
        self.summary: dict = {}
        self.config: dict = {}
        self.artifacts: list[str] = []
        self.steps: dict[str, str] = {}
        self.exit_code: int | None = None
        for record in records(folder):
            kind = record.WhichOneof("record_type")
            if kind == "run":
                self.run = record.run
                self.config |= items(record.run.config.update)
            elif kind == "history":
                self.history.append(items(record.history.item))
            elif kind == "summary":
                self.summary |= items(record.summary.update)
            elif kind == "artifact":
                self.artifacts.append(record.artifact.type)
            elif kind == "metric":
                self.steps[record.metric.glob_name or record.metric.name] = (
                    record.metric.step_metric
                )
            elif kind == "exit":
                self.exit_code = record.exit.exit_code


@pytest.fixture(scope="module")
def logged(tmp_path_factory):
    """One offline run with everything in it."""
    folder = tmp_path_factory.mktemp("sweep") / "job"
    said: list[str] = []
    patch = pytest.MonkeyPatch()
    patch.delenv("WANDB_API_KEY", raising=False)
    for name in ("DATA", "CACHE", "CONFIG"):
        patch.setenv(f"WANDB_{name}_DIR", str(folder / "wandb_home"))
    tracker = tracked(folder, say=said.append)
    tracker.log_rows(rows())
    tracker.log_summary({"wall_seconds": 3.5, "config": {"x": 1}, "provenance": {"torch": "2"}})
    tracker.log_plots([picture(folder / "recall_curve.png"), page(folder / "report.html")])
    tracker.finish()
    patch.undo()
    return Logged(folder, said)


def picture(path: Path) -> Path:
    from PIL import Image

    Image.new("RGB", (4, 4)).save(path)
    return path


def page(path: Path) -> Path:
    path.write_text("<p>report</p>")
    return path


def test_offline_is_said_in_one_line_and_never_asks(logged):
    assert len(logged.said) == 1
    assert logged.said[0].startswith("W&B: offline, upload with: wandb sync ")
    assert Path(logged.said[0].split()[-1]).is_dir()


def test_the_run_carries_config_group_and_task(logged):
    assert logged.config["budget"] == [256, 512] and logged.config["model"] == {"id": "a/b"}
    assert logged.run.job_type == "recall" and logged.run.project == "sparse_eval"
    assert logged.run.run_group == logged.folder.parent.name
    assert logged.run.run_id == run_id(CONFIG) and list(logged.run.tags) == ["test"]
    assert logged.exit_code == 0


def test_curves_have_the_budget_as_their_axis(logged):
    points = [h for h in logged.history if "budget_tokens" in h]
    assert [p["budget_tokens"] for p in points] == [256, 512]
    quest = [r for r in rows() if r["policy"] == "quest" and r["budget_tokens"] == 256]
    mean = sum(r["mass_recall"] for r in quest if not r["dense_layer"]) / 2
    assert points[0]["recall/quest/mass"] == pytest.approx(mean)
    for name in ("contested", "output_error", "tokens_read", "model_read_fraction"):
        assert f"recall/quest/{name}" in points[0]
    assert "recall/oracle/model_read_fraction" not in points[0]
    assert logged.steps["recall/*"] == "budget_tokens"


def test_needle_and_fidelity_have_curves_of_their_own(monkeypatch):
    table = pd.DataFrame(
        {
            "policy": ["quest"],
            "budget_tokens": [64],
            "needle_kind": ["single"],
            "context": [500],
            "accuracy": [0.5],
        }
    )
    monkeypatch.setattr(curves, "split_needle", lambda frame: {"": frame})
    monkeypatch.setattr(curves, "summarise_needle", lambda frame: table)
    [(points, setting)] = curves.curve_tables(pd.DataFrame({"task": ["needle"]}))
    assert list(points) == ["policy", "budget_tokens", "needle/correct"]
    assert setting == " [single 500]"


def test_the_same_rows_again_offline_are_not_logged_twice(tmp_path):
    found = []
    for name in ("first", "again"):
        said: list[str] = []
        tracker = tracked(tmp_path / name, say=said.append, cache_dir=tmp_path / "cache")
        tracker.log_rows(rows())
        tracker.finish()
        found.append(Logged(tmp_path / name, said))
    first, again = found
    assert first.run.run_id == again.run.run_id
    assert [h for h in first.history if "budget_tokens" in h] and not again.history
    assert "not logged twice" in again.said[-1]


def test_a_sweep_has_a_run_for_its_pictures_and_page(tmp_path):
    folder = tmp_path / "sweep"
    (folder / "0_job").mkdir(parents=True)
    write_summary(folder / "0_job", {"config": {"tracking": WANDB}})
    (folder / "plots").mkdir()
    picture(folder / "plots" / "recall_curve.png")
    track_sweep(folder, page(folder / "report.html"), ["-m", "budget=64,96"], print)
    logged = Logged(folder)
    assert logged.run.job_type == "report" and logged.run.run_group == "sweep"
    assert logged.config["sweep"] == ["-m", "budget=64,96"] and "report" in logged.artifacts


def test_rows_pictures_and_page_are_there(logged):
    [table] = logged.folder.glob("wandb/offline-run-*/files/media/table/rows_*.table.json")
    content = json.loads(table.read_text())
    assert "mass_recall" in content["columns"] and len(content["data"]) == len(rows())
    assert list(logged.folder.glob("wandb/offline-run-*/files/media/images/plots/*.png"))
    assert any("plots/recall_curve/path" in h for h in logged.history)
    assert "report" in logged.artifacts


def test_the_headline_is_in_the_summary(logged):
    assert logged.summary["recall/quest/mass/256"] < logged.summary["recall/quest/mass/512"]
    assert logged.summary["wall_seconds"] == 3.5 and logged.summary["provenance/torch"] == "2"
    assert not any(key.startswith("config") for key in logged.summary)


def test_jobs_of_one_process_are_runs_of_their_own(tmp_path):
    for policy in ("quest", "window"):
        tracked(tmp_path / policy, {"policy": policy})  # left open: the next one must not join it
    tracked(tmp_path / "last", {"policy": "last"}).finish(failed=True)
    found = {p: Logged(tmp_path / p) for p in ("quest", "window", "last")}
    assert all(logged.config["policy"] == p for p, logged in found.items())
    assert len({logged.run.run_id for logged in found.values()}) == 3
    assert found["last"].exit_code == 1


def test_online_without_a_key_goes_on_offline(tmp_path, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("W&B asked a question"))
    said: list[str] = []
    tracked(tmp_path, say=said.append, mode="online").finish()
    assert said[0] == "W&B: no API key found, going on offline"
    assert Logged(tmp_path).exit_code == 0


def test_a_netrc_entry_is_a_key(tmp_path, monkeypatch):
    assert not has_key()
    path = tmp_path / "netrc"
    path.write_text(f"machine api.wandb.ai login user password {'0' * 40}\n")
    path.chmod(0o600)
    monkeypatch.setenv("NETRC", str(path))
    assert has_key()


def test_a_run_goes_on_when_wandb_cannot_start(tmp_path, monkeypatch):
    import wandb

    def broken(**_):
        raise RuntimeError("service is gone\nlong story")

    monkeypatch.setattr(wandb, "init", broken)
    with pytest.warns(UserWarning, match=r"W&B could not start \(service is gone\)") as warned:
        tracker = tracked(tmp_path)
        tracker.log_rows(rows())
        tracker.log_summary({"a": 1})
        tracker.log_plots([tmp_path / "missing.png"])
        tracker.finish()
    assert len(warned) == 1


def test_a_run_goes_on_when_wandb_breaks_half_way(tmp_path):
    tracker = tracked(tmp_path, mode="disabled")

    def broken(*_):
        raise OSError("no space left")

    tracker.run.log = broken  # type: ignore[union-attr]
    with pytest.warns(UserWarning, match=r"could not log the rows \(no space left\)") as warned:
        tracker.log_rows(rows())
        tracker.log_rows(rows())
        tracker.finish()
    assert len(warned) == 1


def test_no_tracker_does_nothing(tmp_path):
    tracker = make_tracker({"name": "none"}, config={}, folder=tmp_path, task="recall")
    tracker.log_rows(rows())
    tracker.log_summary({})
    tracker.log_plots([])
    tracker.finish()
    assert isinstance(tracker, NoTracker) and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"name": "mlflow"}, "tracking must be one of none, wandb, got 'mlflow'"),
        (WANDB | {"mode": "on"}, "tracking.mode must be one of offline, online, disabled"),
        (WANDB | {"init_timeout": 0}, "tracking.init_timeout must be seconds > 0, got 0"),
    ],
)
def test_bad_settings_are_refused(tmp_path, given, message):
    with pytest.raises(ValueError, match=message):
        make_tracker(given, config={}, folder=tmp_path, task="recall")


def test_the_same_config_is_the_same_run():
    assert run_id(CONFIG) == run_id(dict(reversed(CONFIG.items())))
    assert run_id(CONFIG) != run_id(CONFIG | {"budget": [256]})
