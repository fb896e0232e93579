"""Reuse across requests: prefixes in tiers (device, host, disk, Redis), bound to model, policy and tenant."""

from kvfold.store.device import DeviceTier
from kvfold.store.disk import DiskTier
from kvfold.store.events import Event
from kvfold.store.host import HostTier
from kvfold.store.prefixes import Hit, Prefixes
from kvfold.store.quarantine import Quarantine
from kvfold.store.remote import RedisTier
from kvfold.store.store import PrefixStore
from kvfold.store.tier import ByteTier, Tier

__all__ = [
    "ByteTier",
    "DeviceTier",
    "DiskTier",
    "Event",
    "Hit",
    "HostTier",
    "PrefixStore",
    "Prefixes",
    "Quarantine",
    "RedisTier",
    "Tier",
]
