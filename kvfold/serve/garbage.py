"""Python's cyclic garbage collector while a server runs.

A full collection visits every object of the process: those of PyTorch, transformers and the model alone take 0.1 to
0.2 s, in which no thread runs. A server makes thousands of small objects for each request, so collections come often.
What exists when it starts is taken out of their way, as vLLM does it, and young objects are collected less often.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_YOUNG = 200_000  # objects more than before, after which young ones are collected; those of 256 prompts are 50,000


@contextmanager
def rare_collections() -> Iterator[None]:
    """Collections leave alone what exists now, garbage as well (`gc.collect()` comes before); as before on exit."""
    young, *older = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(max(young, _YOUNG) if young else 0, *older)
    try:
        yield
    finally:
        gc.set_threshold(young, *older)
        gc.unfreeze()
