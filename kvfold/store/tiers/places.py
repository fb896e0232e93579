"""A place as a user writes it, a folder or a Redis URL, as the tier that several processes can share."""

from __future__ import annotations

from kvfold.store.tiers.base import ByteTier
from kvfold.store.tiers.redis import RedisTier
from kvfold.store.tiers.shared_disk import SharedDiskTier

_SCHEMES = ("redis://", "rediss://", "unix://")


def open_place(place: str, limit_bytes: int | None = None) -> ByteTier:
    """`limit_bytes` is for folders; Redis has a limit of its own."""
    return RedisTier(place) if place.startswith(_SCHEMES) else SharedDiskTier(place, limit_bytes)
