"""Fixtures: tiny random models and captures of them; Triton's interpreter where there is no GPU."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():  # before any kernel is decorated
    os.environ["TRITON_INTERPRET"] = "1"
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest

from sparse_eval.capture import CapturedKV
from tests.tiny import tiny_capture, tiny_model


@pytest.fixture(scope="session")
def llama():
    return tiny_model("tiny_llama")


@pytest.fixture(scope="session")
def capture(llama) -> CapturedKV:
    return tiny_capture(llama, context=150, steps=8)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request) -> str:
    if request.param == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip(
            "the kernel is compiled in this process: set TRITON_INTERPRET=1 to interpret it"
        )
    return request.param
