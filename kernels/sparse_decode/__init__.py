"""Decode attention over selected pages of a KV cache, with its log-sum-exp."""

from sparse_eval.kernels.sparse_decode.api import BACKENDS, sparse_decode

__all__ = ["BACKENDS", "sparse_decode"]
