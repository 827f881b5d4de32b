"""Text -> prompts of exactly so many tokens: several disjoint segments, one BOS, nothing repeated.

Token ids are the truth: a text is tokenised once and cut, never decoded and encoded again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sparse_eval.inputs import texts
from sparse_eval.inputs.store import user_cache
from sparse_eval.inputs.tokens import Encode, leading_bos, text_encoder

if TYPE_CHECKING:
    from sparse_eval.models import LoadedModel

SOURCES = ("docs", "kjv", "file", "dataset", "transcripts")
LOCAL_TEXTS = ("docs", "file")
"""Sources that are on this machine, whatever was fetched."""
# a slice's last tokens may change when the text goes on: they are not used
UNSETTLED_TOKENS = 64
LINE_START_WITHIN = 2000


@dataclass(frozen=True)
class Prompt:
    """ids: int64 [context] on the CPU, BOS included. continuation: int64 [extra], the text's next
    tokens. sample: 0 ... n - 1. hash: of the ids. source: where the text is from."""

    ids: Tensor
    continuation: Tensor
    sample: int
    hash: str
    source: str


def make_prompts(
    cfg: Mapping[str, Any],
    tokenizer: Any,
    *,
    context: int,
    extra: int,
    seed: int,
    loaded: LoadedModel | None = None,
    model_cache: Path | None = None,
    cache_dir: Path | None = None,
) -> list[Prompt]:
    """cfg.n prompts of exactly `context` tokens, each with the `extra` tokens that follow it.

    seed: of transcripts; texts are cut the same whatever it is. loaded: who writes transcripts.
    model_cache: where the KJV is kept (None: the user's cache). cache_dir: where transcripts are
    kept (None: they are not). Raises ValueError in one line, also for a text that is too short.
    """
    check_prompts(cfg)
    if context < 2 or extra < 0:
        raise ValueError(f"context must be >= 2 tokens and extra >= 0, got {context} and {extra}")
    if cfg["source"] == "transcripts":
        return _transcripts(cfg, loaded, context, extra, seed, cache_dir)
    bos, encode = leading_bos(tokenizer), text_encoder(tokenizer)
    length = context + extra - len(bos)
    if cfg["source"] == "dataset":
        source = f"dataset: {cfg['path']} ({cfg['split']})"
        segments = consecutive_segments(texts.documents(cfg), encode, cfg["n"], length, source)
    else:
        text = whole_text(cfg, model_cache or user_cache())
        source = text.source
        segments = spread_segments(text.text, encode, cfg["n"], length, source)
    return [prompt_of(bos + ids, context, i, source) for i, ids in enumerate(segments)]


def check_prompts(cfg: Mapping[str, Any]) -> None:
    """ValueError in one line for what cannot be right, before anything is loaded or fetched."""
    source, n = cfg.get("source"), cfg.get("n")
    if source not in SOURCES:
        raise ValueError(f"prompts.source must be one of {', '.join(SOURCES)}, got {source!r}")
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise ValueError(f"prompts.n must be an integer >= 1, got {n!r}")
    if source == "file":
        texts.given_file(cfg)
    if source == "dataset":
        for key in ("path", "split", "column"):
            if not isinstance(cfg.get(key), str) or not cfg[key].strip():
                raise ValueError(f"prompts=dataset needs prompts.{key}, got {cfg.get(key)!r}")
    if source == "transcripts":
        from sparse_eval.inputs.transcripts import check_transcripts

        check_transcripts(cfg)


def whole_text(cfg: Mapping[str, Any], model_cache: Path) -> texts.Text:
    """The text of a source that has one: docs, kjv, file."""
    match cfg["source"]:
        case "docs":
            return texts.docs()
        case "kjv":
            return texts.kjv(cfg, model_cache)
    return texts.file(cfg)


def _transcripts(
    cfg: Mapping[str, Any],
    loaded: LoadedModel | None,
    context: int,
    extra: int,
    seed: int,
    cache_dir: Path | None,
) -> list[Prompt]:
    from sparse_eval.inputs.transcripts import transcripts

    if loaded is None:
        raise ValueError("prompts=transcripts needs the loaded model: it writes them")
    written = transcripts(cfg, loaded, num_tokens=context + extra, seed=seed, cache_dir=cache_dir)
    return [prompt_of(t.ids, context, i, t.source) for i, t in enumerate(written)]


def prompt_of(ids: list[int], context: int, sample: int, source: str) -> Prompt:
    """The first `context` ids are the prompt, the rest its continuation."""
    tokens = torch.tensor(ids, dtype=torch.int64)
    prompt, continuation = tokens[:context].clone(), tokens[context:].clone()
    return Prompt(prompt, continuation, sample, hash_of(prompt), source)


def hash_of(ids: Tensor) -> str:
    """16 hex digits of sha256 over the ids as little-endian int64."""
    return hashlib.sha256(ids.numpy().astype("<i8").tobytes()).hexdigest()[:16]


def spread_segments(text: str, encode: Encode, n: int, length: int, source: str) -> list[list[int]]:
    """n disjoint runs of `length` ids, spread evenly over the text; each begins at a line's start
    where there is room. Only as much is encoded as needed, all of it if it is a close fit."""
    starts = [_line_start(text, i * len(text) // n) for i in range(n)]
    spans = [text[a:b] for a, b in zip(starts, [*starts[1:], len(text)], strict=True)]
    segments = [_first_ids(span, encode, length) for span in spans]
    if all(len(ids) == length for ids in segments):
        return segments
    ids = encode(text)
    if len(ids) < n * length:
        raise too_short(source, len(ids), n, length)
    step = len(ids) // n
    return [ids[i * step : i * step + length] for i in range(n)]


def _line_start(text: str, at: int) -> int:
    """The first start of a line, else of a word, shortly after `at`; `at` if there is none."""
    if at == 0:
        return 0
    for separator in "\n ":
        found = text.find(separator, at, at + LINE_START_WITHIN)
        if found >= 0:
            return found + 1
    return at


def _first_ids(text: str, encode: Encode, length: int) -> list[int]:
    """The first `length` ids of a text, or all it has."""
    num_chars = 5 * length + 5 * UNSETTLED_TOKENS
    while num_chars < len(text):
        ids = encode(text[:num_chars])
        if len(ids) >= length + UNSETTLED_TOKENS:
            return ids[:length]
        num_chars *= 2
    return encode(text)[:length]


def consecutive_segments(
    documents: Iterable[str], encode: Encode, n: int, length: int, source: str
) -> list[list[int]]:
    """n runs of `length` ids, one after the other, from documents joined by blank lines."""
    segments: list[list[int]] = []
    pending: list[int] = []
    for document in documents:
        pending += encode(f"\n\n{document}" if pending or segments else document)
        while len(pending) >= length:
            segments.append(pending[:length])
            pending = pending[length:]
            if len(segments) == n:
                return segments
    raise too_short(source, len(segments) * length + len(pending), n, length)


def too_short(source: str, num_tokens: int, n: int, length: int) -> ValueError:
    return ValueError(
        f"the text is too short: {source} has {num_tokens} tokens in this model's tokenizer, "
        f"prompts.n={n} segments of {length} tokens need {n * length}"
    )
