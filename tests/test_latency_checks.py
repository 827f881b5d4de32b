"""task=latency's settings: what is refused before anything is timed."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from sparse_eval.__main__ import main
from sparse_eval.latency.checks import check_latency
from sparse_eval.latency.config import FFD_PARTS, Shapes, latency_config
from sparse_eval.policies.quest import Quest
from sparse_eval.policies.window import Window

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
        ({"new_tokens": 2}, "task.new_tokens must be an integer >= 3"),
        *(
            ({"working_set": value}, "task.working_set must be a finite number > 0, got ")
            for value in (0, -4, float("nan"), float("inf"), True, "4")
        ),
        ({"densities": [0.1, 1.5]}, "task.densities must be a number between 0 and 1"),
        ({"keep_ratio": 0}, "task.keep_ratio must be a number between 0 and 1"),
        ({"scales": "head"}, "task.scales must be one of token, channel"),
        ({"lists": "nowhere.safetensors"}, "task.lists must be scattered or a capture's path"),
        ({"keys": "nowhere.safetensors"}, "task.keys must be random or a capture's path"),
        ({"keys": "k" * 260}, "task.keys must be random or a capture's path"),
        ({"lists": "l" * 260}, "task.lists must be scattered or a capture's path"),
        ({"lists": "~no-such-user/kv"}, "task.lists must be scattered or a capture's path"),
        ({"deltas": [5, -1]}, "task.deltas must be numbers >= 0, in logits, got -1"),
        ({"deltas": [float("inf")]}, "task.deltas must be numbers >= 0, in logits, got inf"),
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


def test_policies_to_compare_are_not_ignored(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["sparse_eval", "task=latency", "compare=[window]"])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr()
    assert ended.value.code == 2 and said.out == ""
    assert said.err.count("\n") == 1 and "leave compare out, got compare=[window]" in said.err


def test_only_quest_has_a_select_to_time():
    with pytest.raises(ValueError, match="policy must be quest"):
        check_latency(TASK, INFO, Window(), "cuda")
    with pytest.raises(ValueError, match="32,768 pages"):
        check_latency(TASK, INFO, Quest(page_size=1), "cuda")
    with pytest.raises(ValueError, match="auto or int8, got quest with float32"):
        check_latency(TASK, INFO, Quest(metadata_dtype="float32"), "cuda")
    check_latency(TASK, INFO, Quest(page_size=16), "cuda")
    check_latency(TASK, INFO, Quest(page_size=16, metadata_dtype="int8"), "cuda")
    with pytest.raises(ValueError, match="powers of two up to 512, got 48"):
        check_latency(TASK | {"what": ["ffd_step"]}, INFO, Quest(page_size=48), "cuda")
    thin = {"what": ["ffd_step", "rules"], "contexts": [2**19]}  # Quest's own limit is not theirs
    check_latency(TASK | thin, INFO, Quest(page_size=16), "cuda")


def of_head_dim(value: int) -> dict[str, Any]:
    return {"shapes": {"num_heads": 12, "num_kv_heads": 2, "head_dim": value}}


@pytest.mark.parametrize(
    ("change", "pages", "message"),
    [
        *(
            ({"what": [what], "contexts": [4096, 16]}, {"page_size": 64}, "must be at least 64 for")
            for what in ("metadata", "select", "step")
        ),
        *(
            ({"what": [what], "contexts": [64]}, {"page_size": 64}, "must be at least 65 for")
            for what in FFD_PARTS
        ),
        ({"what": ["ffd_select"]}, {"sink_pages": 0, "local_pages": 1}, "got 0 and 1"),
        *(
            (
                {"what": [what], "scales": "channel"},
                {"page_size": 8},
                "page_size must be at least 16 for",
            )
            for what in ("ffd_attend_residual", "ffd_step_residual")
        ),
        ({"what": ["ffd_step"], **of_head_dim(66)}, {}, "must be a multiple of 4 for task.what"),
        ({"what": ["generate"], **of_head_dim(65)}, {}, "must be even for task.what=generate"),
        *(
            ({"what": [what], **of_head_dim(320)}, {}, f"<= 256 for task.what={what}, got 320")
            for what in ("dense", "generate", "ffd_attend")
        ),
        ({"contexts": [2**19 - 15]}, {}, "fewer than 32,768 pages, got group=max and 32,768"),
    ],
)
def test_what_a_part_could_not_do_is_refused_before_it_is_timed(change, pages, message):
    with pytest.raises(ValueError, match=message) as failure:
        check_latency(TASK | change, INFO, Quest(**pages), "cuda")
    assert "\n" not in str(failure.value)


def test_what_a_part_can_do_is_not_refused():
    accepted: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"what": ["step"], "contexts": [64]}, {"page_size": 64}),
        ({"what": ["sdpa", "dense", "attend"], "contexts": [16]}, {"page_size": 64}),
        ({"what": [*FFD_PARTS], "contexts": [65]}, {"page_size": 64}),
        ({"what": [*FFD_PARTS], "contexts": [16]}, {"page_size": 1, "sink_pages": 0}),
        ({"what": [*FFD_PARTS], "scales": "channel"}, {"page_size": 16, "sink_pages": 0}),
        ({"what": ["ffd_step"], "scales": "channel"}, {"page_size": 8}),
        ({"what": ["sdpa", "rules"], **of_head_dim(321)}, {"page_size": 16}),
    ]
    for change, pages in accepted:
        check_latency(TASK | change, INFO, Quest(**pages), "cuda")


def test_values_given_twice_are_timed_once():
    twice = {
        "what": ["step", "sdpa", "step"],
        "batches": [8, 1, 8],
        "contexts": [64, 64],
        "graph": [True, True],
        "densities": [0.1, 0.1],
        "deltas": [5, 5.0, 7],
    }
    config = latency_config(TASK | twice, INFO)
    assert {name: getattr(config, name) for name in twice} == {
        "what": ("step", "sdpa"),
        "batches": (8, 1),
        "contexts": (64,),
        "graph": (True,),
        "densities": (0.1,),
        "deltas": (5.0, 7.0),
    }


@pytest.mark.parametrize("name", ["keys", "lists"])
def test_a_capture_that_no_part_reads_is_not_opened(tmp_path, name):
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(b"no capture")
    reader = {"keys": "ffd_attend", "lists": "attend"}[name]
    task = TASK | {name: str(broken)}
    others = [what for what in ("sdpa", "step", "select", "generate") if what != reader]
    check_latency(task | {"what": others}, INFO, Quest(), "cuda")
    assert getattr(latency_config(task | {"what": others}, INFO), name) is None
    with pytest.raises(ValueError, match="not a readable capture"):
        check_latency(task | {"what": [reader]}, INFO, Quest(), "cuda")


def test_shapes_come_from_the_model_or_the_task():
    given = {"num_heads": 32, "num_kv_heads": None, "head_dim": 64}
    assert latency_config(TASK | {"shapes": given}, INFO).shapes == Shapes(32, 2, 64)
