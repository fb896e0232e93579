"""Serialise the KV cache of a sequence to flat tensors, codes byte for byte, and back.

    {layer}.lens              int64 [pieces, heads]: slots of each head's pieces
    {layer}.{field}           rows of a field, piece after piece, in each head after head
    {layer}.state.{side}.*    codec states (mean keys)
    {layer}.open.k, .v        the committed slots of the open block [H, n, D]
    {layer}.exact.k, .v       full-precision sinks, where a codec asks for them
    {layer}.side.*            observer state (the count of moments, the end of queries: int64 [1])
    pinned                    int64 [spans, 2]
    lens                      int64 [2]: sealed length, length at the last compression

A *piece* is what one `append` writes for a head. A codec that shares metadata between neighbours ends a piece where a
group was closed early; all other slots of a head are one piece, from however many segments and extents they come.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest

import torch
from torch import Tensor

from kvfold.codec.base import Field
from kvfold.errors import InputError
from kvfold.pages.extent import Codes, Extent
from kvfold.pages.layer import LayerPages
from kvfold.pages.layout import PageClass
from kvfold.pages.observer_state import LayerObserverState, Moments, Sentences
from kvfold.pages.sequence import SequenceCache

Tensors = Mapping[str, Tensor]


def dump(sequence: SequenceCache) -> dict[str, Tensor]:
    """Everything committed, copied to the CPU."""
    found: dict[str, Tensor] = {
        "pinned": torch.tensor(sequence.pinned, dtype=torch.int64).view(-1, 2),
        "lens": torch.tensor([sequence.sealed_len, sequence.last_compressed_len]),
    }
    if sequence.sentences.ends:
        found["sentences"] = torch.tensor(sequence.sentences.ends)
    for i in range(sequence.spec.num_layers):
        codes, parts = _codes(sequence.layer_parts(i)), _observed(sequence.observed.layers[i])
        for side, state in sequence.tail.layers[i].state.items():
            parts |= {f"state.{side}.{name}": tensor for name, tensor in state.items()}
        for side, block in (("k", sequence.open.k[i]), ("v", sequence.open.v[i])):
            parts[f"open.{side}"] = block[:, : sequence.open.committed]
        if sequence.fp_sinks is not None and (known := sequence.fp_sinks.committed):
            parts |= {"exact.k": sequence.fp_sinks.k[i][:, :known], "exact.v": sequence.fp_sinks.v[i][:, :known]}
        if sequence.offloaded is not None and i in sequence.offloaded.layers:
            parts |= {f"demoted.{name}": rows for name, rows in sequence.offloaded.layers[i].tensors().items()}
        found |= {f"{i}.{name}": tensor for name, tensor in codes.items()}
        found |= {f"{i}.{name}": _copied(tensor) for name, tensor in parts.items()}
    return found


def _copied(tensor: Tensor) -> Tensor:
    """A copy on the host, also of a tensor that is there: the arena's memory goes to others."""
    return tensor.to("cpu", copy=True, memory_format=torch.contiguous_format)


def restore(sequence: SequenceCache, tensors: Tensors) -> None:
    """Fill an empty sequence. InputError or KeyError, with the sequence to be released, if tensors do not fit it."""
    moved = {name: tensor.to(sequence.arena.device) for name, tensor in tensors.items()}
    layers = [_under(moved, f"{i}.") for i in range(sequence.spec.num_layers)]
    for pages, mine in zip(sequence.tail.layers, layers, strict=True):
        _check(pages, mine)
        for side in ("k", "v"):
            pages.state[side] = _under(mine, f"state.{side}.")
    _write(sequence, layers)
    _fill_open(sequence, layers)
    _fill_fp_sinks(sequence, layers)
    sequence.observed.layers = [_observer_state(_under(mine, "side.")) for mine in layers]
    if sequence.offloaded is not None:
        for i, offloaded in sequence.offloaded.layers.items():
            offloaded.restore(_under(tensors, f"{i}.demoted."))
    sequence.pinned = [(start, end) for start, end in tensors["pinned"].tolist()]
    sequence.sealed_len, sequence.last_compressed_len = tensors["lens"].tolist()
    sequence.sentences = _sentences(tensors.get("sentences"))


def _sentences(end_E: Tensor | None) -> Sentences:
    if end_E is None:
        return Sentences()
    if end_E.dtype != torch.int64 or end_E.ndim != 1 or bool((end_E.diff(prepend=end_E.new_tensor([-1])) < 1).any()):
        raise InputError(f"ends of sentences are {end_E.dtype} {tuple(end_E.shape)}, not ascending positions")
    return Sentences(end_E.tolist())


def _codes(parts: Sequence[LayerPages]) -> dict[str, Tensor]:
    page_class, heads = parts[0].page_class, range(parts[0].num_heads)
    pieces = list(zip_longest(*(_pieces(parts, head) for head in heads), fillvalue=()))
    lens = [[sum(extent.length for extent in piece) for piece in level] for level in pieces]
    extents = [extent for level in pieces for piece in level for extent in piece]
    found = {"lens": torch.tensor(lens, dtype=torch.int64).view(-1, len(heads))}
    for item in page_class.fields:
        empty = torch.empty(0, item.width, dtype=item.dtype)
        found[item.name] = torch.cat([empty, *(_rows(extent, item).cpu() for extent in extents)])
    return found


