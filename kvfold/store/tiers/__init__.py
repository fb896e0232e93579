"""Storage tiers of the prefix cache: device, host memory, disk, Redis; eviction, write queue, tiered cache."""
