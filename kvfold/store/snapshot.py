"""A whole sequence as blocks of an entry, and back: what compressed sequences are stored as.

The tensors are those of `kvfold.pages.dump`, which checks what goes into pages; here is checked what scorers observed,
and that the sequence has the length its key says.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

from torch import Tensor

from kvfold.core import LayerSpec
from kvfold.errors import InputError, OutOfPages
from kvfold.pages.dump import dump, restore
from kvfold.pages.sequence import SequenceCache
from kvfold.store.entry import Fault, Fields

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
        for i, layer in enumerate(sequence.spec.layers):
            _check_layer(layer, sequence.config.open_len, tensors, f"{i}.")
        restore(sequence, tensors)
    except OutOfPages:
        raise
    except (InputError, LookupError, ValueError, TypeError, RuntimeError) as error:
        raise Fault("corrupt", f"its tensors do not fit the model ({error})") from error
    if sequence.committed_len != num_tokens:
        raise Fault("corrupt", f"it holds {sequence.committed_len} tokens, not {num_tokens}")


def _named(name: str, fields: Fields) -> list[tuple[str, Tensor]]:
    return [(rest if name == SEQUENCE else f"{name}.{rest}", tensor) for rest, tensor in fields.items()]


def _check_layer(layer: LayerSpec, open_len: int, tensors: Fields, prefix: str) -> None:
    """Shapes of the open block and of what scorers observed."""
    heads, queries, dim = layer.num_kv_heads, layer.num_query_heads, layer.head_dim
    stored = int(tensors[f"{prefix}lens"].sum(0).max()) if tensors[f"{prefix}lens"].numel() else 0
    expected: dict[str, tuple[int | None, ...]] = {
        "open.k": (heads, None, dim),
        "open.v": (heads, None, dim),
        "side.mass": (heads, stored),
        "side.open_mass": (heads, open_len),
        "side.last_q": (queries, None, dim),
        "side.sum": (queries, dim),
        "side.outer": (queries, dim, dim),
        "side.count": (1,),
    }
    for name, shape in expected.items():
        tensor = tensors.get(prefix + name)
        if tensor is not None and not _fits(tensor, shape):
            raise InputError(f"{name} has shape {tuple(tensor.shape)}, not {shape}")


def _fits(tensor: Tensor, shape: tuple[int | None, ...]) -> bool:
    pairs = zip(tensor.shape, shape, strict=False)
    return tensor.ndim == len(shape) and all(size is None or size == found for found, size in pairs)
