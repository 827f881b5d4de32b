"""The format of a thumbnail: 2- or 4-bit keys with their steps, and the 8-bit residual on top.

A code c of `bits` bits stands for the level (c + ½ - 2^(bits-1)) · step: free of zero, so that
small coordinates keep their sign, and symmetric but on the borders of cells, which are the upper
cell's (0 is +½ step). A residual's code r stands for
(r + ½ - 128) · residual step. Shapes: see sparse_eval.core; C = D · bits / 8 bytes a key.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

BITS = (2, 4)
RULES = ("token", "channel")
MAX_TRITON_PAGE_SIZE = 512


@dataclass(frozen=True)
class Thumbnail:
    """Keys of full pages in `bits` bits a coordinate.

    codes: uint8 [B, G, N, C], N = pages of capacity · page_size. Byte j of a key holds the codes of
    channels j, j + C, j + 2C, ..., the first in its lowest bits.
    step, in the keys' dtype: rule token [B, G, N], one per key; rule channel [B, G, P, D], one per
    channel of a page.
    coverage: the share of the largest magnitude under a step's rule that the outermost cell
    reaches; below 1 clips outliers for finer steps."""

    codes: Tensor
    step: Tensor
    page_size: int
    bits: int
    rule: str
    coverage: float = 1.0

    @property
    def num_tokens(self) -> int:
        """Tokens of capacity."""
        return self.codes.shape[2]

    @property
    def num_pages(self) -> int:
        """Pages of capacity."""
        return self.num_tokens // self.page_size

    @property
    def head_dim(self) -> int:
        return self.codes.shape[3] * 8 // self.bits

    @property
    def reach(self) -> float:
        """The largest error of a coordinate, in steps: ½, more where outliers are clipped."""
        half_range = 2 ** (self.bits - 1)
        return max(0.5, half_range / self.coverage - (half_range - 0.5))

    @property
    def num_bytes(self) -> int:
        """Bytes of codes and steps."""
        return sum(x.numel() * x.element_size() for x in (self.codes, self.step))

    def with_tensors(self, codes: Tensor, step: Tensor) -> Thumbnail:
        return replace(self, codes=codes, step=step)


@dataclass(frozen=True)
class Residual:
    """What a thumbnail leaves of its keys, in 8 bits a coordinate.

    codes: uint8 [B, G, N, D]. The step is the thumbnail's times `unit`, so that 256 cells
    cover what the thumbnail can leave: no tensor of its own."""

    codes: Tensor
    unit: float


def unit_of(thumbnail: Thumbnail) -> float:
    """The residual's step in thumbnail steps."""
    return thumbnail.reach / 128


def can_use_triton(page_size: int) -> bool:
    """Whether the triton backend has tiles of whole pages of this size."""
    return page_size & (page_size - 1) == 0 and page_size <= MAX_TRITON_PAGE_SIZE
