"""Passes of the model over new tokens: what attention does in each, and what it leaves in the KV cache.

    prefill.py      a prompt, layer by layer, compressed as it goes
    decode.py       one new token, or a draft, for each sequence of a batch
    replay.py       a second reading of the prompt over its whole cache (KVzip)
    self_study.py   questions about the prompt, answered over its whole cache
    captured/       decode steps that run as CUDA graphs
"""
