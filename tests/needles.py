"""A small trained tokenizer with merges, haystacks and planted prompts for tests."""

from __future__ import annotations

from functools import cache
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from sparse_eval.inputs.texts import docs
from sparse_eval.needle.haystack import Haystack
from sparse_eval.needle.kinds import KINDS
from sparse_eval.needle.plant import Planted, plant
from sparse_eval.needle.sentences import Spot
from sparse_eval.needle.template import make_template

CHAT = (
    "{{ bos }}{% for m in messages %}<user>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<model>{% endif %}"
)


@cache
def bpe(*, adds_bos: bool = False, chat: str | None = None) -> Any:
    """Byte-level BPE of 800 tokens. chat: None, or a template; {{ bos }} in it stands for <bos>."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=800,
        special_tokens=["<pad>", "<bos>", "<eos>", "<user>", "<model>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator([docs().text[:60_000]], trainer)
    if adds_bos:
        core.post_processor = processors.TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", 1)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        additional_special_tokens=["<user>", "<model>"],
        chat_template=chat,
    )


def haystack(n: int = 8, text: str | None = None) -> Haystack:
    return Haystack(docs().text if text is None else text, "docs", n)


def planted(
    kind: str = "multikey",
    depth: float = 0.5,
    *,
    context: int = 600,
    sample: int = 0,
    seed: int = 0,
    tokenizer: Any = None,
    chat: str = "auto",
    hay: Haystack | None = None,
    role: str = "measured",
) -> Planted:
    tokenizer = bpe() if tokenizer is None else tokenizer
    spot = Spot(KINDS[kind], context, depth, sample, seed, role)
    template = make_template(tokenizer, chat)
    return plant(spot, hay or haystack(), tokenizer, template, num_distractors=3)
