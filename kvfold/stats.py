"""Cost of one KV cache beside the full cache: resident bytes, bytes read per decode step, prefill time."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvfold.errors import InputError
from kvfold.pages.read import stored_bytes_read
from kvfold.pages.sequence import SequenceCache


@dataclass(frozen=True)
class Stats:
    """Sizes and times of one sequence; those of a reply are set in `Reply.stats`.

    Attributes:
        logical_len: Tokens seen.
        resident_bytes: All that is held: slots with padding, positions and scales, open block, observer state, tables.
        full_bytes: What the ordinary bf16 cache would hold.
        bytes_per_step: Stored bytes that one decode step reads.
        slots: Slots by layer and head, open block included.
        host_bytes: Offloaded slots that may be recalled; not in `resident_bytes`.
        prefill_s: Seconds of all prefills, second readings included.
        decode_ms: Mean inter-token latency of a reply.
        setup_s: CUDA graph capture and compilation during a reply; not in `decode_ms`.
        drafted: Tokens drafted by n-gram lookup for a reply.
        accepted: Drafted tokens that were accepted.
        tokens_per_pass: Tokens of a reply by forward passes; 1 without drafts.
    """

    logical_len: int
    resident_bytes: int
    full_bytes: int
    bytes_per_step: int
    slots: list[list[int]] = field(repr=False)
    host_bytes: int = 0
    prefill_s: float = 0.0
    decode_ms: float | None = None
    setup_s: float = 0.0
    drafted: int = 0
    accepted: int = 0
    tokens_per_pass: float | None = None

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
