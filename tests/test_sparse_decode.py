"""Sparse decode against a float64 loop: the torch reference, the Triton kernel and their one door.

Without a GPU the kernel runs in Triton's interpreter; `pytest -m gpu` runs the same checks on it
compiled. B, H, G, N, D, E, S, K as in sparse_eval.core.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sparse_eval.kernels.sparse_decode import sparse_decode

Case = dict[str, Any]
FLOAT32 = torch.finfo(torch.float32).eps


def make_case(
    device: str,
    *,
    rows: int = 2,
    heads: int = 6,
    kv_heads: int = 2,
    tokens: int = 63,
    d: int = 64,
    e: int | None = None,
    page_size: int = 16,
    dtype: torch.dtype = torch.float32,
    sparse: bool = True,
    per_head: bool = False,
    padded: bool = False,
    shared: bool = False,
    lengths: list[int] | None = None,
    seed: int = 0,
) -> Case:
    """Random arguments. Row 0 is as long as the cache allows; outside the live tokens lies NaN."""
    rng = torch.Generator().manual_seed(seed)
    batch = 1 if shared else rows

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng).to(dtype)

    def below(limit: int) -> int:
        return int(torch.randint(limit, (), generator=rng))

    q, k = draw(rows, heads, d), draw(batch, kv_heads, tokens, d)
    v = draw(batch, kv_heads, tokens, e or d)
    starts = [below(tokens // 3 + 1) if padded else 0 for _ in range(rows)]
    lengths = lengths or [tokens - starts[0]] + [1 + below(tokens - s) for s in starts[1:]]
    for row, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        if not shared:
            for x in (k, v):
                x[row, :, :start] = x[row, :, start + length :] = torch.nan
    pages = counts = None
    if sparse:
        num_pages = -(-tokens // page_size)
        slots = min(num_pages, 5)
        pages = torch.full((rows, heads if per_head else kv_heads, slots), -1)
        counts = torch.zeros(pages.shape[:2], dtype=torch.int32)
        for row, lists in enumerate(pages):
            for i, slot in enumerate(lists):
                count = below(slots + 1) if row + i else slots
                slot[:count] = torch.randperm(num_pages, generator=rng)[:count].sort().values
                counts[row, i] = count
        pages = pages.int()
    case = {
        "q": q,
        "k": k,
        "v": v,
        "pages": pages,
        "counts": counts,
        "starts": torch.tensor(starts, dtype=torch.int32) if padded else None,
        "lengths": torch.tensor(lengths, dtype=torch.int32),
    }
    case = {name: x if x is None else x.to(device) for name, x in case.items()}
    return case | {"page_size": page_size, "scale": d**-0.5}


def exact(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """out, lse and page lse in float64, one row, head and page at a time."""
    case = {name: x.cpu() if isinstance(x, Tensor) else x for name, x in case.items()}
    q, k, v = (case[name].double() for name in "qkv")
    (rows, heads, _), kv_heads, size = q.shape, k.shape[1], case["page_size"]
    num_slots = -(-k.shape[2] // size) if case["pages"] is None else case["pages"].shape[2]
    out = torch.zeros(rows, heads, v.shape[3], dtype=torch.float64)
    lse = torch.full((rows, heads), -torch.inf, dtype=torch.float64)
    page_lse = torch.full((rows, heads, num_slots), -torch.inf, dtype=torch.float64)
    for row in range(rows):
        start = 0 if case["starts"] is None else int(case["starts"][row])
        length = int(case["lengths"][row])
        for head in range(heads):
            ids = list(range(num_slots))
            if case["pages"] is not None:
                of = head * case["pages"].shape[1] // heads
                ids = case["pages"][row, of, : int(case["counts"][row, of])].tolist()
            keys = k[row % len(k), head * kv_heads // heads]
            logits, values = [], []
            for slot, page in enumerate(ids):
                tokens = [start + t for t in range(page * size, min(page * size + size, length))]
                logits.append(case["scale"] * (keys[tokens] @ q[row, head]))
                values.append(v[row % len(v), head * kv_heads // heads, tokens])
                page_lse[row, head, slot] = logits[-1].logsumexp(0)
            if sum(map(len, logits)):
                logit = torch.cat(logits)
                lse[row, head] = logit.logsumexp(0)
                out[row, head] = logit.softmax(0) @ torch.cat(values)
    return out, lse, page_lse


@contextmanager
def memory_full_of_nan(device: str) -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert torch.empty(4, device=device).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def triton(case: Case, **options: Any) -> tuple[Tensor, ...]:
    """The kernel with explicit tiles and splits; the checks that guard it are tested apart."""
    from sparse_eval.kernels.sparse_decode.launch import sparse_decode_triton

    with memory_full_of_nan(case["q"].device.type):
        results = sparse_decode_triton(**case, **options)
    return tuple(x for x in results if x is not None)


def torch_reference(case: Case, **options: Any) -> tuple[Tensor, ...]:
    return sparse_decode(**case, backend="torch", **options)


def error(got: Tensor, truth: Tensor) -> float:
    """Largest difference; both must agree on where nothing was read."""
    got = got.cpu().double()
    assert torch.equal(got == -torch.inf, truth == -torch.inf)
    return float((got - truth).masked_fill(truth == -torch.inf, 0).abs().max())


def check(case: Case, **options: Any) -> None:
    """The kernel errs at most twice as much as the reference in the same dtype, which in float64
    equals the loop. The floor is 4 float32 roundings: the reference is sometimes exact by luck."""
    truth = exact(case)
    in_float64 = {n: x.double() if n in ("q", "k", "v") else x for n, x in case.items()}
    for got, want in zip(torch_reference(in_float64, page_lse=True), truth, strict=True):
        assert got.dtype == torch.float64 and error(got, want) < 1e-12
    near = torch_reference(case, page_lse=True)
    results = triton(case, page_lse=True, **options)
    for got, close, want in zip(results, near, truth, strict=True):
        floor = 4 * FLOAT32 * float(want.masked_fill(want == -torch.inf, 0).abs().max())
        assert got.dtype == close.dtype
        assert error(got, want) <= 2 * error(close, want) + floor


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("tokens", [1, 15, 17, 63])
def test_kernel_agrees_with_float64(tokens, dtype, device):
    for sparse in (True, False):
        options: Case = {"dtype": dtype, "tokens": tokens, "padded": tokens > 1, "e": 48}
        check(make_case(device, sparse=sparse, **options), block_t=32, num_splits=2)


@pytest.mark.parametrize("d", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_head_dims_and_groups(d, dtype, device):
    groups: tuple[int, ...] = (1, 3, 5, 6, 7, 8, 16)
    if device == "cpu" and dtype == torch.bfloat16:
        groups = (6, 7)  # the interpreter computes in float32 anyway
    for group in groups:
        check(make_case(device, rows=1, heads=group, kv_heads=1, tokens=41, d=d, dtype=dtype))


@pytest.mark.parametrize("page_size", [1, 16, 32, 48, 64, 128])
def test_page_sizes_below_and_above_the_tile(page_size, device):
    tokens = 2 * page_size + 21
    case = make_case(device, tokens=tokens, page_size=page_size, padded=True, rows=1, heads=2)
    check(case, block_t=16, num_splits=3)
    check(case, block_t=64)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_short_lists_beside_a_long_cache(dtype, padded, device):
    check(make_case(device, tokens=403, rows=3, page_size=16, dtype=dtype, padded=padded))


def test_values_narrower_and_wider_than_keys(device):
    for d, e in ((128, 16), (16, 128), (1, 1), (3, 200)):
        check(make_case(device, d=d, e=e, tokens=33, rows=1))


@pytest.mark.parametrize("padded", [False, True])
def test_rows_may_share_one_cache(padded, device):
    case = make_case(device, rows=4, shared=True, padded=padded)
    check(case)
    case["k"], case["v"] = (x.expand(4, -1, -1, -1) for x in (case["k"], case["v"]))
    check(case)


def test_each_query_head_may_have_its_own_list(device):
    case = make_case(device, heads=6, kv_heads=2, per_head=True, padded=True)
    check(case)
    out, lse = triton(case)
    for head in range(6):
        single = case | {x: case[x][:, head : head + 1] for x in ("q", "pages", "counts")}
        single |= {x: case[x][:, head // 3 : head // 3 + 1] for x in ("k", "v")}
        out_single, lse_single = triton(single)
        assert torch.equal(out[:, head], out_single[:, 0])
        assert torch.equal(lse[:, head], lse_single[:, 0])


def test_selection_far_below_the_largest_logit(device):
    case = make_case(device, rows=1, heads=2, kv_heads=1, tokens=40, e=8)
    case["k"][0, 0, 3] = 100 * case["q"][0].mean(0) / case["q"][0].mean(0).square().sum() / 0.125
    case["pages"] = torch.tensor([[[1, 2]]], dtype=torch.int32, device=device)
    case["counts"] = torch.tensor([[2]], dtype=torch.int32, device=device)
    dense = exact(case | {"pages": None, "counts": None})
    assert (dense[1] - exact(case)[1] > 60).all() and exact(case)[1].isfinite().all()
    check(case)


@pytest.mark.parametrize("sparse", [True, False])
def test_more_splits_than_pages_and_empty_rows(sparse, device):
    lengths = [40, 0, 1, 15, 16, 17]
    case = make_case(device, rows=6, tokens=40, lengths=lengths, heads=2, sparse=sparse)
    if sparse:
        case["counts"][0, 1] = 0
    check(case, block_t=16, num_splits=5)
    out, lse = triton(case, block_t=16, num_splits=5)
    assert (out[1] == 0).all() and (lse[1] == -torch.inf).all()


def test_no_slots_at_all(device):
    case = make_case(device)
    case["pages"], case["counts"] = case["pages"][:, :, :0], torch.zeros_like(case["counts"])
    for run in (triton, torch_reference):
        out, lse, page_lse = run(case, page_lse=True)
        assert (out == 0).all() and (lse == -torch.inf).all() and page_lse.shape == (2, 6, 0)


def test_slots_beyond_the_count_and_pages_beyond_the_end_are_not_read(device):
    case = make_case(device, rows=1, heads=2, tokens=70, lengths=[50])
    case["pages"][...] = torch.tensor([0, 2, 4, 1, 3], dtype=torch.int32)
    case["counts"][...] = 3
    check(case)
    case["pages"][:, :, 2] = 2**28  # times 16 wraps around to 0 in int32
    check(case)
    kept = case | {"pages": case["pages"][:, :, :2], "counts": torch.full_like(case["counts"], 2)}
    assert torch.equal(torch_reference(case)[0], torch_reference(kept)[0])
    error_of_kernel = triton(case)[1] - triton(kept)[1]
    assert error_of_kernel.abs().max() < 1e-6


def test_a_length_beyond_the_cache_ends_with_the_cache(device):
    case = make_case(device, tokens=48, sparse=False)
    room = {x: F.pad(case[x], (0, 0, 0, 16), value=torch.nan)[:, :, :48] for x in ("k", "v")}
    room["k"][...], room["v"][...] = case["k"], case["v"]
    for run in (triton, torch_reference):
        too_long = case | room | {"lengths": case["lengths"] + 1000}
        assert torch.equal(run(too_long)[0][0], run(case)[0][0])


def test_a_row_knows_nothing_of_its_neighbours(device):
    case = make_case(device, rows=3, seed=1)
    other = make_case(device, rows=3, seed=2)
    mixed = {
        name: torch.cat([x[:1], other[name][1:]]) if isinstance(x, Tensor) else x
        for name, x in case.items()
    }
    alone = {name: x[:1] if isinstance(x, Tensor) else x for name, x in case.items()}
    for run in (triton, torch_reference):
        for got, again, row, single in zip(
            run(case), run(case), run(mixed), run(alone), strict=True
        ):
            assert torch.equal(got, again)
            assert torch.equal(got[0], row[0])
            torch.testing.assert_close(got[:1], single, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_paged_pool_equals_contiguous_bit_for_bit(backend, layout, device):
    case = make_case(device, rows=3, tokens=64, lengths=[64, 40, 20], e=32)
    case["starts"] = torch.tensor([0, 0, 5], dtype=torch.int32, device=device)
    block_size, num_blocks = 32, 9
    for x in (case["k"], case["v"]):
        x[1, :, :block_size] = x[0, :, :block_size]  # a common prefix lies in one block
        x[2, :, 20:25] = 1
    table = torch.tensor([[7, 2], [7, 5], [0, 1_000_000]], dtype=torch.int32, device=device)
    pools = {}
    for name in ("k", "v"):
        x = case[name]
        pool = x.new_full((num_blocks, x.shape[1], block_size, x.shape[3]), torch.nan)
        for row, i, block in ((0, 0, 7), (0, 1, 2), (1, 1, 5), (2, 0, 0)):
            pool[block] = x[row, :, i * block_size : (i + 1) * block_size]
        if layout == "NHD":
            pool = pool.transpose(1, 2).contiguous().transpose(1, 2)
        pools[name] = pool
    for sparse in (True, False):
        chosen = case if sparse else case | {"pages": None, "counts": None}
        paged = sparse_decode(**chosen | pools, block_table=table, backend=backend, page_lse=True)
        plain = sparse_decode(**chosen, backend=backend, page_lse=True)
        for got, want in zip(paged, plain, strict=True):
            assert torch.equal(got, want)
        aligned = chosen | {"starts": None}
        in_tiles = triton(aligned | pools, block_table=table, block_t=16)  # one page, block a tile
        for got, want in zip(in_tiles, triton(aligned, block_t=16), strict=True):
            assert torch.equal(got[:2], want[:2])


def test_pool_table_may_be_shared_by_all_rows(device):
    case = make_case(device, rows=3, tokens=48, shared=True)
    pools = {x: case[x][0].unflatten(1, (3, 16)).transpose(0, 1) for x in ("k", "v")}
    table = torch.arange(3, dtype=torch.int32, device=device)[None]
    for backend in ("triton", "torch"):
        paged = sparse_decode(**case | pools, block_table=table, backend=backend)
        plain = sparse_decode(**case, backend=backend)
        assert torch.equal(paged[0], plain[0]) and torch.equal(paged[1], plain[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_full_selection_equals_dense_bit_for_bit(dtype, device):
    case = make_case(device, tokens=250, dtype=dtype, sparse=False, rows=2, heads=4)
    pages = torch.arange(16, dtype=torch.int32, device=device).expand(2, 2, -1)
    full = case | {"pages": pages, "counts": torch.full((2, 2), 16, dtype=torch.int32)}
    full["counts"] = full["counts"].to(device)
    in_equal_tiles = partial(triton, block_t=64)  # dense and sparse plans may differ
    for run in (in_equal_tiles, torch_reference):
        for got, want in zip(run(full, page_lse=True), run(case, page_lse=True), strict=True):
            assert torch.equal(got, want)
    for got, want in zip(triton(full), triton(case), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-3)


def test_dense_equals_scaled_dot_product_attention(device):
    case = make_case(device, tokens=700, sparse=False, rows=1, heads=6, kv_heads=2)
    q, k, v = (case[x].double() for x in "qkv")
    want = F.scaled_dot_product_attention(q[:, :, None], k, v, enable_gqa=True)[:, :, 0]
    out, _ = triton(case, num_splits=3)
    torch.testing.assert_close(out.double(), want, rtol=0, atol=1e-6)


def test_page_lse_adds_up_to_lse(device):
    for per_head in (False, True):
        case = make_case(device, per_head=per_head, padded=True, page_size=4, rows=3)
        for run in (triton, torch_reference):
            _, lse, page_lse = run(case, page_lse=True)
            torch.testing.assert_close(page_lse.logsumexp(-1), lse, rtol=0, atol=2e-6)


def test_many_light_tokens_weigh_in_float16(device):
    case = make_case(device, rows=1, heads=1, kv_heads=1, tokens=4096, d=16, dtype=torch.float16)
    case |= {"pages": None, "counts": None, "scale": 1.0}
    case["q"].fill_(1)
    case["k"].fill_(0)
    case["k"][0, 0, 0] = 17.4 / 16  # one token 36 million times as heavy as each other one
    case["v"].fill_(1)
    case["v"][0, 0, 0] = 0
    out, _ = triton(case)
    torch.testing.assert_close(out.double(), torch_reference(case)[0].double(), rtol=1e-3, atol=0)
    assert (out > 1e-4).all()


def test_cache_strides_are_arbitrary(device):
    case = make_case(device, padded=True, e=32)
    want = triton(case)
    room = torch.full((2, 80, 2, 64 + 32), torch.nan, device=device)  # K and V side by side, NHD
    room[:, 5:68, :, :64] = case["k"].transpose(1, 2)
    room[:, 5:68, :, 64:] = case["v"].transpose(1, 2)
    strided = case | {
        "q": case["q"].transpose(0, 1).contiguous().transpose(0, 1),
        "k": room[:, 5:68, :, :64].transpose(1, 2),
        "v": room[:, 5:68, :, 64:].transpose(1, 2),
        "lengths": torch.stack([case["lengths"]] * 2, 1)[:, 1],
        "pages": case["pages"].transpose(1, 2).contiguous().transpose(1, 2),
    }
    transposed = case | {"k": case["k"].mT.contiguous().mT, "v": case["v"].mT.contiguous().mT}
    for other in (strided, transposed):
        for got, expected in zip(triton(other), want, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-6, atol=2e-6)


def test_addresses_beyond_two_billion_elements(device):
    case = make_case(device, rows=1, heads=1, kv_heads=1, tokens=20, page_size=4, d=16)
    stride = 2**31 // 19 + 1  # elements between tokens: the last lies past 2^31
    far = torch.empty(19 * stride + 16, dtype=torch.bfloat16, device=device)
    k = far.as_strided((1, 1, 20, 16), (0, 0, stride, 1))
    k.copy_(case["k"])
    near = case | {"q": case["q"].bfloat16(), "k": k.contiguous(), "v": k.contiguous()}
    assert far.numel() > 2**31
    for got, want in zip(triton(near | {"k": k, "v": k}), triton(near), strict=True):
        assert torch.equal(got, want)


@pytest.mark.gpu
def test_a_captured_step_replays_at_another_length():
    case = make_case("cuda", tokens=4096, heads=12, d=128, dtype=torch.bfloat16, page_size=16)
    later = make_case("cuda", tokens=4096, heads=12, d=128, dtype=torch.bfloat16, seed=3)
    triton_args = case | {"backend": "triton", "page_lse": True}
    sparse_decode(**triton_args)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = sparse_decode(**triton_args)
    for name in ("q", "k", "v", "pages", "counts", "lengths"):
        case[name].copy_(later[name])
    graph.replay()
    for got, want in zip(results, sparse_decode(**triton_args), strict=True):
        assert torch.equal(got, want)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_long_cache_with_default_tiles_and_splits(dtype):
    for options in ({"sparse": False}, {}, {"per_head": True, "padded": True}):
        case = make_case("cuda", tokens=5000, heads=12, d=128, dtype=dtype, **options)  # type: ignore
        check(case)


BAD: dict[str, tuple[Case, str]] = {
    "q without heads": ({"q": torch.zeros(2, 64)}, "q must be"),
    "k of another head dim": ({"k": torch.zeros(2, 2, 63, 32)}, "k must be"),
    "v of another length": ({"v": torch.zeros(2, 2, 62, 64)}, "v the same"),
    "an empty cache": ({x: torch.zeros(2, 2, 0, 64) for x in ("k", "v")}, "N >= 1"),
    "heads not a multiple": ({"q": torch.zeros(2, 5, 64)}, "multiple of KV heads"),
    "another batch": ({x: torch.zeros(3, 2, 63, 64) for x in ("k", "v")}, "batch 2"),
    "mixed dtypes": ({"q": torch.zeros(2, 6, 64).half()}, "share a float dtype"),
    "integers": ({x: torch.zeros(2, 6, 9, 64).int() for x in ("k", "v")}, "share a float dtype"),
    "pages alone": ({"counts": None}, "pages and counts go together"),
    "pages in int64": ({"pages": torch.zeros(2, 2, 4, dtype=torch.int64)}, "pages must be int32"),
    "three lists": ({"pages": torch.zeros(2, 3, 4).int()}, "pages must be int32"),
    "counts per row": ({"counts": torch.zeros(2).int()}, "counts must be int32"),
    "one length": ({"lengths": torch.zeros(1).int()}, "lengths must be int32"),
    "starts as floats": ({"starts": torch.zeros(2)}, "starts must be int32"),
    "table of another batch": ({"block_table": torch.zeros(3, 2).int()}, "block_table must be"),
    "block smaller than a page": ({"block_table": torch.zeros(2, 2).int()}, "block_size 63"),
    "no page size": ({"page_size": 0}, "page_size must be an integer >= 1, got 0"),
    "a fractional page": ({"page_size": 1.5}, "page_size must be"),
    "no scale": ({"scale": float("nan")}, "scale must be a finite number"),
    "an unknown backend": ({"backend": "cuda"}, "backend must be one of triton, torch"),
    "a wide head": (
        {"q": torch.zeros(2, 6, 257), "k": torch.zeros(2, 2, 63, 257), "backend": "triton"},
        "head dims up to 256",
    ),
    "float64 in Triton": (
        {x: torch.zeros(2, 2, 63, 64).double() for x in ("k", "v")}
        | {"q": torch.zeros(2, 6, 64).double(), "backend": "triton"},
        "takes bfloat16, float16, float32",
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_arguments_are_refused_in_one_line(what, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    change, message = BAD[what]
    with pytest.raises(ValueError, match=message) as failure:
        sparse_decode(**make_case("cpu") | {"backend": "torch"} | change)
    assert "\n" not in str(failure.value)


def test_triton_on_a_cpu_names_the_interpreter(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="TRITON_INTERPRET=1"):
        sparse_decode(**make_case("cpu"), backend="triton")


def run_alone(code: str, **env: str) -> str:
    """Output of a fresh process in which the kernel is compiled, not interpreted."""
    environ = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"} | env
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_torch_backend_loads_no_triton():
    assert (
        run_alone("""
