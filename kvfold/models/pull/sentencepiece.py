"""A SentencePiece BPE vocabulary as a tokenizer of the `tokenizers` library.

SentencePiece joins, again and again, the adjacent pair whose union has the best score (Kudo and Richardson 2018,
arXiv:1808.06226); `tokenizers` joins by a list of merges in order of rank. Every way to split a piece into two pieces
is a merge, ranked by the piece's score. Text unknown to the vocabulary falls back to its bytes.
"""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, normalizers, processors
from tokenizers.models import BPE

from kvfold.models.pull.llama2c import NUM_SPECIAL, Piece

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
    ranked = sorted(range(first, len(names)), key=lambda token_id: -pieces[token_id].score)
    return [split for token_id in ranked for split in _splits(names[token_id]) if known.issuperset(split)]


def _splits(name: str) -> list[tuple[str, str]]:
    return [(name[:cut], name[cut:]) for cut in range(1, len(name))]
