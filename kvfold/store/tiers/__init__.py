"""Where stored prefixes lie: device, host memory, disk, Redis, and the cascade over them."""
