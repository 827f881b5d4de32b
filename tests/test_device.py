"""What a run says about the arithmetic it runs in."""

from __future__ import annotations

import pytest
import torch

from sparse_eval.device import describe_dtype


@pytest.fixture
def tf32():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision(before)


def test_products_in_tf32_are_said(tf32):
    assert describe_dtype("float32", "cuda:0") == "float32 (matrix products in TF32)"
    assert describe_dtype("bfloat16", "cuda:0") == "bfloat16"
    assert describe_dtype("float32", "cpu") == "float32"


def test_float32_in_full_needs_no_word():
    assert torch.get_float32_matmul_precision() == "highest"
    assert describe_dtype("float32", "cuda") == "float32"
