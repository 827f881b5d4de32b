"""Faster Flash Decoding: top-δ selection over thumbnails, attention over what it kept."""

from sparse_eval.kernels.ffd.api import (
    PSEUDO_MAX,
    ffd_select,
    ffd_step,
    lists_decode,
    residual_decode,
)

__all__ = ["PSEUDO_MAX", "ffd_select", "ffd_step", "lists_decode", "residual_decode"]
