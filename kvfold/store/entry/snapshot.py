"""A whole sequence as blocks of an entry, and back: what compressed sequences are stored as.

The tensors are those of `kvfold.pages.serialize`, checked before they are used; so is the length that the key says.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

from torch import Tensor

from kvfold.errors import InputError, OutOfPages
from kvfold.pages.sequence import SequenceCache
from kvfold.pages.serialize import dump, restore
from kvfold.store.entry.format import Fault, Fields
from kvfold.store.entry.schema import check_fit

SEQUENCE = "sequence"  # name of the block of what belongs to no layer


def take(sequence: SequenceCache) -> dict[str, Fields]:
    """Everything committed, copied to the host: a block for the sequence, then one for each layer."""
    blocks: dict[str, Fields] = {SEQUENCE: {}, **{str(i): {} for i in range(sequence.spec.num_layers)}}
    for name, tensor in dump(sequence).items():
        layer, _, rest = name.partition(".")
        if rest:
            blocks[layer][rest] = tensor
        else:
            blocks[SEQUENCE][name] = tensor
    return blocks


def put_back(sequence: SequenceCache, num_tokens: int, blocks: Iterable[tuple[str, Fields]]) -> None:
    """Fill an empty sequence. Raises OutOfPages or Fault; the sequence is then to be released."""
    tensors = dict(chain.from_iterable(_named(name, fields) for name, fields in blocks))
    try:
        check_fit(sequence, tensors)
        restore(sequence, tensors)
    except OutOfPages:
        raise
    except (InputError, LookupError, ValueError, TypeError, RuntimeError) as error:
        raise Fault("corrupt", f"its tensors do not fit the model ({error})") from error
    if sequence.committed_len != num_tokens:
        raise Fault("corrupt", f"it holds {sequence.committed_len} tokens, not {num_tokens}")


def _named(name: str, fields: Fields) -> list[tuple[str, Tensor]]:
    return [(rest if name == SEQUENCE else f"{name}.{rest}", tensor) for rest, tensor in fields.items()]
