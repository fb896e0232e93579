"""Which replica gets a request: rendezvous hashing of how its prompt begins, with bounded load.

Every replica has a score for every key, and the highest one is chosen: without a table, alike after a restart, and only
the keys of a replica that is gone move. A replica with more than 1.25 times the mean of requests in flight is passed
over (consistent hashing with bounded loads, arXiv:1608.01350).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from kvfold.serve.replicas.upstream import Links, Upstream

PREFIX_CHARS = 1024
LOAD_FACTOR = 1.25
_MARKERS = ("cache_control", "prompt_cache_breakpoint")
_LEADING_ROLES = ("system", "developer")
_Blocks = list[tuple[str, bool]]  # texts in render order, and whether each has a cache marker


def route_key(tenant: str, raw: bytes | bytearray) -> bytes:
    """Of a request body; one that is no JSON object has its tenant's key, since every replica refuses it alike."""
    body = _object_of(raw)
    facts = [tenant, body.get("model"), body.get("prompt_cache_key"), prefix_of(body)]
    return blake2b(json.dumps(facts).encode(), digest_size=16).digest()


def prefix_of(body: dict[str, Any]) -> str:
    """Tools and system prompt up to the first cache marker in them; without one there, the first 1,024 characters of
    the first message, up to a marker in it.

    Later messages do not count: every turn of a conversation, wherever its marker has moved, has the prefix of its
    first one.
    """
    messages = _listed(body.get("messages", body.get("input", body.get("prompt"))))
    num_leading = next((i for i, one in enumerate(messages) if _role(one) not in _LEADING_ROLES), len(messages))
    leading = [*_each(body.get("tools")), *_each(body.get("system")), *_each(body.get("instructions"))]
    leading += [block for message in messages[:num_leading] for block in _content(message)]
    marked = _to_marker(leading)
    if marked is not None:
        return "".join(marked)
    first = _content(messages[num_leading]) if num_leading < len(messages) else leading
    return "".join(_to_marker(first) or [text for text, _ in first])[:PREFIX_CHARS]


def _object_of(raw: bytes | bytearray) -> dict[str, Any]:
    try:
        found = json.loads(raw) if raw else {}
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _listed(value: object) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _role(message: object) -> object:
    return message.get("role") if isinstance(message, dict) else None


def _content(message: object) -> _Blocks:
    if isinstance(message, dict) and "content" in message:
        return _each(message["content"])
    return _each(message)


def _each(value: object) -> _Blocks:
    return [_block(one) for one in _listed(value)]


def _block(value: object) -> tuple[str, bool]:
    if not isinstance(value, dict):
        return value if isinstance(value, str) else json.dumps(value), False
    is_marked = any(value.get(name) is not None for name in _MARKERS)
    text = value.get("text")
    if not isinstance(text, str):
        text = json.dumps({name: item for name, item in value.items() if name not in _MARKERS})
    return text, is_marked


def _to_marker(blocks: _Blocks) -> list[str] | None:
    """Texts up to the first marked one; None without a marker."""
    for end, (_, is_marked) in enumerate(blocks, 1):
        if is_marked:
            return [text for text, _ in blocks[:end]]
    return None


@dataclass(eq=False)
class Backend:
    """One replica as the proxy sees it; `socket` is the path it listens at."""

    number: int
    socket: str = ""
    is_up: bool = False
    num_in_flight: int = 0
    links: Links = field(default_factory=Links)
    upstreams: set[Upstream] = field(default_factory=set)  # requests in flight

    def give_up(self) -> None:
        """It hangs: no request waits for it any longer."""
        self.is_up = False
        self.links.close()
        for upstream in self.upstreams:
            upstream.close()


def choices(key: bytes, backends: Sequence[Backend]) -> list[Backend]:
    """Replicas that are up, the one to be asked first in front."""
    up = [backend for backend in backends if backend.is_up]
    if not up:
        return []
    ordered = sorted(up, key=lambda backend: _score(key, backend.number), reverse=True)
    most = most_in_flight(backend.num_in_flight for backend in up)
    return sorted(ordered, key=lambda backend: backend.num_in_flight >= most)  # stable: the hash decides among equals


def most_in_flight(in_flight: Iterable[int]) -> int:
    """Requests that one replica may have, so many of which it may have already only if this one goes elsewhere."""
    found = list(in_flight)
    return math.ceil(LOAD_FACTOR * (sum(found) + 1) / len(found))


def _score(key: bytes, number: int) -> bytes:
    return blake2b(key, digest_size=8, salt=number.to_bytes(8, "big")).digest()
