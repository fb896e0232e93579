"""Paged KV cache: the block pool, page tables of heads, shared prefix segments, the open block.

arena.py             block pool: spans of pages are allocated and freed here
layer.py             the page table of a layer: which head owns which pages
segment.py           pages of all layers over one range of tokens; shared by refcount, copy-on-write
sequence.py          the KV cache of one sequence: segments, tail, open block, observer state
open_block.py        the newest tokens, not yet quantised
compaction.py        seal new slots and evict stored ones: memory first, then the write
dequantize.py        slots back from codes
kernels/             on a GPU: encode.py quantises and packs (int4, fp8, ..), write.py writes; elsewhere codecs do
serialize.py         a sequence as flat tensors, for files and tiers
"""
