"""Ragged entries: heads of different lengths, codes of any codec and biases, for vLLM with kvfold's attention backend.

The engine's blocks of n placeholders are plain memory (kvfold/pages/block_arena.py); n is what the largest layer needs.
Codes are those that kvfold's engine reads, so keys stay at their positions in the document, and the backend rotates
queries by T - n positions instead.

    binding, `pages`    JSON of `RaggedFormat`
    block of a layer    lens: int64 [H]; rope: float64, radians per position; and by the names of pages/serialize.py
                        fields of the codecs, head after head, codec states, full-precision sinks
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvfold.core import Rope
from kvfold.errors import InputError, PolicyError
from kvfold.packed.entry import PackedReader, sequence_block
from kvfold.pages.block_arena import BlockLayout
from kvfold.pages.serialize import dump
from kvfold.policy.policy import Policy
from kvfold.policy.text import plan_text
from kvfold.session import Session
from kvfold.store.entry.format import Fields, InvalidEntry

_ROPE, _ROPE_INTERLEAVED = "rope", "rope.interleaved"


@dataclass(frozen=True)
class RaggedFormat:
    """What a reader has to know before it reads a layer.

    Attributes:
        codec: The codec terms of the policy.
        block_size: Tokens of an engine's block; the layout depends on it.
        num_layers: Of the model.
        num_sinks: Full-precision sinks of layers whose codecs ask for them.
        has_bias: Whether slots have a bias.
    """

    codec: str
    block_size: int
    num_layers: int
    num_sinks: int
    has_bias: bool

    @property
    def text(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def parse(cls, text: Any) -> RaggedFormat:
        try:
            found = cls(**json.loads(text))
            Policy.parse(found.codec)
        except (TypeError, ValueError, PolicyError) as error:
            raise InvalidEntry("foreign", f"it has no format of ragged entries ({error})") from error
        return found

    def layout(self, layer: int, num_heads: int, head_dim: int, kv_dtype: torch.dtype) -> BlockLayout:
        k, v = Policy.parse(self.codec).codec.sides(layer, self.num_layers)
        num_sinks = self.num_sinks if max(k.fp_sinks, v.fp_sinks) else 0
        size, bias = self.block_size, self.has_bias
        return BlockLayout.of((k, v), num_heads, head_dim, kv_dtype, size, num_sinks=num_sinks, has_bias=bias)


class RaggedLayer(NamedTuple):
    """One layer of a document."""

    lens: list[int]  # by head
    layout: BlockLayout
    rope: Rope
    tensors: Mapping[str, Tensor]


class RaggedContent(NamedTuple):
    """What an entry is made of; `slack_bytes`: of the engine's blocks, what stays unused."""

    format: RaggedFormat
    num_slots: int
    slack_bytes: int
    blocks: dict[str, Fields]


def ragged_content(session: Session, vocab_size: int, block_size: int) -> RaggedContent:
    """Of a session whose document was read at once; InputError if its blocks would save nothing."""
    cache, spec, num_tokens = session.cache, session.model.spec, len(session.token_ids)
    num_sinks = max(cache.num_fp_sinks(layer) for layer in range(spec.num_layers))
    has_bias = session.policy.prefill.evicted.has_bias
    codec = plan_text(session.policy.codec, True)
    form = RaggedFormat(codec, block_size, spec.num_layers, num_sinks, has_bias)
    tensors = dump(cache)
    layers = [_layer(form, session, index, tensors) for index in range(spec.num_layers)]
    num_blocks = max(layer.layout.num_blocks(layer.lens) for layer in layers)
    num_slots = num_blocks * block_size
    if num_slots >= num_tokens or cache.open.fill:
        raise InputError(
            f"the document has {num_tokens} tokens, and blocks of {block_size} for its largest layer have room for "
            f"{num_slots}, which saves nothing; pack a longer document, or give a higher ratio or smaller blocks"
        )
    slack = sum(num_blocks * layer.layout.block_bytes - layer.layout.used_bytes(layer.lens) for layer in layers)
    blocks = {str(index): _fields(layer) for index, layer in enumerate(layers)}
    return RaggedContent(form, num_slots, slack, sequence_block(num_tokens, num_slots, vocab_size) | blocks)


def _layer(form: RaggedFormat, session: Session, index: int, tensors: Mapping[str, Tensor]) -> RaggedLayer:
    spec = session.model.spec.layers[index]
    layout = form.layout(index, spec.num_kv_heads, spec.head_dim, session.model.spec.kv_dtype)
    pieces = tensors[f"{index}.lens"]
    if len(pieces) > 1:
        raise PolicyError(f'policy "{session.policy.short}" left slots in several parts; pack a document at once')
    names = [*layout.once, *(item.name for item in layout.page_class.fields)]
    assert spec.rope is not None
    mine = {name: tensors[f"{index}.{name}"] for name in names}
    return RaggedLayer(pieces.sum(0).tolist(), layout, spec.rope, mine)


def _fields(layer: RaggedLayer) -> Fields:
    rope = _ROPE_INTERLEAVED if layer.rope.interleaved else _ROPE
    frequencies = torch.tensor(layer.rope.frequencies, dtype=torch.float64)
    return {"lens": torch.tensor(layer.lens), rope: frequencies, **layer.tensors}


def ragged_layers(
    reader: PackedReader, shapes: Mapping[int, tuple[int, int]], kv_dtype: torch.dtype
) -> Iterator[tuple[int, RaggedLayer]]:
    """The layers that `shapes` (heads and head dim by layer) names, in order, as they are read and checked."""
    form = RaggedFormat.parse(reader.facts.get("pages"))
    for index, fields in reader.named(shapes):
        heads, head_dim = shapes[index]
        try:
            yield index, _checked(form, form.layout(index, heads, head_dim, kv_dtype), fields, reader.num_slots)
        except InputError as error:
            raise InvalidEntry("foreign", f"layer {index} does not fit the model ({error})") from error


def _checked(form: RaggedFormat, layout: BlockLayout, fields: Fields, num_slots: int) -> RaggedLayer:
    lens = fields.get("lens")
    if lens is None or lens.dtype != torch.int64 or lens.ndim != 1 or bool((lens < 0).any()):
        raise InputError("it has no lengths")
    layout.check(lens.tolist(), fields)
    if layout.num_blocks(lens.tolist()) * form.block_size > num_slots:
        raise InputError(f"{num_slots} placeholders have too few blocks for it")
    interleaved = _ROPE_INTERLEAVED in fields
    frequencies = fields.get(_ROPE_INTERLEAVED if interleaved else _ROPE)
    if frequencies is None or frequencies.ndim != 1 or not 2 * len(frequencies) <= layout.page_class.head_dim:
        raise InputError("it has no rotary frequencies")
    return RaggedLayer(lens.tolist(), layout, Rope(tuple(frequencies.tolist()), interleaved=interleaved), fields)
