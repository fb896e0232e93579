"""Chunks and snapshots of sequences. A chunk is the KV of a token range, read from a lossless sequence and appended to
another one layer by layer. A snapshot is a whole (compressed) sequence; preemption to the host uses it too.

Without eviction and fitted codecs, slot i of every head is token i, whatever follows it, so chunks of several entries
join to one prefix. Positions are not stored: they are the range. The tensors of a snapshot are those of
`kvfold.pages.serialize`, which checks page tensors; on restore names, dtypes and shapes of all tensors (codec states,
the open block, observer state, lengths) are checked for this model and policy.

    H KV heads   N tokens of the range   W width of a field
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvfold.codec.base import SIDES, Field
from kvfold.errors import InputError, OutOfPages
from kvfold.pages.layer import LayerPages
from kvfold.pages.layout import POSITION, PageClass
from kvfold.pages.sequence import SequenceCache
from kvfold.pages.serialize import dump, restore
from kvfold.store.entry.encodings import TensorSpec
from kvfold.store.entry.format import Fields, InvalidEntry


def read_slots(sequence: SequenceCache, layer: int, start: int, end: int) -> Fields:
    """Fields [H, N, W] of the tokens start … end."""
    sequence.wait_loaded(layer)
    parts = sequence.layer_parts(layer)
    found: list[dict[str, Tensor]] = []
    first = 0
    for part in parts:
        length = part.lens[0]
        begin, stop = max(start - first, 0), min(end - first, length)
        if begin < stop:
            found.append(_gather(part, begin, stop))
        first += length
    return {item.name: torch.cat([fields[item.name] for fields in found], 1) for item in _stored(parts[0].page_class)}


def _gather(part: LayerPages, begin: int, stop: int) -> Fields:
    device = part.extents[0][0].span.arena.device
    index = torch.arange(begin, stop, device=device)
    codes = part.gather([index] * part.num_heads)
    return {item.name: codes[item.name].unflatten(0, (part.num_heads, -1)) for item in _stored(part.page_class)}


class LayerwiseAppend:
    """Appends tokens up to `end` to a sequence with an empty open block, layer by layer; the sequence counts them at
    once. Pages of all layers are allocated first: OutOfPages. `num_loaded`: layers appended so far."""

    def __init__(self, sequence: SequenceCache, end: int) -> None:
        self.num_loaded = 0
        self.layers = sequence.tail.layers
        self._start, self._end = sequence.sealed_len, end
        sequence.tail.reserve([[end - sequence.sealed_len] * layer.num_heads for layer in self.layers])
        sequence.sealed_len = end

    def append(self, chunks: Sequence[Fields]) -> None:
        """The checked fields of the next layer's chunks."""
        _append(self.layers[self.num_loaded], chunks, self._start, self._end)
        self.num_loaded += 1


def _append(pages: LayerPages, chunks: Sequence[Fields], start: int, end: int) -> None:
    device = pages.extents[0][0].span.arena.device
    codes = {}
    for item in _stored(pages.page_class):
        x_HNW = torch.cat([fields[item.name].to(device) for fields in chunks], 1)
        codes[item.name] = x_HNW.flatten(0, 1)
    position_N = torch.arange(start, end, dtype=torch.int32, device=device)
    codes[POSITION.name] = position_N.repeat(pages.num_heads).unsqueeze(-1)
    pages.append(codes, [end - start] * pages.num_heads)


def chunk_specs(pages: LayerPages, num_tokens: int) -> dict[str, TensorSpec]:
    """Expected dtypes and shapes of a chunk's fields."""
    fields = _stored(pages.page_class)
    return {item.name: TensorSpec(item.dtype, (pages.num_heads, num_tokens, item.width)) for item in fields}


def _stored(page_class: PageClass) -> list[Field]:
    return [item for item in page_class.fields if item.name != POSITION.name]


def share_prefix(sequence: SequenceCache, num_tokens: int) -> SequenceCache:
    """A new sequence with the first tokens of a lossless one: pages of its segments are shared (copy-on-write), what is
    left is copied; raises OutOfPages."""
    found = SequenceCache(sequence.arena, sequence.spec, sequence.policy, sequence.config)
    try:
        for segment in sequence.segments:
            left = num_tokens - found.sealed_len
            shared = segment.share_first(left) if left else None
            if shared is None:
                break
            found.sealed_len += shared.layers[0].lens[0]
            shared.end_len = found.sealed_len
            found.segments.append(shared)
        start = found.sealed_len
        if start < num_tokens:
            target = LayerwiseAppend(found, num_tokens)
            for layer in range(sequence.spec.num_layers):
                target.append([read_slots(sequence, layer, start, num_tokens)])
    except BaseException:
        found.release()
        raise
    return found


SEQUENCE = "sequence"  # name of the block of tensors that belong to no layer


def snapshot_blocks(sequence: SequenceCache) -> dict[str, Fields]:
    """All committed state, copied to the host: a block for the sequence, then one for each layer."""
    blocks: dict[str, Fields] = {SEQUENCE: {}, **{str(i): {} for i in range(sequence.spec.num_layers)}}
    for name, tensor in dump(sequence).items():
        layer, _, rest = name.partition(".")
        if rest:
            blocks[layer][rest] = tensor
        else:
            blocks[SEQUENCE][name] = tensor
    return blocks


