"""Keys in 2 or 4 bits (thumbnails) with an 8-bit residual: packing, extension, scores."""

from sparse_eval.kernels.thumbnail.api import (
    extend_thumbnail,
    pack_residual,
    pack_thumbnail,
    score_error_bound,
    thumbnail_scores,
    unpack,
    unpack_residual,
)
from sparse_eval.kernels.thumbnail.format import (
    BITS,
    MAX_TRITON_PAGE_SIZE,
    RULES,
    Residual,
    Thumbnail,
    can_use_triton,
)

__all__ = [
    "BITS",
    "MAX_TRITON_PAGE_SIZE",
    "RULES",
    "Residual",
    "Thumbnail",
    "can_use_triton",
    "extend_thumbnail",
    "pack_residual",
    "pack_thumbnail",
    "score_error_bound",
    "thumbnail_scores",
    "unpack",
    "unpack_residual",
]
