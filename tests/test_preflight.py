"""What can be known before a model is loaded ends a run there: one line, no type, exit code 2."""

from __future__ import annotations

import pytest

from sparse_eval.__main__ import check, main
from sparse_eval.one_line import first_line

TINY = ["model=tiny_llama", "context=200", "budget=64", "prompts.n=2"]
NEEDLE = ["task=needle", "context=400"]
FILE = ["prompts=file", "prompts.path=FILE"]
LONG = "l" * 260
TRITON = "policy.select_backend=triton"
HEADS = ["model.num_heads=4", "model.config.hidden_size=72"]

CASES = [
    (["task=needle", "task.gate=5"], "task.gate must be a mapping {name: value}, got 5"),
    (["task=lm_eval", "task.gate=5"], "task.gate must be a mapping {name: value}, got 5"),
    (["model.config=5"], "model.config must be a mapping {name: value}, got 5"),
    (["model.num_heads=5"], "must be a multiple of model.num_kv_heads (2), got 5"),
    (["model.num_heads=6"], "model tiny_llama cannot be built: "),
    (["model.num_heads=6"], "The hidden size (64) is not a multiple of"),
    (["model.architecture=nope"], "model tiny_llama cannot be built: "),
    ([*NEEDLE, "task.chat=template", "model.chat_template=false"], "task.chat=template needs"),
    (["task=lm_eval", "task.chat=template", "model.chat_template=false"], "task.chat=template"),
    (["task=needle"], "context must be >= "),
    (["task=lm_eval", "task.tasks=[se_multikey]"], "lm-eval task se_multikey: context (as"),
    ([*FILE, "latin"], "prompts.path must be UTF-8 text"),
    ([*FILE, *NEEDLE, "latin"], "prompts.path must be UTF-8 text"),
    ([*FILE, "short"], "the text is too short: file: text.txt"),
    ([*FILE, *NEEDLE, "short"], "the text is too short: file: text.txt"),
    (["prompts=file", f"prompts.path={LONG}"], "prompts.path must be a text file, got lll"),
    (
        ["prompts=file", "prompts.path='~no-such-user/text'"],
        "prompts.path must be a text file, got ~no-s",
    ),
    (["model=folder", f"model.path={LONG}"], "model.path must be a folder, got lll"),
    (
        ["model=folder", "model.path='~no-such-user/model'"],
        "model.path must be a folder, got ~no-such-user",
    ),
    (["model=gguf", f"model.path={LONG}"], "model.path must be a GGUF file, got lll"),
    (["model=hub", f"model.id={LONG}"], "model.id must be ORG/NAME on the hub"),
    (["task=lm_eval", f"task.include_path={LONG}"], "task.include_path must be a folder"),
    (["policy=ffd", *HEADS, "model.head_dim=18"], "ffd: thumbnails of 2 bits take head dims"),
]


@pytest.mark.parametrize(("words", "line"), CASES)
def test_inputs_that_cannot_do_are_told_before_anything_runs(tmp_path, words, line):
    path = tmp_path / "text.txt"
    path.write_bytes("größe ".encode("latin1" if "latin" in words else "utf-8") * 12)
    words = [w.replace("FILE", str(path)) for w in words if w not in ("latin", "short")]
    keys = {word.split("=")[0] for word in words}
    with pytest.raises(ValueError) as caught:
        check([*(word for word in TINY if word.split("=")[0] not in keys), *words])
    assert line in str(caught.value) and "\n" not in str(caught.value)
    assert str(caught.value).count("se_multikey") <= 1


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["policy=ffd", TRITON], "policy.select_backend=triton needs a GPU, got device=cpu"),
        (["policy=quest", TRITON], "policy.select_backend=triton needs a GPU, got device=cpu"),
        (["policy=ffd", TRITON, "page_size=24", "budget=96"], "powers of two up to 512, got page"),
        (
            ["policy=window", "compare=['quest:select_backend=triton']"],
            "compare, quest:select_backend=triton: select_backend=triton needs a GPU",
        ),
    ],
)
def test_a_selection_in_triton_that_cannot_run_here(monkeypatch, capsys, words, line):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for more in ([], ["plan=true"]):
        monkeypatch.setattr("sys.argv", ["x", *TINY[:2], "budget=64", "device=cpu", *words, *more])
        with pytest.raises(SystemExit) as end:
            main()
        said = capsys.readouterr()
        assert end.value.code == 2 and said.err.count("\n") == 1 and line in said.err


def test_a_selection_in_triton_has_room_for_so_many_pages():
    words = ["model=tiny_llama", "model.max_context=50000", "page_size=1", "budget=64", TRITON]
    with pytest.raises(ValueError, match="quest.* fewer than 32,768 pages, got 40,0"):
        check([*words, "policy=quest", "compare=[]", "backend=torch", "context=40000"])


def test_a_plan_of_nothing_that_can_run_ends_with_2(capsys):
    with pytest.raises(SystemExit) as end:
        check([*TINY[:2], "budget=8", "plan=true"])
    said = capsys.readouterr()
    assert end.value.code == 2 and not said.out
    assert said.err.startswith("error: budget must be >= 48 tokens") and said.err.count("\n") == 1


def test_a_plan_names_jobs_without_the_word_that_asks_for_it(capsys):
    check(["-m", *TINY[:2], "budget=64,8", "plan=true"])
    said = capsys.readouterr().out
    assert "infeasible model=tiny_llama context=200 budget=8: budget must" in said
    assert "plan=true" not in said


@pytest.mark.parametrize("tail", ["", "/${name}"])
def test_a_folder_given_to_hydra_that_cannot_be_written(tmp_path, monkeypatch, capsys, tail):
    (tmp_path / "taken").write_text("a file")
    folder = tmp_path / "taken" / "run"
    monkeypatch.setattr("sys.argv", ["x", *TINY, f"hydra.run.dir={folder}{tail}"])
    with pytest.raises(SystemExit) as end:
        main()
    line = capsys.readouterr().err
    assert end.value.code == 2 and line.count("\n") == 1
    assert line.startswith(f"error: hydra.run.dir={folder} cannot be written")


def test_a_heading_is_told_with_what_follows_it():
    assert first_line(ValueError("validation error:\n  hidden size is odd\n more")) == (
        "validation error: hidden size is odd"
    )
    assert first_line(ValueError("one\ntwo")) == "one"
    assert first_line(KeyError()) == "KeyError"
