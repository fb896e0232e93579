"""Read the files of llama2.c (legacy format): a 28-byte header and fp32 weights, then a SentencePiece vocabulary.

    model.bin      int32 x 7: dim, hidden_dim, n_layers, n_heads, n_kv_heads, vocab_size, seq_len
                   (a negative vocab_size: the classifier is a matrix of its own), then the tensors of `Header.shapes`
    tokenizer.bin  int32 longest piece; per token: fp32 score, int32 length, bytes

llama2.c turns rotary pairs (2i, 2i+1), transformers turns (i, i + head_dim/2): rows of wq and wk are reordered once.
Shape suffixes: E embedding, O rows of a projection (heads times head_dim).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kvfold.errors import ModelError

_HEADER = struct.Struct("<7i")
_PIECE = struct.Struct("<fi")
RMS_EPS = 1e-5
ROPE_THETA = 10000.0
NUM_SPECIAL = 3  # <unk>, <s>, </s>; the 256 byte tokens follow


@dataclass(frozen=True)
class Header:
    dim: int
    hidden_dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int
    seq_len: int
    shares_classifier: bool

    @property
    def head_dim(self) -> int:
        return self.dim // self.num_heads

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The tensors in file order."""
        layers, dim, hidden, kv_dim = self.num_layers, self.dim, self.hidden_dim, self.num_kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "embedding": (self.vocab_size, dim),
            "att_norm": (layers, dim),
            "wq": (layers, dim, dim),
            "wk": (layers, kv_dim, dim),
            "wv": (layers, kv_dim, dim),
            "wo": (layers, dim, dim),
            "ffn_norm": (layers, dim),
            "w1": (layers, hidden, dim),
            "w2": (layers, dim, hidden),
            "w3": (layers, hidden, dim),
            "final_norm": (dim,),
            "rotary_tables": (2, self.seq_len, self.head_dim // 2),
        }
        return shapes if self.shares_classifier else {**shapes, "classifier": (self.vocab_size, dim)}

    @property
    def file_bytes(self) -> int:
        return _HEADER.size + 4 * sum(math.prod(shape) for shape in self.shapes().values())


class Piece(NamedTuple):
    content: bytes
    score: float


def read_header(data: bytes) -> Header:
    if len(data) < _HEADER.size:
        raise ModelError(f"a llama2.c file begins with {_HEADER.size} bytes of header, this one has {len(data)} bytes")
    dim, hidden, layers, heads, kv_heads, vocab, seq_len = _HEADER.unpack_from(data)
    if min(dim, hidden, layers, heads, kv_heads, abs(vocab), seq_len) < 1 or dim % heads or heads % kv_heads:
        raise ModelError(f"not a llama2.c header: {_HEADER.unpack_from(data)}; fetch the file again")
    return Header(dim, hidden, layers, heads, kv_heads, abs(vocab), seq_len, shares_classifier=vocab > 0)


def read_tensors(data: bytes, header: Header) -> dict[str, Tensor]:
    if len(data) < header.file_bytes:
        raise ModelError(
            f"llama2.c weights are cut off: {len(data)} of {header.file_bytes} bytes; fetch the file again"
        )
    tensors, offset = {}, _HEADER.size
    for name, shape in header.shapes().items():
        count = math.prod(shape)
        flat = torch.frombuffer(bytearray(data[offset : offset + 4 * count]), dtype=torch.float32)
        tensors[name] = flat.reshape(shape)
        offset += 4 * count
    return tensors


def state_dict(data: bytes, header: Header) -> dict[str, Tensor]:
    """The weights under the names and in the rotary order of transformers' Llama."""
    tensors = read_tensors(data, header)
    state = {
        "model.embed_tokens.weight": tensors["embedding"],
        "model.norm.weight": tensors["final_norm"],
        "lm_head.weight": tensors["embedding" if header.shares_classifier else "classifier"],
    }
    for layer in range(header.num_layers):
        state.update(
            _layer_state({name: tensor[layer] for name, tensor in tensors.items() if name in _NAMES}, layer, header)
        )
    return state


_NAMES = {
    "att_norm": "input_layernorm",
    "wq": "self_attn.q_proj",
    "wk": "self_attn.k_proj",
    "wv": "self_attn.v_proj",
    "wo": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "w1": "mlp.gate_proj",
    "w2": "mlp.down_proj",
    "w3": "mlp.up_proj",
}


def _layer_state(tensors: dict[str, Tensor], layer: int, header: Header) -> dict[str, Tensor]:
    tensors["wq"] = halves_from_pairs(tensors["wq"], header.head_dim)
    tensors["wk"] = halves_from_pairs(tensors["wk"], header.head_dim)
    return {f"model.layers.{layer}.{_NAMES[name]}.weight": tensor for name, tensor in tensors.items()}


def halves_from_pairs(w_OE: Tensor, head_dim: int) -> Tensor:
    """Within each head: rows 0 2 4 .. 1 3 5 .., so that pair (2i, 2i+1) becomes (i, i + head_dim/2)."""
    rows, dim = w_OE.shape
    return w_OE.reshape(rows // head_dim, head_dim // 2, 2, dim).transpose(1, 2).reshape(rows, dim).contiguous()


def read_pieces(data: bytes, vocab_size: int) -> list[Piece]:
    """The vocabulary in order of token id."""
    try:
        pieces = list(_iterate_pieces(data, vocab_size))
    except struct.error as error:
        raise ModelError(f"llama2.c tokenizer is cut off before token {vocab_size}; fetch the file again") from error
    return pieces


def _iterate_pieces(data: bytes, vocab_size: int) -> Iterator[Piece]:
    offset = 4
    for _ in range(vocab_size):
        score, length = _PIECE.unpack_from(data, offset)
        offset += _PIECE.size
        (content,) = struct.unpack_from(f"{length}s", data, offset)
        offset += length
        yield Piece(content, score)
