"""A byte-level tokenizer that needs no files: what the tiny random models of the tests speak."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

PAD, BOS, EOS = "<pad>", "<bos>", "<eos>"
VOCAB_SIZE = 3 + 256

CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}"
    "{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def byte_tokenizer(*, adds_bos: bool) -> Tokenizer:
    """One token per UTF-8 byte after <pad> 0, <bos> 1 and <eos> 2; offsets are in characters."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([PAD, BOS, EOS, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", special_tokens=[(BOS, vocab[BOS])]
        )
    return tokenizer
