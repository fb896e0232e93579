"""Vectors of many facts: made in batches, each as if it were alone."""

from __future__ import annotations

import tracemalloc

import numpy as np

from kvfold.memory.embedding import HashedTrigrams


def test_vectors_of_many_facts_take_little_memory_beside_them() -> None:
    """A turn of a megabyte has 100,000 facts: counts of all of them at once would take 400 MB."""
    rows = (0, 2047, 2048, 19_999)
    texts = [f"The house {row} is old." if row in rows else "" for row in range(20_000)]
    tracemalloc.start()
    found_ND = HashedTrigrams().codes(texts)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found_ND.shape == (20_000, 512) and peak < found_ND.nbytes + (40 << 20)
    for row in rows:
        assert np.array_equal(found_ND[row], HashedTrigrams().codes([texts[row]])[0])
