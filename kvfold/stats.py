"""Cost of one KV cache beside the full cache: resident bytes, bytes read per decode step, prefill time."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvfold.errors import InputError
from kvfold.pages.bytes_read import stored_bytes_read
from kvfold.pages.sequence import SequenceCache


@dataclass(frozen=True)
class Stats:
    logical_len: int  # tokens seen
    resident_bytes: int  # spans with padding, positions, scales; open block; observer state; tables
    full_bytes: int  # what the ordinary bf16 cache would hold
    bytes_per_step: int  # stored bytes one decode step reads
    slots: list[list[int]] = field(repr=False)  # by layer and head, open block included
    host_bytes: int = 0  # offloaded slots that may be recalled; not in resident_bytes
    prefill_s: float = 0.0
    decode_ms: float | None = None
    setup_s: float = 0.0  # CUDA graph capture and compilation during this reply; not in decode_ms
    drafted: int = 0  # tokens drafted by n-gram lookup for this reply
    accepted: int = 0  # of these
    tokens_per_pass: float | None = None  # 1 without drafts

    @property
    def ratio(self) -> float:
        """Compression ratio: full bytes over resident bytes."""
        return self.full_bytes / max(self.resident_bytes, 1)

    @property
    def mean_slots(self) -> float:
        """Mean slots per head."""
        counts = [count for layer in self.slots for count in layer]
        return sum(counts) / max(len(counts), 1)


def measure(sequence: SequenceCache) -> Stats:
    """The sizes of one sequence now."""
    slots, read = [], 0.0
    for index, layer in enumerate(sequence.spec.layers):
        sealed = sequence.stored_lens(index)
        slots.append([count + sequence.open.fill for count in sealed])
        read += stored_bytes_read(sequence, index)
        if sequence.offloaded is not None and index in sequence.offloaded.layers:
            read += sequence.offloaded.layers[index].read_bytes
        read += sequence.open.fill * layer.num_kv_heads * layer.head_dim * 2 * sequence.spec.kv_dtype.itemsize
    return Stats(
        logical_len=sequence.logical_len,
        resident_bytes=sequence.resident_bytes,
        full_bytes=sequence.spec.full_bytes(sequence.logical_len),
        bytes_per_step=int(read),
        slots=slots,
        host_bytes=0 if sequence.offloaded is None else sequence.offloaded.host_bytes,
    )


def kept_positions(sequence: SequenceCache, layer: int, head: int) -> list[int]:
    """Original positions of the slots that one head keeps; negative indices count from the end."""
    layers = sequence.spec.num_layers
    if not -layers <= layer < layers:
        raise InputError(f"layer {layer} does not exist; the model has layers 0 to {layers - 1}")
    heads = sequence.spec.layers[layer].num_kv_heads
    if not -heads <= head < heads:
        raise InputError(f"head {head} does not exist; the model has KV heads 0 to {heads - 1}")
    found: list[int] = sequence.positions(layer % layers, head % heads).tolist()
    return found