def _pieces(parts: Sequence[LayerPages], head: int) -> list[tuple[Extent, ...]]:
    group = parts[0].page_class.group
    pieces: list[tuple[Extent, ...]] = []
    for extent in (extent for part in parts for extent in part.extents[head] if extent.length):
        if pieces and sum(e.length for e in pieces[-1]) % group == 0:
            pieces[-1] = (*pieces[-1], extent)
        else:
            pieces.append((extent,))
    return pieces


def _rows(extent: Extent, item: Field) -> Tensor:
    page_class = extent.span.page_class
    first = extent.first * page_class.rows_per_page(item)
    return extent.span.fields[item.name][first : first + field_rows(page_class, item, extent.length)]


def field_rows(page_class: PageClass, item: Field, num_slots: int) -> int:
    """Rows of a field that hold so many slots; a group that was closed early is whole."""
    whole = -(-num_slots // page_class.group) * page_class.group
    return whole * page_class.rows_per_page(item) // page_class.page_size


def _check(pages: LayerPages, mine: Tensors) -> None:
    """Shapes and dtypes, before anything is written."""
    lens = mine["lens"]
    if lens.dtype != torch.int64 or lens.ndim != 2 or lens.shape[1] != pages.num_heads or bool((lens < 0).any()):
        raise InputError(f"lengths of shape {tuple(lens.shape)} do not fit {pages.num_heads} heads")
    for item in pages.page_class.fields:
        num_rows = sum(field_rows(pages.page_class, item, n) for n in lens.flatten().tolist())
        rows = mine[item.name]
        if rows.dtype != item.dtype or rows.shape != (num_rows, item.width):
            raise InputError(f"{item.name} is {rows.dtype} {tuple(rows.shape)}, not {(num_rows, item.width)}")


def _write(sequence: SequenceCache, layers: Sequence[Tensors]) -> None:
    """Piece after piece, memory for all layers first."""
    done = [{item.name: 0 for item in pages.page_class.fields} for pages in sequence.tail.layers]
    for level in zip_longest(*(mine["lens"].tolist() for mine in layers)):
        counts = [
            [0] * pages.num_heads if of is None else of for pages, of in zip(sequence.tail.layers, level, strict=True)
        ]
        sequence.tail.reserve(counts)
        for pages, mine, of, at in zip(sequence.tail.layers, layers, counts, done, strict=True):
            pages.append(_next_rows(pages.page_class, mine, of, at), of)


def _next_rows(page_class: PageClass, mine: Tensors, counts: Sequence[int], at: dict[str, int]) -> Codes:
    codes = {}
    for item in page_class.fields:
        num_rows = sum(field_rows(page_class, item, count) for count in counts)
        codes[item.name] = mine[item.name][at[item.name] : at[item.name] + num_rows]
        at[item.name] += num_rows
    return codes


def _fill_open(sequence: SequenceCache, layers: Sequence[Tensors]) -> None:
    block = sequence.open
    block.fill = block.committed = layers[0]["open.k"].shape[1]
    for i, mine in enumerate(layers):
        block.k[i][:, : block.fill] = mine["open.k"]
        block.v[i][:, : block.fill] = mine["open.v"]


def _fill_fp_sinks(sequence: SequenceCache, layers: Sequence[Tensors]) -> None:
    block = sequence.fp_sinks
    if block is None or not all("exact.k" in mine for mine in layers):
        return
    known = layers[0]["exact.k"].shape[1]
    for k_HnD, v_HnD, mine in zip(block.k, block.v, layers, strict=True):
        k_HnD, v_HnD = k_HnD[:, :known], v_HnD[:, :known]
        if mine["exact.k"].shape != k_HnD.shape or mine["exact.v"].shape != v_HnD.shape:
            raise InputError(f"exact slots are {tuple(mine['exact.k'].shape)}, not {tuple(k_HnD.shape)}")
        k_HnD.copy_(mine["exact.k"])
        v_HnD.copy_(mine["exact.v"])
    block.committed, block.fill = known, known if known == block.num_slots else 0


def _observed(state: LayerObserverState) -> dict[str, Tensor]:
    named = {"side.mass": state.mass_HS, "side.open_mass": state.open_mass_HR, "side.last_q": state.last_q_QWD}
    if state.moments is not None:
        named |= {"side.centre": state.moments.centre_QD, "side.sum": state.moments.sum_QD}
        named["side.outer"] = state.moments.outer_QDD
        named["side.count"] = torch.tensor([state.moments.count])
    if state.last_q_QWD is not None or state.moments is not None:
        named["side.query_end"] = torch.tensor([state.query_end])
    return {name: tensor for name, tensor in named.items() if tensor is not None}


def _observer_state(mine: Tensors) -> LayerObserverState:
    moments = None
    if "count" in mine:
        moments = Moments(int(mine["count"]), mine["centre"], mine["sum"], mine["outer"])
    query_end = int(mine["query_end"]) if "query_end" in mine else 0
    return LayerObserverState(mine.get("mass"), mine.get("open_mass"), mine.get("last_q"), moments, query_end)


def _under(tensors: Tensors, prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
