"""The uncompressed KV cache of a prompt, held in arena pages until its replay (KVzip, `fit`) has been read.

Each layer of a prefill pass writes its new slots here in the model's dtype; a prompt that does not fit raises
OutOfPages before the first layer runs. These pages are freed before the compressed slots are written, so the arena
never holds both.

    H KV heads   T new tokens   D head dim
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvfold.codec.native import Native
from kvfold.compression.view import NewSlots
from kvfold.errors import OutOfPages
from kvfold.pages.layer import LayerPages
from kvfold.pages.layout import PageClass
from kvfold.pages.read import slots_of
from kvfold.pages.segment import Segment
from kvfold.pages.sequence import SequenceCache


class FullPrompt:
    """Pages for `num_tokens` new slots of every head; sliding-window layers hold what the next token can see."""

    def __init__(self, sequence: SequenceCache, num_tokens: int) -> None:
        self.sequence = sequence
        self.start = sequence.sealed_len
        self.num_tokens = num_tokens
        spec, classes = sequence.spec, full_prompt_classes(sequence)
        pages = [LayerPages(c, layer.num_kv_heads) for c, layer in zip(classes, spec.layers, strict=True)]
        self.segment = Segment(sequence.arena, pages)
        self._mass: list[Tensor | None] = [None] * spec.num_layers
        counts = [[self.end - self._first(i)] * layer.num_heads for i, layer in enumerate(self.segment.layers)]
        try:
            self.segment.reserve(counts)
        except OutOfPages as error:
            raise OutOfPages(
                f"{error}; the score replays the prompt, so {self.num_tokens} tokens are held uncompressed until then: "
                "prefill fewer tokens at a time, or use a score without a replay"
            ) from None
        sequence.full_prompt_bytes = self.segment.num_bytes

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.start + self.num_tokens

    def _first(self, layer: int) -> int:
        """Position of the first token that a layer holds."""
        window = self.sequence.spec.layers[layer].sliding_window
        return self.start if window is None else max(self.start, self.end - window + 1)

    def write(self, layer: int, new: NewSlots) -> None:
        """Write the new slots of a layer."""
        change = new.since(self._first(layer)).whole
        pages = self.segment.layers[layer]
        pages.append(pages.encode(change.k_ND, change.v_ND, change.position_N, change.counts), change.counts)
        self._mass[layer] = new.mass_HS

    def new_slots(self, layer: int, dtype: torch.dtype, replay_HGS: Tensor | None) -> NewSlots:
        """The slots of a layer, with the weights that a replay observed."""
        found = slots_of([self.segment.layers[layer]], dtype, self.sequence.arena.device)
        k_HTD, v_HTD = torch.stack(found.k), torch.stack(found.v)
        return NewSlots(k_HTD, v_HTD, self._first(layer), mass_HS=self._mass[layer], replay_HGS=replay_HGS)

    def release(self) -> None:
        """Free the pages; twice is fine."""
        if self.segment.refs:
            self.segment.release()
            self.sequence.full_prompt_bytes = 0


def full_prompt_classes(sequence: SequenceCache) -> list[PageClass]:
    """Page classes that hold a sequence's slots uncompressed, by layer."""
    spec, page_size = sequence.spec, sequence.config.page_size
    return [PageClass(Native(), Native(), layer.head_dim, spec.kv_dtype, page_size) for layer in spec.layers]
