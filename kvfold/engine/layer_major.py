"""Layer-major prefill: every decoder layer runs all tokens of the prompt, piece by piece, before the next layer.

The model is called once over the whole packed input; each decoder layer's forward is wrapped so that it runs one piece
at a time. After a layer the pass scores and evicts, so only one layer's uncompressed KV cache exists at a time. Hidden
states are overwritten in place. Where a policy prunes tokens between layers, only the remaining hidden states and
position arguments continue. The last layer returns only the rows that are needed, or the final norm would hold every
token in fp32; of a piece that runs alone, layers that can (models/cpu_layer.py) compute only those.

Under a between-chunks policy a prompt is cut into passes (chunked prefill). Borders of chunks and pieces are absolute
multiples of their length, so a continued sequence runs the same shapes as one prefilled at once.

    packed tokens:  | sequence 0: piece, piece, … | sequence 1: piece, … |

On a GPU, and in a server, short prompts run together: pieces of several sequences go through a layer in one call, so
that weights are read and kernels launched once for all of them, and so is attention where sequences begin with these
tokens. Elsewhere each piece runs alone, and a prompt gives the same bits whatever is prefilled beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from kvfold.core import ModelSpec
from kvfold.models.pass_cache import Piece, PrefillCache
from kvfold.pages.sequence import SequenceCache
from kvfold.passes.prefill import PrefillPass


def default_chunk_len(spec: ModelSpec, device: torch.device) -> int:
    """Tokens a layer runs at a time: 8192 on CUDA, which keeps tensor cores busy; 2048 on a CPU, whose BLAS copies the
    weights in every call; 512 where attention materialises a matrix of chunk x KV slots (fp32 on CUDA, sliding-window
    layers)."""
    if len(spec.compressible_layers) < spec.num_layers:
        return 512
    if device.type != "cuda":
        return 2048
    return 8192 if spec.dtype in (torch.float16, torch.bfloat16) else 512


def passes(
    sequences: Sequence[SequenceCache], tokens: Sequence[Sequence[int]], compress: bool
) -> Iterator[tuple[list[int], list[list[int]]]]:
    """(sequences, their tokens) of each pass: the whole prompt, or one chunk under a between-chunks policy."""
    left = {i: list(ids) for i, ids in enumerate(tokens)}
    while left:
        batch, parts = list(left), []
        for i in batch:
            take, chunk_len = len(left[i]), sequences[i].policy.prefill.when.chunk_len
            if compress and chunk_len is not None:
                take = chunk_len - sequences[i].committed_len % chunk_len
            parts.append(left[i][:take])
            left[i] = left[i][take:]
        left = {i: ids for i, ids in left.items() if ids}
        yield batch, parts


def pieces(sequences: Sequence[SequenceCache], tokens: Sequence[Sequence[int]], chunk_len: int) -> Iterator[Piece]:
    """The pieces of one pass, at most `chunk_len` tokens each."""
    begin = 0
    for index, (sequence, ids) in enumerate(zip(sequences, tokens, strict=True)):
        end = begin + len(ids)
        position = sequence.committed_len
        while begin < end:
            step = min(chunk_len - position % chunk_len, end - begin)
            yield Piece(index, begin, begin + step)
            begin, position = begin + step, position + step


Progress = Callable[[int], None]  # called with the number of tokens just done


@dataclass
class LayerMajor:
    """`wrap` is what `layers_wrapped` takes; `cache` is what the model is given."""

    current: PrefillPass
    pieces: Sequence[Piece]
    progress: Progress | None
    num_layers: int
    keep: Tensor | None = None  # tokens of the packed input whose hidden states are wanted; None: all
    joined_len: int = 0  # tokens of several sequences that run in one call of a layer; 0: each piece runs alone
    _work: int = 0  # tokens times layers
    _kept: Tensor | None = None  # tokens of the packed input that are still running; None: all
    _num_packed: int = 0  # tokens of the packed input

    def __post_init__(self) -> None:
        self.cache = PrefillCache(self.current, self.pieces)
        self._num_packed = self.pieces[-1].end

    def wrap(self, layer: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            is_tuple = False
            for group in _joined(self.pieces, self.joined_len):
                begin, end = group[0].begin, group[-1].end
                self.cache.num_wanted = self._num_wanted(layer, group)
                out = self._run_pieces(group, forward, hidden_states, args, kwargs)
                is_tuple = isinstance(out, tuple)
                found = out[0] if is_tuple else out
                hidden_states[:, end - found.shape[1] : end] = found
                del out, found  # or they would live beside the next piece's output
                self._report(end - begin)
            self.current.finish_layer(layer)
            hidden_states = self._prune(layer, hidden_states)
            is_last = layer == self.num_layers - 1
            found = hidden_states[:, self.keep] if is_last and self.keep is not None else hidden_states
            return (found,) if is_tuple else found

        return run

    def _num_wanted(self, layer: int, group: list[Piece]) -> int | None:
        """Of the last layer's call, the last rows whose outputs or queries are used; None: all may be."""
        if layer < self.num_layers - 1 or self.keep is None or len(group) > 1:
            return None
        (piece,) = group
        is_end = all(other.end <= piece.end for other in self.pieces if other.index == piece.index)
        return max(int(is_end), self.current.num_observed(piece.index, piece.end - piece.begin))

    def _run_pieces(
        self,
        group: list[Piece],
        forward: Callable[..., Any],
        hidden_states: Tensor,
        args: Any,
        kwargs: dict[str, Any],
    ) -> Any:
        self.cache.pieces = group
        span, length = slice(group[0].begin, group[-1].end), self._num_packed
        mine = span if self._kept is None else self._kept[span]
        cut_args = [_cut(value, mine, length) for value in args]
        return forward(hidden_states[:, span], *cut_args, **{k: _cut(v, mine, length) for k, v in kwargs.items()})

    def _prune(self, layer: int, hidden_states: Tensor) -> Tensor:
        """Hidden states of the tokens that token pruning keeps."""
        kept = self.current.pruned.prune()
        if kept is None:
            return hidden_states
        self._report((hidden_states.shape[1] - len(kept)) * (self.num_layers - 1 - layer))
        hidden_states = hidden_states[:, kept]
        self._kept = kept if self._kept is None else self._kept[kept]
        lens = self.current.pruned.num_running
        self.pieces = _pieces(lens, max(piece.end - piece.begin for piece in self.pieces))
        if self.keep is not None:  # the last token of each sequence, which is always kept
            self.keep = torch.tensor(lens, device=self.keep.device).cumsum(0) - 1
        return hidden_states

    def _report(self, num_tokens: int) -> None:
        """Progress in tokens: tokens times layers done, over the number of layers."""
        before = self._work // self.num_layers
        self._work += num_tokens
        if self.progress is not None and self._work // self.num_layers > before:
            self.progress(self._work // self.num_layers - before)


def _pieces(lens: Sequence[int], most: int) -> list[Piece]:
    """Packed sequences of these lengths in pieces of at most `most` tokens."""
    starts = [0, *accumulate(lens)]
    return [
        Piece(index, start + begin, start + min(begin + most, length))
        for index, (start, length) in enumerate(zip(starts, lens, strict=False))
        for begin in range(0, length, most)
    ]


def _joined(pieces: Sequence[Piece], most: int) -> Iterator[list[Piece]]:
    """Pieces in groups of at most `most` tokens; those of one sequence never share a group."""
    group: list[Piece] = []
    for piece in pieces:
        if group and (piece.index == group[-1].index or piece.end - group[0].begin > most):
            yield group
            group = []
        group.append(piece)
    if group:
        yield group


def _cut(value: Any, mine: slice | Tensor, length: int) -> Any:
    """The tokens `mine` of an argument that a decoder layer gets per token."""
    if isinstance(value, tuple):
        return tuple(_cut(item, mine, length) for item in value)
    if isinstance(value, Tensor) and value.ndim >= 2 and value.shape[1] == length:
        return value[:, mine]
    return value
