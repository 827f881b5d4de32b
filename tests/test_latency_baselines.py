"""The dense attention of others: found, checked, refused with a reason."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from sparse_eval.latency.baselines import (
    FLASH_ATTENTION_3,
    Attend,
    other_kernels,
    those_that_run,
)

TASK = yaml.safe_load((Path(__file__).parent.parent / "conf" / "task" / "latency.yaml").read_text())
INFO = SimpleNamespace(name="qwen", num_heads=12, num_kv_heads=2, head_dim=128)


def qkv(rows: int, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    rng = torch.Generator().manual_seed(0)
    shapes = ((rows, 6, 16), (rows, 2, tokens, 16), (rows, 2, tokens, 16))
    q, k, v = (torch.randn(shape, generator=rng) for shape in shapes)
    return q, k, v


def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[B, H, D] from k and v [B, G, N, D]."""
    return scaled_dot_product_attention(q[:, :, None], k, v, enable_gqa=True)[:, :, 0]


def install(monkeypatch, name: str, **members: Any) -> None:
    """A module of this name, as if it were installed."""
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    vars(module).update(members)
    monkeypatch.setitem(sys.modules, name, module)


def test_what_is_not_installed_is_said():
    tried = other_kernels()
    modules = {**FLASH_ATTENTION_3, "flashinfer": "flashinfer"}
    assert set(tried.good) | set(tried.refused) == set(modules)
    for name, module in modules.items():
        if find_spec(module) is None:
            assert tried.refused[name] == f"{module} is not installed"


def test_a_package_that_cannot_be_loaded_says_why(monkeypatch):
    install(monkeypatch, "fa3_fwd_interface")
    refused = other_kernels().refused["flash_attention_3 fa3_fwd"]
    assert refused.startswith("AttributeError: ") and "flash_attn_with_kvcache" in refused


@pytest.mark.parametrize("kind", [RuntimeError, AssertionError, FileNotFoundError, KeyError])
def test_whatever_a_baseline_raises_refuses_it_alone(kind):
    q, k, v = qkv(2, 128)

    def fails(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        raise kind("ninja")

    tried = those_that_run({"fails": fails, "right": dense}, q, k, v, dense(q, k, v))
    assert list(tried.good) == ["right"]
    assert tried.refused["fails"].startswith(f"{kind.__name__}: ")


def test_a_baseline_that_fails_or_errs_says_why():
    q, k, v = qkv(2, 128)

    def fails(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        raise RuntimeError("no kernel\nfor this GPU")

    variants: dict[str, Attend] = {
        "right": dense,
        "wrong": lambda q, k, v: 2 * dense(q, k, v),
        "fails": fails,
    }
    tried = those_that_run(variants, q, k, v, dense(q, k, v))
    assert list(tried.good) == ["right"]
    assert tried.refused == {
        "wrong": "its output is 100% off",
        "fails": "RuntimeError: no kernel for this GPU",
    }


@pytest.mark.parametrize(("name", "module"), FLASH_ATTENTION_3.items())
def test_flash_attention_3_gets_what_its_documentation_asks_for(monkeypatch, name, module):
    q, k, v = qkv(3, 100)

    def flash_attn_with_kvcache(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        """q [B, 1, H, D]; caches [B, N, G, D] with a contiguous last dimension."""
        assert q.shape == (3, 1, 6, 16) and k_cache.shape == v_cache.shape == (3, 100, 2, 16)
        assert k_cache.stride(-1) == v_cache.stride(-1) == 1
        out = dense(q[:, 0], k_cache.transpose(1, 2), v_cache.transpose(1, 2))
        return out[:, None]

    install(monkeypatch, module, flash_attn_with_kvcache=flash_attn_with_kvcache)
    tried = those_that_run({name: other_kernels().good[name]}, q, k, v, dense(q, k, v))
    assert list(tried.good) == [name]


class FakeDecode:
    """FlashInfer's documented decode wrapper, over a pool in HND, in plain torch."""

    plans = 0

    def __init__(self, workspace, kv_layout, **options):
        assert workspace.dtype == torch.uint8 and not workspace.any() and kv_layout == "HND"
        assert options["use_cuda_graph"] and options["use_tensor_cores"]
        assert len(options["paged_kv_indptr_buffer"]) == 1 + len(
            options["paged_kv_last_page_len_buffer"]
        )

    def plan(self, indptr, indices, last, heads, kv_heads, head_dim, page_size, **dtypes):
        assert indptr.dtype == indices.dtype == last.dtype == torch.int32
        assert dtypes == {"q_data_type": torch.float32, "kv_data_type": torch.float32}
        FakeDecode.plans += 1
        self.planned = (indptr, indices, last, heads, kv_heads, head_dim, page_size)

    def run(self, q, pool):
        indptr, indices, last, heads, kv_heads, head_dim, page_size = self.planned
        assert q.shape == (len(last), heads, head_dim)
        assert pool[0].shape[1:] == (kv_heads, page_size, head_dim)
        rows = []
        for i in range(len(last)):
            ids = indices[int(indptr[i]) : int(indptr[i + 1])].long()
            live = (len(ids) - 1) * page_size + int(last[i])
            k, v = (x[ids].transpose(0, 1).flatten(1, 2)[None, :, :live] for x in pool)
            rows.append(dense(q[i : i + 1], k, v))
        return torch.cat(rows)


@pytest.mark.parametrize("tokens", [128, 100])
def test_flashinfer_gets_what_its_documentation_asks_for_and_plans_once(monkeypatch, tokens):
    install(monkeypatch, "flashinfer", BatchDecodeWithPagedKVCacheWrapper=FakeDecode)
    FakeDecode.plans = 0
    q, k, v = qkv(3, tokens)
    truth = dense(q, k, v)
    tried = those_that_run(other_kernels().good, q, k, v, truth)
    torch.testing.assert_close(tried.good["flashinfer"](q, k, v), truth)
    assert FakeDecode.plans == 1
