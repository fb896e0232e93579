"""llama2.c files: a forward pass written after llama2.c's own conventions gives the logits of the converted model.

Shape suffixes: T tokens, E embedding, H query heads, K KV heads, P rotary pairs, D head dim, V vocabulary.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor

from kvfold.errors import ModelError
from kvfold.models.pull import convert, llama2c
from kvfold.models.pull.llama2c import Header
from tests.models.packages import model_bytes, tiny_header, tokenizer_bytes

TOKENS = torch.tensor([1, 70, 5, 260, 33, 9, 70])


def rms(x_TE: Tensor, weight_E: Tensor) -> Tensor:
    return weight_E * x_TE * (x_TE.square().mean(-1, keepdim=True) + 1e-5).rsqrt()


def turn_pairs(x_THD: Tensor) -> Tensor:
    """Rotate dims (2i, 2i+1) by position * 10000^(-2i/D), as complex numbers."""
    num_tokens, _, head_dim = x_THD.shape
    frequencies_P = 10000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
    angles_TP = torch.outer(torch.arange(num_tokens).float(), frequencies_P)
    turned = (
        torch.view_as_complex(x_THD.reshape(*x_THD.shape[:2], -1, 2)) * torch.polar(torch.ones(()), angles_TP)[:, None]
    )
    return torch.view_as_real(turned).reshape(x_THD.shape)


def attention(x_TE: Tensor, w: dict[str, Tensor], layer: int, header: Header) -> Tensor:
    shape = (len(x_TE), -1, header.head_dim)
    q_THD = turn_pairs((x_TE @ w["wq"][layer].T).view(shape))
    k_TKD = turn_pairs((x_TE @ w["wk"][layer].T).view(shape))
    v_TKD = (x_TE @ w["wv"][layer].T).view(shape)
    group = header.num_heads // header.num_kv_heads
    k_THD, v_THD = (kv.repeat_interleave(group, dim=1) for kv in (k_TKD, v_TKD))
    scores = torch.einsum("thd,shd->hts", q_THD, k_THD) / header.head_dim**0.5
    scores = scores + torch.full_like(scores, float("-inf")).triu(1)
    return torch.einsum("hts,shd->thd", scores.softmax(-1), v_THD).flatten(1) @ w["wo"][layer].T


def reference_logits(data: bytes, header: Header) -> Tensor:
    w = llama2c.read_tensors(data, header)
    x_TE = w["embedding"][TOKENS]
    for layer in range(header.num_layers):
        x_TE = x_TE + attention(rms(x_TE, w["att_norm"][layer]), w, layer, header)
        h_TE = rms(x_TE, w["ffn_norm"][layer])
        gate = torch.nn.functional.silu(h_TE @ w["w1"][layer].T) * (h_TE @ w["w3"][layer].T)
        x_TE = x_TE + gate @ w["w2"][layer].T
    classifier_VE = w["embedding"] if header.shares_classifier else w["classifier"]
    return rms(x_TE, w["final_norm"]) @ classifier_VE.T


@pytest.mark.parametrize("shares_classifier", [True, False])
def test_the_converted_model_computes_what_llama2c_computes(tmp_path: Path, shares_classifier: bool) -> None:
    header = tiny_header(shares_classifier)
    data = model_bytes(header) + tokenizer_bytes()
    (tmp_path / "weights").write_bytes(data)
    convert.from_llama2c(tmp_path / "weights", tmp_path / "checkpoint", "float32")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint")
    with torch.no_grad():
        logits = model(TOKENS[None]).logits[0]
    torch.testing.assert_close(logits, reference_logits(data, header), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shares_classifier", [True, False])
def test_a_header_survives_writing_and_reading(shares_classifier: bool) -> None:
    header = tiny_header(shares_classifier)
    data = model_bytes(header)
    assert llama2c.read_header(data) == header
    assert header.file_bytes == len(data)


def test_the_file_size_of_stories15m_follows_from_its_header() -> None:
    assert Header(288, 768, 6, 6, 6, 32000, 256, shares_classifier=True).file_bytes == 60_816_028


def test_rows_of_each_head_go_from_pairs_to_halves() -> None:
    rows = torch.arange(8.0)[:, None]
    assert llama2c.halves_from_pairs(rows, head_dim=4).flatten().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


@pytest.mark.parametrize("data", [b"", b"\0" * 28, b"GGUF\3" + b"\0" * 23], ids=["empty", "zeros", "gguf"])
def test_a_foreign_header_is_refused(data: bytes) -> None:
    with pytest.raises(ModelError, match=r"llama2\.c"):
        llama2c.read_header(data)


def test_cut_off_weights_are_refused() -> None:
    header = tiny_header()
    with pytest.raises(ModelError, match="weights are cut off"):
        llama2c.read_tensors(model_bytes(header)[:-1], header)


def test_a_cut_off_tokenizer_is_refused() -> None:
    with pytest.raises(ModelError, match="tokenizer is cut off"):
        llama2c.read_pieces(tokenizer_bytes()[:-1], tiny_header().vocab_size)
