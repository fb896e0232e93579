"""Prefix cache: KV of prompt prefixes in tiers (device, host, disk, Redis), by tokens, model, policy and tenant."""

from kvfold.store.events import Event
from kvfold.store.prefixes import Hit, Prefixes
from kvfold.store.store import PrefixStore
from kvfold.store.tiers.base import ByteTier, Tier
from kvfold.store.tiers.device import DeviceTier
from kvfold.store.tiers.disk import DiskTier
from kvfold.store.tiers.host import HostTier
from kvfold.store.tiers.redis import RedisTier
from kvfold.store.tiers.tiered_cache import Quarantine

__all__ = [
    "ByteTier", "DeviceTier", "DiskTier", "Event", "Hit", "HostTier", "PrefixStore", "Prefixes", "Quarantine",
    "RedisTier", "Tier",
]  # fmt: skip
