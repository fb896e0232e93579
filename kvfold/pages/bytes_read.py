"""Sealed bytes that one decode step reads of a layer: every slot, or chosen ones and what all are judged by."""

from __future__ import annotations

from kvfold.pages.fp_sinks import num_exact
from kvfold.pages.sequence import SequenceCache


def stored_bytes_read(sequence: SequenceCache, layer: int) -> float:
    """Summaries are read only where there are more slots than the reader takes; a layer below that a codec needs is
    read again, and slots that are kept exact beside their codes."""
    page_class, parts = sequence.page_class(layer), sequence.layer_parts(layer)
    every = sum(sequence.stored_lens(layer)) * page_class.code_bytes / page_class.page_size
    spec, exact = sequence.spec.layers[layer], num_exact(sequence, layer)
    exact_bytes = exact * spec.num_kv_heads * spec.head_dim * 2 * sequence.spec.kv_dtype.itemsize
    every += exact_bytes
    if page_class.needs_below:  # which may need its own
        every += stored_bytes_read(sequence, layer - 1)
    if not page_class.reader.chooses:
        return every
    heads = [[extent for part in parts for extent in part.extents[head]] for head in range(parts[0].num_heads)]
    pages = [sum(page_class.pages_for(extent.length) for extent in extents) for extents in heads]
    unit = page_class.reader.unit(page_class.page_size, page_class.group)
    most = page_class.reader.num_units(unit)
    if max(pages) * page_class.page_size <= most * unit:
        return every
    units = [sum(-(-extent.length // unit) for extent in extents) for extents in heads]
    unit_bytes = page_class.code_bytes * unit / page_class.page_size
    looked_bytes = page_class.summary_bytes + page_class.entry_bytes
    return exact_bytes + sum(min(count, most) for count in units) * unit_bytes + sum(pages) * looked_bytes
