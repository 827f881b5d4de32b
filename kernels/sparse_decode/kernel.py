"""Decode attention over page lists in Triton: cut each list into splits, attend, merge.

One program attends one split of one list for all query heads that share it, so a page is loaded
once per group. Source of splits and merge: flash-decoding (Dao et al. 2023,
https://crfm.stanford.edu/2023/10/12/flashdecoding.html); of the running softmax: Milakov and
Gimelshein 2018, https://arxiv.org/abs/1805.02867.
"""

# ruff: noqa: E741

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

INTERPRETED: bool = triton.knobs.runtime.interpret
LOG2E = tl.constexpr(1.4426950408889634)
RESET_BLOCK = tl.constexpr(1024)


SIZES = [
    "num_tokens",
    "num_slots",
    "num_splits",
    "num_parts",
    "heads_per_list",
    "lists_per_kv_head",
]


@triton.jit(do_not_specialize=SIZES)
def attend_split_kernel(
    q_ptr,  # [B, H, D]
    k_ptr,  # [batch or block, G, token, D]
    v_ptr,  # [batch or block, G, token, E]
    pages_ptr,  # [B, S, num_slots], None = dense
    counts_ptr,  # [B, S]
    starts_ptr,  # [B], None = 0
    lengths_ptr,  # [B]
    table_ptr,  # [B, blocks], None = k and v are contiguous caches
    acc_ptr,  # [B, H, num_splits, E]
    m_ptr,  # [B, H, num_splits]
    l_ptr,  # [B, H, num_splits]
    part_ptr,  # [B, H, num_parts], None = page LSE not asked for
    scale,
    num_tokens,  # the cache's extent, not a live length
    num_slots,
    num_splits,
    num_parts,
    heads_per_list,
    lists_per_kv_head,
    stride_tb,
    stride_qb,
    stride_qh,
    stride_qd,
    stride_kb,
    stride_kg,
    stride_kn,
    stride_kd,
    stride_vb,
    stride_vg,
    stride_vn,
    stride_ve,
    D: tl.constexpr,
    E: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,  # tokens per block of the pool
    WHOLE: tl.constexpr,  # every tile lies in one page, and in one block of the pool
    PART: tl.constexpr,  # tokens per stored part of a page's LSE; divides page and tile
    P_UNIT: tl.constexpr,  # weights enter the dot times P_UNIT, clear of fp16's floor
    INTERPRET: tl.constexpr,
    PDL: tl.constexpr,  # the merge is launched as a programmatic dependent of this kernel
    BLOCK_M: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Grid (B, S, num_splits). Stores m = max s, l = Σ exp(s - m), acc = Σ exp(s - m)·v."""
    pdl_launch(PDL)
    row = tl.program_id(0).to(tl.int64)
    list_id = tl.program_id(1)
    split = tl.program_id(2)
    row_list = row * tl.num_programs(1) + list_id
    q = load_queries(
        *(q_ptr + row * stride_qb, list_id * heads_per_list, heads_per_list),
        *(stride_qh, stride_qd, D, INTERPRET, BLOCK_M, BLOCK_D),
    )
    start = 0
    if starts_ptr is not None:
        start = tl.load(starts_ptr + row)
    length = tl.minimum(tl.load(lengths_ptr + row), num_tokens - start)
    count = num_slots
    walk = length  # tokens to walk, the unread rest of a partial page included
    if pages_ptr is not None:
        pages_ptr += row_list * num_slots
        count = tl.minimum(tl.load(counts_ptr + row_list), num_slots)
        walk = count * PAGE_SIZE
    if table_ptr is not None:
        table_ptr += row * stride_tb
        row = row * 0
    kv_head = (list_id // lists_per_kv_head).to(tl.int64)
    k_ptr += row * stride_kb + kv_head * stride_kg
    v_ptr += row * stride_vb + kv_head * stride_vg

    offs_m = tl.arange(0, BLOCK_M)
    mask_m = offs_m < heads_per_list
    row_head = row_list * heads_per_list + offs_m
    if part_ptr is not None:
        part_ptr += row_head[:, None] * num_parts
    lists = (pages_ptr, table_ptr, start, length, count)
    cache = (k_ptr, v_ptr, stride_kb, stride_kn, stride_kd, stride_vb, stride_vn, stride_ve)
    parts = (part_ptr, num_parts, mask_m)
    num_tiles = (tl.maximum(walk, 0) + BLOCK_T - 1) // BLOCK_T
    m, l, acc = attend_split(
        *(split, num_splits, num_tiles, q, scale, lists, cache, parts, D, E, PAGE_SIZE, BLOCK_SIZE),
        *(WHOLE, PART, P_UNIT, INTERPRET, BLOCK_M, BLOCK_T, BLOCK_D, BLOCK_E),
    )
    store_split(
        *(acc_ptr, m_ptr, l_ptr, row_head * num_splits + split, mask_m, m, l, acc / P_UNIT),
        *(E, BLOCK_E),
    )


@triton.jit
def load_queries(
    q_ptr,
    first_head,
    num_heads,
    stride_qh,
    stride_qd,
    D: tl.constexpr,
    INTERPRET: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """A list's query heads [BLOCK_M, BLOCK_D], 0 beyond them."""
    offs_m = tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    head = (first_head + offs_m).to(tl.int64)
    q = tl.load(
        q_ptr + head[:, None] * stride_qh + offs_d * stride_qd,
        mask=(offs_m < num_heads)[:, None] & (offs_d < D),
        other=0.0,
    )
    if INTERPRET:  # its bfloat16 arithmetic is wrong
        q = q.to(tl.float32)
    return q


@triton.jit
def attend_split(
    split,
    num_splits,
    num_tiles,
    q,
    scale,
    lists,
    cache,
    parts,
    D: tl.constexpr,
    E: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WHOLE: tl.constexpr,
    PART: tl.constexpr,
    P_UNIT: tl.constexpr,
    INTERPRET: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """m, l and acc (times P_UNIT) over one split's share of the tiles. l: summed over the places in
    a tile only by who stores it, for a sum makes the warps of a program wait for each other."""
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.full([BLOCK_M, BLOCK_T], 0.0, tl.float32)
    acc = tl.full([BLOCK_M, BLOCK_E], 0.0, tl.float32)
    # No split takes more than one tile more than another.
    tile = split * num_tiles // num_splits
    end = (split + 1) * num_tiles // num_splits
    # A tile's place is found while the tile before it is read: the ids are loads themselves.
    lowest, block = place_of(tile, lists, PAGE_SIZE, BLOCK_SIZE, WHOLE, BLOCK_T)
    if INTERPRET:  # run-time bounds of `for` need Triton 3.9 there
        while tile < end:
            m, l, acc = attend_tile(
                *(tile, lowest, block, m, l, acc, q, scale, lists, cache, parts, D, E, PAGE_SIZE),
                *(BLOCK_SIZE, WHOLE, PART, P_UNIT, False, INTERPRET, BLOCK_T, BLOCK_D, BLOCK_E),
            )
            tile += 1
            lowest, block = place_of(tile, lists, PAGE_SIZE, BLOCK_SIZE, WHOLE, BLOCK_T)
    else:
        for i in tl.range(tile, end):
            m, l, acc = attend_tile(
                *(i, lowest, block, m, l, acc, q, scale, lists, cache, parts, D, E, PAGE_SIZE),
                *(BLOCK_SIZE, WHOLE, PART, P_UNIT, False, INTERPRET, BLOCK_T, BLOCK_D, BLOCK_E),
            )
            lowest, block = place_of(i + 1, lists, PAGE_SIZE, BLOCK_SIZE, WHOLE, BLOCK_T)
    return m, l, acc


@triton.jit
def store_split(
    acc_ptr, m_ptr, l_ptr, offs_split, mask_m, m, l, acc, E: tl.constexpr, BLOCK_E: tl.constexpr
):
    offs_e = tl.arange(0, BLOCK_E)
    tl.store(m_ptr + offs_split, m, mask=mask_m)
    tl.store(l_ptr + offs_split, tl.sum(l, 1), mask=mask_m)
    acc_ptrs = acc_ptr + offs_split[:, None] * E + offs_e
    tl.store(acc_ptrs, acc, mask=mask_m[:, None] & (offs_e < E))


@triton.jit
def pdl_launch(PDL: tl.constexpr):
    """Let the next kernel of the stream take its place; it waits for this one's end by itself."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def pdl_wait(PDL: tl.constexpr):
    """Wait for the end of the kernel before this one, and for all it wrote."""
    if PDL:
        gdc_wait()


@triton.jit
def signal(flag_ptr):
    """Say that this program is done, after all it wrote."""
    tl.debug_barrier()
    tl.atomic_xchg(flag_ptr, 1, sem="release")


@triton.jit
def wait_for(flag_ptr):
    """Spin until a program has signalled, and see what it wrote. It runs already: a dependent
    kernel takes its place after every program of the one before it."""
    while tl.atomic_add(flag_ptr, 0, sem="acquire") == 0:
        pass


@triton.jit
def attend_tile(
    tile,
    lowest,
    block,
    m,
    l,
    acc,
    q,
    scale,
    lists,
    cache,
    parts,
    D: tl.constexpr,
    E: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WHOLE: tl.constexpr,
    PART: tl.constexpr,
    P_UNIT: tl.constexpr,
    STACKED: tl.constexpr,
    INTERPRET: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """The running softmax (m, l, acc) after BLOCK_T more tokens of the list. l: one sum per head,
    or one per head and place in the tile."""
    k_ptr, v_ptr, stride_kb, stride_kn, stride_kd, stride_vb, stride_vn, stride_ve = cache
    offs_t = tl.arange(0, BLOCK_T)
    offs_d = tl.arange(0, BLOCK_D)
    offs_e = tl.arange(0, BLOCK_E)
    if WHOLE:  # one address a tile
        _, _, start, length, _ = lists
        read = lowest + offs_t < length
        first = (start + lowest).to(tl.int64)
        if BLOCK_SIZE > 1:
            first = first % BLOCK_SIZE
        k_ptr += block * stride_kb + first * stride_kn
        v_ptr += block * stride_vb + first * stride_vn
        offs_k = (offs_t.to(tl.int64) * stride_kn)[:, None] + offs_d * stride_kd
        offs_v = (offs_t.to(tl.int64) * stride_vn)[:, None] + offs_e * stride_ve
    else:
        block_T, token_T, read = locate(tile * BLOCK_T + offs_t, lists, PAGE_SIZE, BLOCK_SIZE)
        offs_k = (block_T * stride_kb + token_T * stride_kn)[:, None] + offs_d * stride_kd
        offs_v = (block_T * stride_vb + token_T * stride_vn)[:, None] + offs_e * stride_ve
    # [BLOCK_T, BLOCK_D] and [BLOCK_T, BLOCK_E]
    k = tl.load(k_ptr + offs_k, mask=read[:, None] & (offs_d < D), other=0.0)
    v = tl.load(v_ptr + offs_v, mask=read[:, None] & (offs_e < E), other=0.0)
    return attend_loaded(
        tile, m, l, acc, q, k, v, read, scale, parts, PART, P_UNIT, STACKED, INTERPRET
    )


@triton.jit
def attend_loaded(
    tile,
    m,
    l,
    acc,
    q,
    k,
    v,
    read,
    scale,
    parts,
    PART: tl.constexpr,
    P_UNIT: tl.constexpr,
    STACKED: tl.constexpr,  # rows 8 to 15 are rows 0 to 7 once more
    INTERPRET: tl.constexpr,
):
    """The running softmax after these keys and values [BLOCK_T, ..], where they are read."""
    if INTERPRET:
        k = k.to(tl.float32)
        v = v.to(tl.float32)
    s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    if STACKED:
        s = either_half(s)
    s = tl.where(read, s, float("-inf"))  # [BLOCK_M, BLOCK_T]

    part_ptr, num_parts, mask_m = parts
    if part_ptr is not None:
        BLOCK_T: tl.constexpr = read.shape[0]
        offs_part = tile * (BLOCK_T // PART) + tl.arange(0, BLOCK_T // PART)
        mask_part = mask_m[:, None] & (offs_part < num_parts)
        tl.store(part_ptr + offs_part, lse_of_parts(s, PART), mask=mask_part)

    return run_softmax(s, m, l, acc, v, P_UNIT, STACKED)


@triton.jit
def run_softmax(s, m, l, acc, v, P_UNIT: tl.constexpr, STACKED: tl.constexpr):
    """The running softmax (m, l, acc) after scores s [BLOCK_M, BLOCK_T] of the values v."""
    m_new = tl.maximum(m, tl.max(s, 1))
    base = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.exp2((s - base[:, None]) * LOG2E)
    alpha = tl.exp2((m - base) * LOG2E)
    if len(l.shape) == 2:  # noqa: SIM108
        l = l * alpha[:, None] + p
    else:
        l = l * alpha + tl.sum(p, 1)
    if STACKED:
        acc = add_stacked(acc, alpha, p * P_UNIT, v)
    else:
        acc = add_weighted(acc * alpha[:, None], p * P_UNIT, v)
    return m_new, l, acc


@triton.jit
def place_of(
    tile,
    lists,
    PAGE_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Position of the first token of a WHOLE tile (not below length: nothing is read) and its
    block of the pool (0 in a contiguous cache)."""
    pages_ptr, table_ptr, start, length, count = lists
    lowest = tile * BLOCK_T
    block = (tile * 0).to(tl.int64)
    if WHOLE:
        if pages_ptr is not None:
            slot = lowest // PAGE_SIZE
            page = tl.load(pages_ptr + slot, mask=slot < count, other=-1)
            is_page = (page >= 0) & (page <= length // PAGE_SIZE)
            lowest = tl.where(is_page, page * PAGE_SIZE + lowest % PAGE_SIZE, length)
        if table_ptr is not None:
            entry = table_ptr + lowest // BLOCK_SIZE
            block = tl.load(entry, mask=lowest < length, other=0).to(tl.int64)
    return lowest, block


@triton.jit
def locate(offs_t, lists, PAGE_SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Where the tokens at places offs_t of a list lie (block, token in it; block 0 in a contiguous
    cache), and whether they are read: in a valid slot, and live."""
    pages_ptr, table_ptr, start, length, count = lists
    if pages_ptr is None:
        position = offs_t
        read = position < length
    else:
        slot = offs_t // PAGE_SIZE
        page = tl.load(pages_ptr + slot, mask=slot < count, other=-1)
        position = page * PAGE_SIZE + offs_t % PAGE_SIZE
        read = (page >= 0) & (page <= length // PAGE_SIZE) & (position < length)
    token = start + position
    if table_ptr is None:
        block = token * 0
    else:
        block = tl.load(table_ptr + token // BLOCK_SIZE, mask=read, other=0)
        token = token % BLOCK_SIZE
    return block.to(tl.int64), token.to(tl.int64), read


@triton.jit
def add_weighted(acc, p, v):
    """acc + p @ v. 16-bit p enters in two pieces, so that only the output is rounded: rounding p
    once adds 20 to 40 % to its rms error (random tensors of 16 to 4096 tokens)."""
    if v.dtype == tl.float32:
        acc = tl.dot(p, v, acc, input_precision="ieee")
    else:
        high = p.to(v.dtype)
        low = (p - high.to(tl.float32)).to(v.dtype)
        acc = tl.dot(low, v, tl.dot(high, v, acc))
    return acc


@triton.jit
def either_half(x):
    """Rows 0 to 7 of x [16, ..], whose rows 8 to 15 are the same."""
    return tl.max(tl.reshape(x, [2, 8, x.shape[1]]), 0)


@triton.jit
def add_stacked(acc, alpha, p, v):
    """add_weighted of p [8, T] to alpha · acc in one product: rows 0 to 7 of acc [16, E] take the
    high pieces of p and rows 8 to 15 the low ones. The sum of both halves is what is meant."""
    BLOCK_T: tl.constexpr = p.shape[1]
    twice = tl.reshape(tl.broadcast_to(p[None, :, :], [2, 8, BLOCK_T]), [16, BLOCK_T])
    alpha = tl.reshape(tl.broadcast_to(alpha[None, :], [2, 8]), [16])
    high = twice.to(v.dtype)
    low = (twice - high.to(tl.float32)).to(v.dtype)
    is_high = tl.arange(0, 16)[:, None] < 8
    return tl.dot(tl.where(is_high, high, low), v, acc * alpha[:, None])


@triton.jit
def lse_of_parts(s, PART: tl.constexpr):
    """Log-sum-exp of each PART neighbouring columns: [BLOCK_M, BLOCK_T // PART]."""
    if PART == 1:
        lse = s
    else:
        s = tl.reshape(s, [s.shape[0], s.shape[1] // PART, PART])
        m = tl.max(s, 2)
        base = tl.where(m == float("-inf"), 0.0, m)
        lse = log_sum(base, tl.sum(tl.exp2((s - base[:, :, None]) * LOG2E), 2))
    return lse


@triton.jit
def log_sum(base, l):
    """base + log(l); -inf where nothing was read."""
    return tl.where(l == 0.0, float("-inf"), base + tl.log(tl.where(l == 0.0, 1.0, l)))


@triton.jit(do_not_specialize=["num_splits", "heads_per_list"])
def merge_splits_kernel(
    acc_ptr,  # [B · H, num_splits, E]
    m_ptr,  # [B · H, num_splits]
    l_ptr,  # [B · H, num_splits]
    out_ptr,  # [B · H, E]
    lse_ptr,  # [B · H]
    flags_ptr,  # [B · S], to be set back to 0 with the keys, None = none
    keys_ptr,  # [B · S, stride_list]
    num_splits,
    heads_per_list,
    stride_list,
    E: tl.constexpr,
    PDL: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Grid (B · H, E / BLOCK_E). An empty split weighs 0; a row of empty ones gives 0 and -inf."""
    row_head = tl.program_id(0).to(tl.int64)
    offs_e = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    mask_e = offs_e < E
    split = tl.arange(0, BLOCK_SPLITS)
    mask_split = split < num_splits
    offs_split = row_head * num_splits + split
    pdl_wait(PDL)
    pdl_launch(PDL)  # no earlier: what comes next would take room where attention still runs
    m_split = tl.load(m_ptr + offs_split, mask=mask_split, other=float("-inf"))
    l_split = tl.load(l_ptr + offs_split, mask=mask_split, other=0.0)
    acc = tl.load(
        acc_ptr + offs_split[:, None] * E + offs_e,
        mask=mask_split[:, None] & mask_e,
        other=0.0,
    )  # [BLOCK_SPLITS, BLOCK_E]

    m = tl.max(m_split, 0)
    base = tl.where(m == float("-inf"), 0.0, m)
    weight = tl.exp2((m_split - base) * LOG2E)
    l = tl.sum(weight * l_split, 0)
    out = tl.sum(weight[:, None] * acc, 0) / tl.where(l == 0.0, 1.0, l)
    tl.store(out_ptr + row_head * E + offs_e, out.to(out_ptr.dtype.element_ty), mask=mask_e)
    if tl.program_id(1) == 0:
        tl.store(lse_ptr + row_head, log_sum(base, l))
        if flags_ptr is not None:
            row_list = row_head // heads_per_list
            if row_head % heads_per_list == 0:
                tl.store(flags_ptr + row_list, 0)
                first = 0
                while first < stride_list:
                    offs = first + tl.arange(0, RESET_BLOCK)
                    keys = keys_ptr + row_list * stride_list + offs
                    tl.store(keys, 0, mask=offs < stride_list)
                    first += RESET_BLOCK
