"""Snapshots: a whole (compressed) sequence as blocks of an entry, and its restoration; also used to preempt to host.

The tensors are those of `kvfold.pages.serialize`; they and the length are checked on restore.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

from torch import Tensor

from kvfold.errors import InputError, OutOfPages
from kvfold.pages.sequence import SequenceCache
from kvfold.pages.serialize import dump, restore
from kvfold.store.entry.format import Fields, InvalidEntry
from kvfold.store.entry.schema import check_schema

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
    tensors = dict(chain.from_iterable(_named(name, fields) for name, fields in blocks))
    try:
        check_schema(sequence, tensors)
        restore(sequence, tensors)
    except OutOfPages:
        raise
    except (InputError, LookupError, ValueError, TypeError, RuntimeError) as error:
        raise InvalidEntry("corrupt", f"its tensors do not fit the model ({error})") from error
    if sequence.committed_len != num_tokens:
        raise InvalidEntry("corrupt", f"it holds {sequence.committed_len} tokens, not {num_tokens}")


def _named(name: str, fields: Fields) -> list[tuple[str, Tensor]]:
    return [(rest if name == SEQUENCE else f"{name}.{rest}", tensor) for rest, tensor in fields.items()]
