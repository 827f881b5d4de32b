"""Transcripts: prompts that the model wrote itself, answering seeded questions by sampling.

A model's own text is what its cache holds in use, a document is not. Every row of the batch is one
stream of tokens, fed one at a time: a question's tokens are forced, an answer's are sampled. When
an answer ends (EOS) the next question follows in the model's own chat format, until the stream is
as long as asked; so rows always have the same length and nothing is padded.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sparse_eval.inputs.store import say
from sparse_eval.inputs.tokens import control_ids, leading_bos
from sparse_eval.prefill import cache_keyword

if TYPE_CHECKING:
    from sparse_eval.models import LoadedModel

REPLY = "REPLY7319"
_NUMBER = re.compile(r"\{[a-e]\}")


@dataclass(frozen=True)
class Transcript:
    """ids: exactly the tokens asked for. num_sampled: how many of them the model wrote."""

    ids: list[int]
    num_sampled: int
    num_questions: int

    @property
    def source(self) -> str:
        share = self.num_sampled / len(self.ids)
        questions = f"{self.num_questions} question{'s' if self.num_questions > 1 else ''}"
        return f"transcripts: {questions} answered, {share:.0%} of the tokens sampled"


def check_transcripts(cfg: Mapping[str, Any]) -> None:
    temperature, top_p, batch = cfg.get("temperature"), cfg.get("top_p"), cfg.get("batch")
    if not isinstance(temperature, int | float) or temperature <= 0:
        raise ValueError(f"prompts.temperature must be a number > 0, got {temperature!r}")
    if not isinstance(top_p, int | float) or not 0 < top_p <= 1:
        raise ValueError(f"prompts.top_p must be a number in (0, 1], got {top_p!r}")
    if isinstance(batch, bool) or not isinstance(batch, int) or batch < 1:
        raise ValueError(f"prompts.batch must be an integer >= 1, got {batch!r}")
    questions = cfg.get("questions")
    is_list = hasattr(questions, "__iter__") and not isinstance(questions, str)
    if not is_list or not questions or not all(isinstance(q, str) and q for q in questions):
        raise ValueError(f"prompts.questions must be a list of texts, got {questions!r}")


def transcripts(
    cfg: Mapping[str, Any],
    loaded: LoadedModel,
    *,
    num_tokens: int,
    seed: int,
    cache_dir: Path | None,
) -> list[Transcript]:
    """cfg.n streams of num_tokens tokens. One forward pass per token and batch: minutes on a GPU
    for long ones, which is said. Kept in cache_dir, since a sweep asks for the same ones again."""
    asked = {k: cfg[k] for k in ("n", "temperature", "top_p", "batch")} | {
        "questions": list(cfg["questions"]),
        "model": [loaded.info.revision, loaded.info.weights, str(loaded.dtype)],
        "device": torch.device(loaded.device).type,
        "num_tokens": num_tokens,
        "seed": seed,
    }
    key = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:16]
    path = None if cache_dir is None else cache_dir / "transcripts" / f"{key}.json"
    if path is not None and os.path.exists(path):
        return [Transcript(**kept) for kept in json.loads(path.read_text())]
    questions = _questions(cfg, seed)
    rows = [_Row(loaded.tokenizer, _ends(loaded), questions, seed, i) for i in range(cfg["n"])]
    for at in range(0, len(rows), cfg["batch"]):
        _write(rows[at : at + cfg["batch"]], loaded, num_tokens, cfg["temperature"], cfg["top_p"])
    written = [Transcript(row.ids, row.num_sampled, row.num_questions) for row in rows]
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}.partial")
        partial.write_text(json.dumps([asdict(t) for t in written]))
        partial.replace(path)
    return written


def _questions(cfg: Mapping[str, Any], seed: int) -> Iterator[str]:
    """Questions in a seeded order, none twice; {a} ... {e} become seeded numbers from 3 to 99."""
    draw = random.Random(seed)
    seen: set[str] = set()
    for _ in range(1000 * len(cfg["questions"])):
        template = draw.choice(list(cfg["questions"]))
        question = _NUMBER.sub(lambda _: str(draw.randint(3, 99)), template)
        if question not in seen:
            seen.add(question)
            yield question
    raise ValueError(
        f"prompts.questions are used up after {len(seen)}, before {cfg['n']} transcripts are long "
        "enough: give more, or some with numbers to draw, such as {a}"
    )


class _Row:
    """One stream: what it holds, the forced tokens it still has to take, its own random numbers."""

    def __init__(self, tokenizer: Any, ends: set[int], questions: Iterator[str], seed: int, i: int):
        self.tokenizer, self.ends, self.questions = tokenizer, ends, questions
        self.random = torch.Generator().manual_seed(1_000_003 * seed + i)
        self.ids: list[int] = []
        self.num_sampled = self.num_questions = 0
        bos = leading_bos(tokenizer)
        opening = self._encode(self._turn(first=True))
        if bos and opening[:1] != bos:
            opening = bos + opening
        self.forced = deque(opening)

    def take(self, num_tokens: int) -> None:
        self.ids += [self.forced.popleft() for _ in range(num_tokens)]

    def sample(self, probabilities: Tensor) -> None:
        """Append a token drawn from `probabilities` [vocab]; an end brings the next question."""
        ranked, order = probabilities.sort(descending=True)
        reached = ranked.cumsum(0)
        draw = torch.rand((), generator=self.random).item()
        rank = (reached < draw * reached[-1]).sum().minimum((ranked > 0).sum() - 1)
        token = int(order[rank])
        if token in self.ends:
            self.forced.extend(self._encode(self._turn(first=False)))
            self.take(1)
        else:
            self.ids.append(token)
            self.num_sampled += 1

    def _turn(self, *, first: bool) -> str:
        """The next question in the chat format, after the end of an answer unless it is the first.
        Without a chat template: plain text, and the answer's EOS is left out."""
        question = next(self.questions)
        self.num_questions += 1
        if not self.tokenizer.chat_template:
            return ("" if first else "\n\n") + f"Question: {question}\nAnswer:"
        asked = {"role": "user", "content": question}
        before = [] if first else [asked, {"role": "assistant", "content": REPLY}]
        text = self.tokenizer.apply_chat_template(
            [*before, asked], tokenize=False, add_generation_prompt=True
        )
        _, reply, after = text.partition(REPLY)
        if not first and not reply:
            raise ValueError("prompts=transcripts: the chat template drops the assistant's replies")
        return text if first else after

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def _ends(loaded: LoadedModel) -> set[int]:
    """Ids that end an answer: the tokenizer's EOS and the model's own list."""
    told = getattr(loaded.model.generation_config, "eos_token_id", None)
    listed = told if isinstance(told, list) else [told]
    return {i for i in (*listed, loaded.tokenizer.eos_token_id) if i is not None}


