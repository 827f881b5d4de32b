"""Packing and scoring of thumbnails in plain torch: the meaning of the operations."""

from __future__ import annotations

import torch
from torch import Tensor

from sparse_eval.kernels.thumbnail.format import Thumbnail

SAME_SIZE = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def pack_reference(
    k_BGND: Tensor, page_size: int, bits: int, rule: str, coverage: float
) -> tuple[Tensor, Tensor]:
    """codes_BGNC and step (BGN or BGPD) of whole pages of keys: N is a multiple of page_size."""
    half_range = 2 ** (bits - 1)
    k = k_BGND.to(torch.promote_types(k_BGND.dtype, torch.float32))
    paged = k.unflatten(2, (-1, page_size))  # [B, G, P, page_size, D]
    largest = paged.abs().amax(-1 if rule == "token" else -2)
    step = round_up(largest * (coverage / half_range), k_BGND.dtype)
    if rule == "token":
        step = step.flatten(2)
    step_BGND = spread_step(step, page_size, rule).to(k.dtype)
    code = torch.zeros_like(k, dtype=torch.uint8)
    for cell in range(1 - half_range, half_range):
        code += k >= cell * step_BGND
    planes = code.unflatten(3, (8 // bits, -1))  # [B, G, N, 8 / bits, C]
    codes = torch.zeros_like(planes[..., 0, :])
    for plane in range(8 // bits):
        codes |= planes[..., plane, :] << (plane * bits)
    return codes, step


def round_up(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The smallest number of dtype that is >= x, which is >= 0."""
    nearest = x.to(dtype)
    # of floats >= 0 the next larger has the next larger bits
    above = (nearest.view(SAME_SIZE[dtype.itemsize]) + 1).view(dtype)
    return torch.where(nearest.to(x.dtype) < x, above, nearest)


def spread_step(step: Tensor, page_size: int, rule: str) -> Tensor:
    """The step of each coordinate: [B, G, N, 1 or D]."""
    return step[..., None] if rule == "token" else step.repeat_interleave(page_size, 2)


def codes_of(thumbnail: Thumbnail) -> Tensor:
    """One code per channel: uint8 [B, G, N, D]."""
    shift = torch.arange(0, 8, thumbnail.bits, device=thumbnail.codes.device, dtype=torch.uint8)
    planes = thumbnail.codes[..., None, :] >> shift[:, None]
    return (planes & (2**thumbnail.bits - 1)).flatten(3)


def unpack_reference(thumbnail: Thumbnail) -> Tensor:
    """The levels, [B, G, N, D] in float32 (float64 where the steps are)."""
    dtype = torch.promote_types(thumbnail.step.dtype, torch.float32)
    level = codes_of(thumbnail).to(dtype) + (0.5 - 2 ** (thumbnail.bits - 1))
    return level * spread_step(thumbnail.step, thumbnail.page_size, thumbnail.rule).to(dtype)


def pack_residual_reference(k_BGND: Tensor, thumbnail: Thumbnail, unit: float) -> Tensor:
    """codes_BGND of k - unpack(thumbnail), keys and thumbnail of the same N tokens."""
    left = k_BGND - unpack_reference(thumbnail)
    step = spread_step(thumbnail.step, thumbnail.page_size, thumbnail.rule).to(left.dtype) * unit
    cell = torch.where(step > 0, left / step, 0).floor()
    return (cell + 128).clamp(0, 255).to(torch.uint8)


def unpack_residual_reference(codes_BGND: Tensor, unit: float, thumbnail: Thumbnail) -> Tensor:
    dtype = torch.promote_types(thumbnail.step.dtype, torch.float32)
    step = spread_step(thumbnail.step, thumbnail.page_size, thumbnail.rule).to(dtype) * unit
    return (codes_BGND.to(dtype) - 127.5) * step


def scores_reference(q_BHD: Tensor, thumbnail: Thumbnail, scale: float) -> Tensor:
    """scale · q·level for each head and token of capacity: [B, H, N]."""
    return scale * per_token(q_BHD, unpack_reference(thumbnail))


def bound_reference(q_BHD: Tensor, thumbnail: Thumbnail, scale: float) -> Tensor:
    """The most by which a score can miss scale · q·k: [B, H, N]."""
    step = thumbnail.step
    dtype = torch.promote_types(step.dtype, torch.float32)
    # a score of D products is off by this much more, in steps of its key
    lost = (q_BHD.shape[2] + 8) * torch.finfo(dtype).eps
    width = abs(scale) * (thumbnail.reach * (1 + lost) + 2 ** (thumbnail.bits - 1) * lost)
    if thumbnail.rule == "channel":
        per_page = per_token(q_BHD.abs(), step.to(dtype))  # [B, H, P]
        return width * per_page.repeat_interleave(thumbnail.page_size, -1)
    norm = q_BHD.to(dtype).abs().sum(-1)[..., None]  # [B, H, 1]
    group_size = q_BHD.shape[1] // step.shape[1]
    return width * norm * step.to(dtype).repeat_interleave(group_size, 1)


def per_token(q_BHD: Tensor, x_BGND: Tensor) -> Tensor:
    """q·x of each head with its KV head's x, whose batch may be 1: [B, H, N]."""
    q = q_BHD.to(x_BGND.dtype).unflatten(1, (x_BGND.shape[1], -1))  # [B, G, M, D]
    return (q @ x_BGND.mT).flatten(1, 2)


def extend_reference(
    thumbnail: Thumbnail,
    residual_codes: Tensor | None,
    unit: float,
    k: Tensor,
    starts_B: Tensor | None,
    lengths_B: Tensor,
    block_table: Tensor | None,
    fresh: bool,
) -> None:
    """One row at a time, its newest full page."""
    size = thumbnail.page_size
    for row in range(len(lengths_B)):
        page = int(lengths_B[row]) // size - 1
        if page < 0 or (fresh and int(lengths_B[row]) % size):
            continue
        first = page * size + (0 if starts_B is None else int(starts_B[row]))
        token = torch.arange(first, first + size, device=k.device)
        if block_table is None:
            keys = k[row % len(k)][:, token]  # [G, page_size, D]
        else:
            table = block_table[row % len(block_table)].long()
            keys = k[table[token // k.shape[2]], :, token % k.shape[2]].transpose(0, 1)
        form = (size, thumbnail.bits, thumbnail.rule, thumbnail.coverage)
        codes, step = pack_reference(keys[None], *form)
        at, place = row % len(thumbnail.codes), slice(page * size, (page + 1) * size)
        thumbnail.codes[at, :, place] = codes[0]
        step_place = place if thumbnail.rule == "token" else slice(page, page + 1)
        thumbnail.step[at, :, step_place] = step[0]
        if residual_codes is not None:
            packed = thumbnail.with_tensors(codes, step)
            left = pack_residual_reference(keys[None], packed, unit)
            residual_codes[at, :, place] = left[0]
