"""Names in lm-eval's index: groups, tags, paths, and what is wrong with them, told before a run."""

from __future__ import annotations

from pathlib import Path

import pytest
from lm_eval.tasks import TaskManager

from sparse_eval.cli.compose import Composer
from sparse_eval.lm import names
from sparse_eval.lm.config import lm_config
from sparse_eval.lm.globs import expanded, spelled_out

COMPOSER = Composer()
YAMLS = {
    "a": "task: a\ntag: [tagged]",
    "b": "task: b\ntag: [tagged]",
    "inner": "group: inner\ntask: [a]",
    "outer": "group: outer\ntask: [inner, b, {task: own, dataset_path: x}]",
    "nested": "group: nested\ntask: [{group: part, task: [b, {task: own}]}]",
    "twice": "group: twice\ntask: [a, a]",
    "itself": "group: itself\ntask: [a, itself]",
    "round": "group: round\ntask: [trip]",
    "trip": "group: trip\ntask: [round]",
    "nothing": "group: nothing\ntask: []",
    "missing": "group: missing\ntask: [a, mising]",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("names")
    for name, text in YAMLS.items():
        (root / f"{name}.yaml").write_text(text)
    return root


def check(folder: Path, *words: str) -> None:
    given = ["task=lm_eval", "model=tiny_llama", f"task.include_path={folder}", *words]
    cfg = COMPOSER.compose(given)
    names.check_names(expanded(lm_config(cfg["task"], cfg["protocol"], 0)))


@pytest.mark.parametrize(
    ("name", "tasks"),
    [
        ("a", ["a"]),
        ("tagged", ["a", "b"]),
        ("outer", ["a", "b", "outer::own"]),
        ("nested", ["b", "nested::part::own"]),
        ("twice", ["a", "a"]),
    ],
)
def test_what_a_name_stands_for(folder, name, tasks):
    index = names.manager((str(folder),), False).task_index
    assert list(names.tasks_of(index, name)) == tasks
    if name == "a":
        assert list(names.tasks_of(index, str(folder / f"{name}.yaml"))) == tasks


def test_they_are_the_tasks_that_lm_eval_loads():
    place = Path(__file__).parent / "lm_tasks"
    manager = TaskManager(include_path=str(place), include_defaults=False)
    for name in ("tiny_group", "tiny_say", str(place / "tiny_choice.yaml")):
        assert list(names.tasks_of(manager.task_index, name)) == list(manager.load(name)["tasks"])


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["task.tasks=[itself]"], "group itself contains itself"),
        (["task.tasks=[round]"], "group round contains itself"),
        (["task.tasks=[nothing]"], "group nothing lists no tasks"),
        (["task.tasks=[a,inner]"], "a is named twice, by a and by inner"),
        (["task.tasks=[a,b]", "task.gate.floors={c: 0.5}"], "floors: c is not one of .*: a, b"),
        (["task.tasks=[inner]", "task.limit={inner: 5}"], "limit: inner is not one of .*: a"),
    ],
)
def test_what_is_wrong_is_one_line(folder, words, told):
    with pytest.raises(ValueError, match=told) as caught:
        check(folder, *words)
    assert "\n" not in str(caught.value)


def test_a_groups_yaml_is_told_how_to_name_it(folder):
    with pytest.raises(ValueError, match="yaml of a group.*tasks=.outer. task.include_path="):
        check(folder, f"task.tasks=[{folder}/outer.yaml]")


def test_a_task_that_a_group_lists_and_nobody_has_is_named(folder, monkeypatch):
    near = names.manager((str(folder),), False)
    monkeypatch.setattr(names, "manager", lambda *_: near)  # lm-eval's own take seconds to list
    with pytest.raises(ValueError, match="no task 'mising', which its group missing lists; did"):
        check(folder, "task.tasks=[missing]")


def test_a_folder_that_lm_eval_cannot_index_is_named(tmp_path):
    (tmp_path / "number.yaml").write_text("task: 123")
    with pytest.raises(ValueError, match=f"task.include_path: .* index .*{tmp_path.name}"):
        check(tmp_path, "task.tasks=[se_multikey]")


def test_a_yaml_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / "broken.yaml").write_text("task: [")
    with pytest.raises(ValueError, match="broken.yaml cannot be read") as caught:
        check(tmp_path, f"task.tasks=[{tmp_path}/broken.yaml]")
    assert "\n" not in str(caught.value)


def test_names_that_are_asked_for_pass(folder):
    check(folder, "task.tasks=[outer]", "task.limit={a: 3}", "task.gate.floors={b: 0.5}")
    check(folder, "task.tasks=[a,a]", "task.gate.floors={a: 0.5}")


BUNDLED = sorted(path.stem for path in names.BUNDLED.glob("se_*.yaml"))


@pytest.fixture
def near(folder, monkeypatch):
    """The bundled tasks and the folder's: lm-eval's own take seconds to read."""
    monkeypatch.setattr(names, "families", lambda asked: ())
    with_defaults = names.manager((str(names.BUNDLED), str(folder)), False)
    monkeypatch.setattr(names, "manager", lambda *_: with_defaults)
    spelled_out.cache_clear()
    yield (str(folder),)
    spelled_out.cache_clear()


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        (["se_*"], BUNDLED),
        (["se_needle_????"], ["se_needle_uuid", "se_needle_word"]),
        (["se_multikey*", "se_[kv]*"], [*BUNDLED[2:4], "se_key_value", "se_variable_tracking"]),
        (["*_offline"], ["sparse_eval_offline"]),
        (["[ab]", "inne?"], ["a", "b"]),
        (["tagge[d]", "a*"], ["tagged"]),
        (["b", "[at]agged", "a"], ["b", "a"]),
        (["b", "ta*"], ["b", "a"]),
    ],
)
def test_globs_are_spelled_out_and_name_each_task_once(near, asked, found):
    assert list(spelled_out(tuple(asked), near)) == found


def test_what_globs_match_is_what_lm_eval_matches(near):
    own = names.manager().match_tasks(["se_*"])
    assert list(spelled_out(("se_*",), near)) == own and len(own) >= 9


def test_a_glob_of_yamls_is_their_paths(near, folder):
    given = str(folder / "[ab].yaml")
    assert list(spelled_out((given,), near)) == [str(folder / "a.yaml"), str(folder / "b.yaml")]


def test_a_glob_that_matches_nothing_is_one_line_with_near_names(near, folder):
    with pytest.raises(ValueError, match="task like 'se_mutlikey.'; did you mean se_multikey, "):
        check(folder, "task.tasks=[se_mutlikey*]")


def test_limits_and_floors_are_of_the_tasks_that_a_glob_stands_for(near, folder):
    check(folder, "task.tasks=[se_needle_*]", "task.limit={se_needle_uuid: 3}")
    with pytest.raises(ValueError, match="floors: se_multikey is not one of .*se_needle_passcode"):
        check(folder, "task.tasks=[se_needle_*]", "task.gate.floors={se_multikey: 0.5}")


@pytest.mark.parametrize(
    ("name", "piece"), [("arc_*", "arc_"), ("*_qa?x", "_qa"), ("a[bc]def", "def"), ("*", "")]
)
def test_folders_are_looked_for_by_what_every_match_holds(name, piece):
    assert names.longest_literal(name) == piece


def test_lm_evals_own_names_are_found_in_its_folders():
    found = spelled_out(("ruler_*",), ())
    assert {"ruler_vt", "ruler_cwe", "ruler_fwe"} <= set(found)
    assert all(name.startswith("ruler_") for name in found)
