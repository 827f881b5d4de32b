"""A prefill from disk decodes as the one that was saved."""

from __future__ import annotations

import pytest
import torch

from sparse_eval.prefill import prefill
from sparse_eval.prefill_store import load_prefill, save_prefill
from sparse_eval.record import record
from tests.tiny import random_ids, tiny_model


@pytest.mark.parametrize("name", ["tiny_llama", "tiny_gemma3"])
def test_decoding_from_disk_is_decoding_from_memory(name, tmp_path):
    model, ids = tiny_model(name), random_ids(90)[0]
    filled = prefill(model, ids)
    save_prefill(filled, tmp_path / "p.safetensors")
    again = load_prefill(tmp_path / "p.safetensors", model, ids)
    a, b = (record(model, p, meta={"capture_hash": "x"}, num_steps=6) for p in (filled, again))
    assert a.meta == b.meta
    for layer, x in a.layers.items():
        assert torch.equal(x.outputs_THE, b.layers[layer].outputs_THE)
        assert torch.equal(x.prompt_queries_WHD, b.layers[layer].prompt_queries_WHD)


def test_a_damaged_or_foreign_file_is_one_line(llama, tmp_path):
    ids, path = random_ids(40)[0], tmp_path / "p.safetensors"
    save_prefill(prefill(llama, ids), path)
    with pytest.raises(ValueError, match="another prompt"):
        load_prefill(path, llama, random_ids(40, seed=1)[0])
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ValueError, match="not a readable prefill"):
        load_prefill(path, llama, ids)
