"""Compression of a sequence's KV cache: observe, score, allocate, select, evict, encode.

observe.py         observer state for scorers: last queries, query moments, attention mass
view.py            one layer as a scorer sees it: stored and new slots side by side
round.py           one round over all layers: score, allocate, select, evict, encode
joined.py          a layer's selection for many short prompts in one go
selection.py       the slots selected in each layer, until they are written, and their fit to the full cache's outputs
offload.py         evicted slots offloaded to host memory
full_prompt.py     the uncompressed prompt, held until its replay (KVzip)
token_pruning.py   tokens dropped between two layers of a prefill (FastKV)
seal.py            the open block: quantise it, append it to the pages, evict when the trigger fires
"""
