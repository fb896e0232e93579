"""Ids of requests, replies and tool calls, and seeds of requests that bring none. None of them is a secret.

The generator is seeded by the system once. A system call for each hands over the interpreter's lock, which costs a
server of many requests more than the call.
"""

from __future__ import annotations

import random

_random = random.Random()  # of its own: a library that seeds Python's would repeat ids


def random_id() -> str:
    """24 hexadecimal digits."""
    return f"{_random.getrandbits(96):024x}"


def random_seed() -> int:
    return _random.getrandbits(63)
