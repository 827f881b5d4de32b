"""A GGUF file's header: its short metadata and how many parameters it holds, in milliseconds.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3).
"""

from __future__ import annotations

import math
import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_SCALARS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class GgufHeader:
    """metadata: scalars and strings by key, arrays as None. num_parameters: of all tensors."""

    metadata: dict[str, Any]
    num_parameters: int

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", ""))

    def of_architecture(self, key: str) -> Any:
        """The value of `<architecture>.<key>`, None where the file has none."""
        return self.metadata.get(f"{self.architecture}.{key}")


def read_header(path: Path) -> GgufHeader:
    """Raises ValueError in one line for what is not a whole GGUF file."""
    if not os.path.isfile(path):
        raise ValueError(f"model.path must be a GGUF file, got {path} (no such file)")
    if path.stat().st_size < 24:
        raise ValueError(f"model.path must be a GGUF file, got {path} (too short)")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            return _Reader(data).header()
        except (struct.error, UnicodeDecodeError, KeyError, OverflowError):
            raise ValueError(f"{path} is truncated or not a GGUF file") from None
        except ValueError as error:
            raise ValueError(f"{path} {error}") from None


class _Reader:
    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at = data, 0

    def header(self) -> GgufHeader:
        if self.data[:4] != b"GGUF":
            raise ValueError("is not a GGUF file (it does not begin with GGUF)")
        self.at = 4
        version, num_tensors, num_keys = self.scalar("I"), self.scalar("Q"), self.scalar("Q")
        if version not in (2, 3):
            raise ValueError(f"has GGUF version {version}, accepted: 2 and 3")
        metadata = {self.string(): self.value(self.scalar("I")) for _ in range(num_keys)}
        num_parameters = last_offset = 0
        for _ in range(num_tensors):
            self.string()
            num_parameters += math.prod(self.scalar("Q") for _ in range(self.scalar("I")))
            self.scalar("I")
            last_offset = max(last_offset, self.scalar("Q"))
        if self.at + last_offset >= len(self.data):
            raise ValueError("is truncated: its last tensors lie beyond its end")
        return GgufHeader(metadata, num_parameters)

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self.data, self.at)
        self.at += struct.calcsize("<" + code)
        return value

    def string(self) -> str:
        length = self.scalar("Q")
        self.at += length
        if self.at > len(self.data):
            raise ValueError("is truncated")
        return self.data[self.at - length : self.at].decode()

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.scalar(_SCALARS[kind])
        element, length = self.scalar("I"), self.scalar("Q")
        if element in _SCALARS:
            self.at += length * struct.calcsize("<" + _SCALARS[element])
        else:
            for _ in range(length):
                self.value(element)
        return None
