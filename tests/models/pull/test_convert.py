"""GGUF: a tiny file of 4-bit blocks becomes a dense checkpoint with the values the blocks stand for, in silence."""

from __future__ import annotations

import logging
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers.utils import logging as transformers_logging

from kvfold.models.pull import convert

DIM, HIDDEN, VOCAB, HEADS = 32, 64, 64, 2
SHAPES = {
    "token_embd": (VOCAB, DIM),
    "blk.0.attn_q": (DIM, DIM),
    "blk.0.attn_k": (DIM, DIM),
    "blk.0.attn_v": (DIM, DIM),
    "blk.0.attn_output": (DIM, DIM),
    "blk.0.ffn_gate": (HIDDEN, DIM),
    "blk.0.ffn_up": (HIDDEN, DIM),
    "blk.0.ffn_down": (DIM, HIDDEN),
}


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    _write_facts(writer)
    _write_tokenizer(writer)
    random = np.random.default_rng(0)
    for name, shape in SHAPES.items():
        blocks = gguf.quants.quantize(random.standard_normal(shape, dtype=np.float32), gguf.GGMLQuantizationType.Q4_1)
        writer.add_tensor(f"{name}.weight", blocks, raw_dtype=gguf.GGMLQuantizationType.Q4_1)
    for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(DIM, dtype=np.float32))
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    return path


def _write_facts(writer: gguf.GGUFWriter) -> None:
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(DIM)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(VOCAB)


def _write_tokenizer(writer: gguf.GGUFWriter) -> None:
    letters = [chr(ord("A") + number) for number in range(VOCAB - 4)]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["<|endoftext|>", "<|im_start|>", "<|im_end|>", *letters, "AB"])
    writer.add_token_types([3] * 3 + [1] * (len(letters) + 1))
    writer.add_token_merges(["A B"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{{ messages[0].content }}")


def test_the_checkpoint_is_dense_and_holds_what_the_blocks_stand_for(gguf_file: Path, tmp_path: Path) -> None:
    convert.from_gguf(gguf_file, tmp_path, "bfloat16")
    weights = load_file(tmp_path / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(gguf_file).tensors}["blk.0.ffn_gate.weight"]
    meant = torch.from_numpy(gguf.quants.dequantize(stored.data, stored.tensor_type)).bfloat16()
    torch.testing.assert_close(weights["model.layers.0.mlp.gate_proj.weight"], meant, rtol=0, atol=0)
    assert "quantization_config" not in (tmp_path / "config.json").read_text()


def test_the_checkpoint_loads_plainly_with_its_chat_template(gguf_file: Path, tmp_path: Path) -> None:
    convert.from_gguf(gguf_file, tmp_path, "bfloat16")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert model.generate(torch.tensor([[1, 5]]), max_new_tokens=2, do_sample=False).shape[1] <= 4
    assert tokenizer.apply_chat_template([{"role": "user", "content": "AB"}], tokenize=False) == "AB"


def test_transformers_without_gguf_config_is_asked_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers, "GgufConfig", None)
    assert convert._dequantize() == {}


def test_conversion_is_silent_and_leaves_the_settings_of_transformers(
    gguf_file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    level, had_bars = logging.getLogger("transformers").level, transformers_logging.is_progress_bar_enabled()
    convert.from_gguf(gguf_file, tmp_path, "bfloat16")
    assert capfd.readouterr() == ("", "")
    assert logging.getLogger("transformers").level == level
    assert transformers_logging.is_progress_bar_enabled() == had_bars
