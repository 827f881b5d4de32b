"""A hand-made choice of pages on the embedded model: what an answer needs and what it does not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from sparse_eval.core import AttentionCall
from sparse_eval.needle.answer import Asker
from sparse_eval.needle.plant import Planted
from sparse_eval.policies.base import (
    Policy,
    Selection,
    State,
    num_pages_of,
    selection_from_mask,
    visible_BP,
)
from sparse_eval.prefill import prefill
from tests.needles import planted


@dataclass(frozen=True, kw_only=True)
class Chosen(Policy[State]):
    """Reads the given pages and all from `tail` on."""

    pages: tuple[int, ...]
    tail: int

    def select(self, call: AttentionCall, state: State, budget: int | None) -> Selection:
        num_pages = num_pages_of(call.capacity, self.page_size)
        page = torch.arange(num_pages, device=call.device)
        chosen = torch.isin(page, torch.tensor(self.pages)) | (page >= self.tail)
        mask = visible_BP(call, self.page_size, num_pages) & chosen
        return selection_from_mask(mask[:, None].expand(-1, call.num_kv_heads, -1), self.page_size)


def pages_of(span: tuple[int, int]) -> tuple[int, ...]:
    return tuple(range(span[0] // 16, (span[1] - 1) // 16 + 1))


def answer(loaded: Any, needle: Planted, filled: Any, pages: tuple[int, ...]) -> str:
    from sparse_eval import patched

    asker = Asker(loaded.model, loaded.tokenizer, needle, filled, 10, is_plain=True)
    policy = Chosen(pages=pages, tail=needle.question_start // 16)
    with patched(loaded.model, policy, budget=128) as trace:
        generated = asker.generate()
    assert trace.density < 0.25
    return asker.score(generated).outcome


@pytest.mark.embedded
def test_the_needle_the_question_and_the_sinks_are_enough_and_without_the_needle_nothing_is():
    import yaml

    from sparse_eval.inputs.store import user_cache
    from sparse_eval.models import load_model
    from tests.tiny import CONF

    cfg = yaml.safe_load((CONF / "model" / "smollm2.yaml").read_text())
    loaded = load_model(cfg, device="cpu", dtype=torch.float32, model_cache=user_cache())
    needle = planted("passcode", 0.4, context=640, tokenizer=loaded.tokenizer, chat="none")
    filled = prefill(loaded.model, needle.ids)
    assert answer(loaded, needle, filled, (0, *pages_of(needle.needle_span))) == "correct"
    assert answer(loaded, needle, filled, (0,)) != "correct"