def restore_snapshot(sequence: SequenceCache, num_tokens: int, blocks: Iterable[tuple[str, Fields]]) -> None:
    """Restore into an empty sequence. After OutOfPages or InvalidEntry the caller releases it."""
    prefixed = (("" if name == SEQUENCE else f"{name}.", fields) for name, fields in blocks)
    tensors = {f"{prefix}{name}": tensor for prefix, fields in prefixed for name, tensor in fields.items()}
    try:
        check_schema(sequence, tensors)
        restore(sequence, tensors)
    except OutOfPages:
        raise
    except (InputError, LookupError, ValueError, TypeError, RuntimeError) as error:
        raise InvalidEntry("corrupt", f"its tensors do not fit the model ({error})") from error
    if sequence.committed_len != num_tokens:
        raise InvalidEntry("corrupt", f"it holds {sequence.committed_len} tokens, not {num_tokens}")


class TensorRule(NamedTuple):
    """Allowed dtypes and shape; a dimension of None is any number from `least` on."""

    dtypes: tuple[torch.dtype, ...]
    shape: tuple[int | None, ...]
    least: int = 0

    def fits(self, tensor: Tensor) -> bool:
        sizes = zip(tensor.shape, self.shape, strict=False)
        same = all(found >= self.least if size is None else found == size for found, size in sizes)
        return tensor.dtype in self.dtypes and tensor.ndim == len(self.shape) and same


def check_schema(sequence: SequenceCache, tensors: Mapping[str, Tensor]) -> None:
    """InputError or KeyError for the first tensor that does not fit an empty sequence."""
    expected = {"pinned": TensorRule((torch.int64,), (None, 2)), "lens": TensorRule((torch.int64,), (2,))}
    expected["sentences"] = TensorRule((torch.int64,), (None,))
    for layer in range(sequence.spec.num_layers):
        stored_len = _stored_len(tensors[f"{layer}.lens"])
        expected |= {f"{layer}.{name}": rule for name, rule in _layer_rules(sequence, layer, stored_len).items()}
    for name, tensor in tensors.items():
        if name not in expected or not expected[name].fits(tensor):
            raise InputError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}, not {expected.get(name)}")
    if len({tensor.shape[1] for name, tensor in tensors.items() if ".open." in name}) > 1:
        raise InputError("open blocks of different layers differ in length")
    sealed_len, last_compressed_len = tensors["lens"].tolist()
    if not 0 <= last_compressed_len <= sealed_len:
        raise InputError(f"{sealed_len} tokens are sealed, and the last compression was at {last_compressed_len}")


def _stored_len(lens: Tensor) -> int:
    """Slots of the longest head."""
    if lens.ndim != 2 or lens.dtype != torch.int64:
        raise InputError(f"lengths are {lens.dtype} {tuple(lens.shape)}")
    return int(lens.sum(0).max()) if lens.numel() else 0


def _layer_rules(sequence: SequenceCache, layer: int, stored_len: int) -> dict[str, TensorRule]:
    """Rules of all tensors a layer may have."""
    spec, pages = sequence.spec.layers[layer], sequence.tail.layers[layer].page_class
    heads, queries, dim = spec.num_kv_heads, spec.num_query_heads, spec.head_dim
    floats, computed = (torch.float32,), (torch.float32, sequence.spec.dtype)
    rules = {
        "lens": TensorRule((torch.int64,), (None, heads)),
        "open.k": TensorRule((sequence.spec.kv_dtype,), (heads, None, dim)),
        "open.v": TensorRule((sequence.spec.kv_dtype,), (heads, None, dim)),
        "side.mass": TensorRule(floats, (heads, None), stored_len),
        "side.open_mass": TensorRule(floats, (heads, sequence.config.open_len)),
        "side.last_q": TensorRule(computed, (queries, None, dim)),
        "side.centre": TensorRule(floats, (queries, dim)),
        "side.sum": TensorRule(floats, (queries, dim)),
        "side.outer": TensorRule(floats, (queries, dim, dim)),
        "side.count": TensorRule((torch.int64,), (1,)),
        "side.query_end": TensorRule((torch.int64,), (1,)),
    }
    if sequence.fp_sinks is not None:
        exact = TensorRule((sequence.spec.kv_dtype,), (heads, None, dim))
        rules |= {"exact.k": exact, "exact.v": exact}
    if sequence.offloaded is not None and layer in sequence.offloaded.layers:
        slots = TensorRule((sequence.spec.kv_dtype,), (heads, None, dim))
        counts = TensorRule((torch.int32,), (heads, None))
        rules |= {"demoted.k": slots, "demoted.v": slots, "demoted.position": counts, "demoted.used": counts}
    rules |= {item.name: TensorRule((item.dtype,), (None, item.width)) for item in pages.fields}
    return rules | _state_rules(sequence, layer)


def _state_rules(sequence: SequenceCache, layer: int) -> dict[str, TensorRule]:
    """Rules of codec states, whose shapes do not depend on the slots they were fitted to."""
    spec, pages = sequence.spec.layers[layer], sequence.tail.layers[layer].page_class
    x_RSD = torch.zeros(spec.num_kv_heads, 1, spec.head_dim)
    valid_RS = torch.ones(x_RSD.shape[:2], dtype=torch.bool)
    found = {}
    for side in SIDES:
        for name, tensor in pages.codec(side).init_state(side, x_RSD, valid_RS).items():
            found[f"state.{side}.{name}"] = TensorRule((tensor.dtype,), tuple(tensor.shape))
    return found