import sys, torch
from sparse_eval.kernels.sparse_decode import sparse_decode
x = torch.ones(1, 1, 4, 8)
length = torch.tensor([4], dtype=torch.int32)
sparse_decode(x[:, :, 0], x, x, None, None, None, length, page_size=1, scale=1.0, backend="torch")
print("triton" in sys.modules)
""").strip()
        == "False"
    )


def test_kernel_compiles_for_a_gpu_that_is_not_here(tmp_path):
    """Catches what only the interpreter accepts, and tiles too large for a GPU's shared memory."""
    built = run_alone(
        """
import torch, triton
from triton.backends.compiler import GPUTarget

class Hopper:
    get_current_target = lambda self: GPUTarget("cuda", 90, 32)
    get_current_device = get_current_stream = lambda self, *_: 0

def compile_only(self, *args, run=triton.JITFunction.run, **kwargs):
    built = run(self, *args, **kwargs | {"warmup": True})
    print(self.__name__, built.metadata.shared, "mma" in built.asm["ptx"])
    return built

triton.runtime.driver.set_active(Hopper())
triton.JITFunction.run = compile_only
from sparse_eval.kernels.sparse_decode.launch import sparse_decode_triton

i = lambda *shape: torch.zeros(shape, dtype=torch.int32)
q, k = torch.zeros(2, 12, 128).bfloat16(), torch.zeros(2, 2, 999, 128).bfloat16()
sparse_decode_triton(q, k, k, i(2, 2, 9), i(2, 2), None, i(2), page_size=16, scale=0.1)
q, k = torch.zeros(2, 12, 256).half(), torch.zeros(9, 2, 128, 256).half()
sparse_decode_triton(q, k, k[..., :80], i(2, 12, 9), i(2, 12), i(2), i(2), page_size=16, scale=0.1,
                     page_lse=True, block_table=i(2, 9))
from sparse_eval.kernels.quest_select.launch import quest_select_triton, update_metadata_triton
q, k, mid = q[..., :128].bfloat16(), k[..., :128].bfloat16(), torch.zeros(2, 2, 999, 128).bfloat16()
quest_select_triton(q, k, mid, mid, None, i(2), page_size=64, budget=2048, sink_pages=1,
                    local_pages=2, group="sum", scale=0.1, update=True, block_table=i(2, 9))
update_metadata_triton(k, mid, mid, i(2), i(2), page_size=64, block_table=i(2, 9))

from sparse_eval.kernels.quest_step import step_workspace
from sparse_eval.kernels.quest_step.launch import quest_step_triton
byte, scales = torch.zeros(2, 2, 999, 128, dtype=torch.int8), torch.zeros(2, 2, 999, 2)
quest_step_triton(q, k, k, byte, byte.view(torch.uint8), None, i(2), page_size=64, budget=2048,
                  sink_pages=1, local_pages=2, group="max", scale=0.1, block_table=i(2, 9),
                  scales=scales, workspace=step_workspace(2, 2, 999, "cpu"))
""",
        TRITON_CACHE_DIR=str(tmp_path),
    )
    lines = [line.split() for line in built.splitlines()]
    attends = ["attend_split_kernel", "merge_splits_kernel"]
    selects = ["score_kernel", "choose_kernel", "update_kernel"]
    steps = ["score_kernel", "step_attend_kernel", "merge_splits_kernel"]
    names = [line[0] for line in lines]
    assert names[: len(attends * 2 + selects)] == attends * 2 + selects
    assert [n for n in names[len(attends * 2 + selects) :] if n != "choose_kernel"] == steps
    assert all(int(line[1]) <= 113 * 1024 for line in lines)  # two programs fit a multiprocessor
    assert lines[0][2] == lines[2][2] == "True"
