"""GGUF files, which transformers' own loader reads, on a backend."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from click.testing import CliRunner
from transformers import AutoModelForCausalLM

from attnmux.configs import request_from_model
from attnmux.core import InvalidInput
from attnmux.core.cli.verbs import verbs
from attnmux.transformers import open_checkpoint
from attnmux.transformers.load import checkpoint as checkpoints

VOCABULARY = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁a", "b"]
LAYERS, HEADS, KV_HEADS, HEAD_DIM, WIDTH = 2, 6, 2, 8, 48


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    gguf = pytest.importorskip("gguf", reason="writes the file")
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(32)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(VOCABULARY))
    writer.add_tokenizer_model("llama")
    writer.add_token_list(VOCABULARY)
    writer.add_token_scores([0.0] * len(VOCABULARY))
    writer.add_token_types([2, 3, 3, *[6] * 256, 1, 1])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    torch.manual_seed(0)

    def add(name, *shape, scale=0.3):
        writer.add_tensor(name, (torch.randn(shape) * scale).numpy())

    for name in ("token_embd", "output"):
        add(f"{name}.weight", len(VOCABULARY), WIDTH)
    add("output_norm.weight", WIDTH, scale=1)
    for layer in range(LAYERS):
        for name, rows in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            add(f"blk.{layer}.attn_{name}.weight", rows * HEAD_DIM, WIDTH)
        add(f"blk.{layer}.attn_output.weight", WIDTH, HEADS * HEAD_DIM)
        for name in ("gate", "up"):
            add(f"blk.{layer}.ffn_{name}.weight", 32, WIDTH)
        add(f"blk.{layer}.ffn_down.weight", WIDTH, 32)
        for name in ("attn", "ffn"):
            add(f"blk.{layer}.{name}_norm.weight", WIDTH, scale=1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def generate(*args):
    return CliRunner().invoke(verbs, ["generate", *map(str, args)])


def test_it_generates_as_transformers_does(file, tmp_path) -> None:
    pytest.importorskip("accelerate", reason="transformers loads GGUF files with it")
    ids = [5, 40, 77, 9, 101]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": ids, "max_new_tokens": 12}))
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name)
    tokens = torch.tensor([ids])
    given = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": 2}
    said = model.generate(tokens, attention_mask=torch.ones_like(tokens), **given)
    for name in (file, file.parent):
        result = generate("--model", name, "--prompts", prompts, "--json", "--page-size", 4)
        assert result.exit_code == 0, result.output
        answer = json.loads(result.stdout)
        assert answer["results"][0]["token_ids"] == said[0, len(ids) :].tolist()
        assert answer["decision"]["kv_dtype"] == "float32"


def test_choosing_reads_the_same(file, monkeypatch) -> None:
    reader = "attnmux.transformers.load.gguf_files"
    point = pytest.importorskip(reader).config_of
    monkeypatch.setattr("attnmux.configs.reading.read_gguf", point)
    request = request_from_model(file)
    heads = request.num_q_heads, request.num_kv_heads, request.head_dim
    assert (*heads, request.dtype) == (HEADS, KV_HEADS, HEAD_DIM, "float32")


def test_what_cannot_be_read(file, tmp_path, monkeypatch) -> None:
    several = shutil.copytree(file.parent, tmp_path / "several")
    shutil.copy(file, several / "other.gguf")
    with pytest.raises(InvalidInput, match="2 GGUF files"):
        open_checkpoint(several)
    with pytest.raises(InvalidInput, match="revision"):
        open_checkpoint(file, revision="main")
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(b"GGUF" + bytes(20))
    with pytest.raises(InvalidInput, match="damaged"):
        open_checkpoint(damaged)
    monkeypatch.setattr(checkpoints, "find_spec", lambda name: None)
    with pytest.raises(InvalidInput, match=r"attnmux-transformers\[gguf\]"):
        open_checkpoint(file)
