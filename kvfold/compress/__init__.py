"""Compression of a sequence's KV cache: observe, score, allocate, select, evict, encode.

    observe.py         what scorers are shown: last queries, query moments, attention mass
    view.py            one layer as a scorer sees it: stored and new slots side by side
    round.py           one round over all layers: score, allocate, select, evict, encode
    selection.py       the slots selected in each layer, until they are written
    refit.py           values and biases of kept slots fitted to answer for evicted ones
    offload.py         evicted slots on their way to host memory
    full_prompt.py     the uncompressed prompt, held for a second reading (KVzip)
    token_pruning.py   tokens dropped between two layers of a prefill (FastKV)
    seal.py            the open block: quantise it, append it to the pages, evict when the trigger fires
"""
