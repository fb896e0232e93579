"""KV bytes that one decode step reads of a layer: every sealed slot, or the selected ones and all page summaries."""

from __future__ import annotations

from kvfold.pages.fp_sinks import layer_fp_sinks
from kvfold.pages.sequence import SequenceCache


def stored_bytes_read(sequence: SequenceCache, layer: int) -> float:
    """Summaries count only if the head holds more slots than the reader selects; so do the layer below that a
    cross-layer codec decodes again, and the full-precision sinks."""
    page_class, parts = sequence.page_class(layer), sequence.layer_parts(layer)
    every = sum(sequence.stored_lens(layer)) * page_class.code_bytes / page_class.page_size
    spec, num_sinks = sequence.spec.layers[layer], layer_fp_sinks(sequence, layer)
    sink_bytes = num_sinks * spec.num_kv_heads * spec.head_dim * 2 * sequence.spec.kv_dtype.itemsize
    every += sink_bytes
    if page_class.needs_below:  # which may need its own
        every += stored_bytes_read(sequence, layer - 1)
    if not page_class.reader.selects:
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
    return sink_bytes + sum(min(count, most) for count in units) * unit_bytes + sum(pages) * looked_bytes
