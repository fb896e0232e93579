"""How a model reads what is too much for one forward: windows of a text, batches of prompts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

_BATCH, _BATCH_TOKENS = 16, 2048


def token_windows(num_tokens: int, most: int) -> list[tuple[int, int]]:
    """Windows of `most` tokens, of which a quarter stands in the one before; the last ends with the text.

    |‥‥‥‥‥‥‥‥‥‥‥‥|
             |‥‥‥‥‥‥‥‥‥‥‥‥|
                  |‥‥‥‥‥‥‥‥‥‥‥‥|
    """
    step = max(1, most - most // 4)
    lows = [*range(0, max(0, num_tokens - most), step), max(0, num_tokens - most)]
    return [(low, min(low + most, num_tokens)) for low in lows] if num_tokens else []


def batches(prompts: Sequence[list[int]]) -> Iterator[list[list[int]]]:
    """Consecutive prompts, so many at a time that their tokens stay below a bound."""
    batch: list[list[int]] = []
    for ids in prompts:
        if batch and (len(batch) == _BATCH or sum(map(len, batch)) + len(ids) > _BATCH_TOKENS):
            yield batch
            batch = []
        batch.append(ids)
    if batch:
        yield batch
