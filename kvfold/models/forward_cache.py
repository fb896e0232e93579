"""What all caches have in common that serve one forward: transformers keeps nothing in them."""

from __future__ import annotations

from transformers.cache_utils import Cache as HfCache


class ForwardCache(HfCache):  # type: ignore[misc]
    """Has no layers; what `update` returns knows of earlier tokens, so a mask is asked for new ones alone."""

    def __init__(self) -> None:
        super().__init__(layers=[])

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, 0
