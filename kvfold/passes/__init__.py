"""Forward passes of the model: what attention reads and writes of the KV cache in each.

prefill.py      a prompt (or a chunk of it), layer by layer, compressed as it goes
decode.py       one new token, or a draft, for each sequence of a batch
replay.py       the prompt repeated over its full cache (KVzip)
probe.py        tokens over the full prompt that are not kept: questions about it (self-study), and what a replay shares
captured/       decode steps that run as CUDA graphs
"""