@torch.inference_mode()
def _write(
    rows: list[_Row], loaded: LoadedModel, num_tokens: int, temperature: float, top_p: float
) -> None:
    """Bring every row to num_tokens: one forward pass over the common start, then one a token."""
    model = loaded.model
    keyword = cache_keyword(model)
    # markers of the chat format are forced, never sampled
    banned = sorted(control_ids(loaded.tokenizer) - rows[0].ends)
    start = min(num_tokens, *(len(row.forced) for row in rows))
    for row in rows:
        row.take(start)
    cache: dict[str, Any] = {}
    clock = time.perf_counter()
    timed_from = start + 4
    for length in range(start, num_tokens):
        new = torch.tensor([row.ids[-start:] if not cache else row.ids[-1:] for row in rows])
        out = model(new.to(model.device), **cache, use_cache=True, logits_to_keep=1)
        cache = {keyword: out[keyword]}
        logits_RV = out.logits[:, -1].float() / temperature
        logits_RV[:, banned] = -torch.inf
        probabilities_RV = nucleus(logits_RV.softmax(-1), top_p)
        for row, probabilities in zip(rows, probabilities_RV, strict=True):
            row.take(1) if row.forced else row.sample(probabilities)
        if length == timed_from:
            clock = time.perf_counter()
        if length == timed_from + 16:
            _say_cost(len(rows), num_tokens, (time.perf_counter() - clock) / 16, loaded)


def nucleus(probabilities_RV: Tensor, top_p: float) -> Tensor:
    """Zero but for the fewest likeliest tokens that hold top_p of each row. Not renormalised.
    Source: Holtzman et al. 2020, https://arxiv.org/abs/1904.09751."""
    ranked, order = probabilities_RV.sort(dim=-1, descending=True)
    kept = torch.where(ranked.cumsum(-1) - ranked < top_p, ranked, 0)
    return torch.zeros_like(kept).scatter(-1, order, kept)


def _say_cost(num_rows: int, num_tokens: int, step_s: float, loaded: LoadedModel) -> None:
    say(
        f"transcripts: {loaded.info.title} writes {num_rows} x {num_tokens} tokens, about "
        f"{step_s * num_tokens / 60:.1f} minutes at {1000 * step_s:.0f} ms a token"
    )
