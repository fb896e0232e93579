"""Read the files of llama2.c (legacy format): a 28-byte header and fp32 weights, then a SentencePiece vocabulary.

    model.bin      int32 x 7: dim, hidden_dim, n_layers, n_heads, n_kv_heads, vocab_size, seq_len
                   (a negative vocab_size: the classifier is a matrix of its own), then the tensors of `Header.shapes`
    tokenizer.bin  int32 longest piece; per token: fp32 score, int32 length, bytes

llama2.c turns rotary pairs (2i, 2i+1), transformers turns (i, i + head_dim/2): rows of wq and wk are reordered once.
SentencePiece joins, again and again, the adjacent pair whose union has the best score (Kudo and Richardson 2018,
arXiv:1808.06226); `tokenizers` joins by a list of merges in order of rank. Every way to split a piece into two pieces
is a merge, ranked by the piece's score. Text unknown to the vocabulary falls back to its bytes.

Shape suffixes: E embedding, O rows of a projection (heads times head_dim).
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import NamedTuple

import torch
from tokenizers import AddedToken, Tokenizer, decoders, normalizers, processors
from tokenizers.models import BPE
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
            "embedding": (self.vocab_size, dim), "att_norm": (layers, dim),
            "wq": (layers, dim, dim), "wk": (layers, kv_dim, dim), "wv": (layers, kv_dim, dim),
            "wo": (layers, dim, dim), "ffn_norm": (layers, dim),
            "w1": (layers, hidden, dim), "w2": (layers, dim, hidden), "w3": (layers, hidden, dim),
            "final_norm": (dim,), "rotary_tables": (2, self.seq_len, self.head_dim // 2),
        }  # fmt: skip
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
        for name, target in _NAMES.items():
            weight = tensors[name][layer]
            weight = halves_from_pairs(weight, header.head_dim) if name in ("wq", "wk") else weight
            state[f"model.layers.{layer}.{target}.weight"] = weight
    return state


_NAMES = {
    "att_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "wq": "self_attn.q_proj", "wk": "self_attn.k_proj", "wv": "self_attn.v_proj", "wo": "self_attn.o_proj",
    "w1": "mlp.gate_proj", "w2": "mlp.down_proj", "w3": "mlp.up_proj",
}  # fmt: skip


def halves_from_pairs(w_OE: Tensor, head_dim: int) -> Tensor:
    """Within each head: rows 0 2 4 .. 1 3 5 .., so that pair (2i, 2i+1) becomes (i, i + head_dim/2)."""
    rows, dim = w_OE.shape
    return w_OE.reshape(rows // head_dim, head_dim // 2, 2, dim).transpose(1, 2).reshape(rows, dim).contiguous()


def read_pieces(data: bytes, vocab_size: int) -> list[Piece]:
    """The vocabulary in order of token id."""
    pieces, offset = [], 4
    try:
        for _ in range(vocab_size):
            score, length = _PIECE.unpack_from(data, offset)
            (content,) = struct.unpack_from(f"{length}s", data, offset + _PIECE.size)
            pieces.append(Piece(content, score))
            offset += _PIECE.size + length
    except struct.error as error:
        raise ModelError(f"llama2.c tokenizer is cut off before token {vocab_size}; fetch the file again") from error
    return pieces


UNK, BOS, EOS = "<unk>", "<s>", "</s>"
_SPACE = "▁"


def build_tokenizer(pieces: list[Piece]) -> Tokenizer:
    """Ids are places in `pieces`: unk, bos, eos, 256 bytes, then pieces."""
    names = [_name(token_id, piece.content) for token_id, piece in enumerate(pieces)]
    vocab = {name: token_id for token_id, name in enumerate(names)}
    tokenizer = Tokenizer(
        BPE(vocab=vocab, merges=_merges(names, pieces), unk_token=UNK, fuse_unk=True, byte_fallback=True)
    )
    tokenizer.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in (UNK, BOS, EOS)])
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), normalizers.Replace(" ", _SPACE)])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, vocab[BOS])]
    )
    return tokenizer


def _name(token_id: int, content: bytes) -> str:
    if token_id < NUM_SPECIAL:
        return (UNK, BOS, EOS)[token_id]
    if token_id < NUM_SPECIAL + 256:
        return f"<0x{token_id - NUM_SPECIAL:02X}>"
    return content.decode().replace(" ", _SPACE)


def _merges(names: list[str], pieces: list[Piece]) -> list[tuple[str, str]]:
    first = NUM_SPECIAL + 256
    known = set(names[first:])
    ranked = [names[i] for i in sorted(range(first, len(names)), key=lambda token_id: -pieces[token_id].score)]
    splits = ((name[:cut], name[cut:]) for name in ranked for cut in range(1, len(name)))
    return [split for split in splits if known.issuperset(split)]
