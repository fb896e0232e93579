"""Redis (or Valkey) tier, shared between machines; entries expire by Redis TTL.

Capacity and eviction are Redis settings (`maxmemory`, best with `volatile-ttl`). A server that is down or slow costs a
few time-outs, then circuit breakers skip it for a pause; one that is full or read-only refuses writes and still serves
reads. Requests never fail.
"""

from __future__ import annotations

import io
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from threading import Lock
from typing import Any, BinaryIO, Literal

from kvfold.errors import InputError, MissingExtra
from kvfold.store.entry.format import PREAMBLE_BYTES, peek
from kvfold.store.events import Events
from kvfold.store.key import Key
from kvfold.store.tiers.base import ByteTier, Clock
from kvfold.store.tiers.eviction import Lease


class Breaker:
    """Closed: all calls pass. Open for `pause_s` after `num_failures` in a row: none. Half-open: one call may try."""

    def __init__(
        self, *, num_failures: int = 3, pause_s: float = 5.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.num_failures = num_failures
        self.pause_s = pause_s
        self._clock = clock
        self._lock = Lock()
        self._failed = 0
        self._retry_at: float | None = None

    @property
    def is_open(self) -> bool:
        with self._lock:
            return self._retry_at is not None and self._clock() < self._retry_at

    def enter(self) -> bool:
        """Whether to call now; the caller then reports with `succeeded` or `failed`."""
        with self._lock:
            if self._retry_at is None:
                return True
            if self._clock() < self._retry_at:
                return False
            self._retry_at = self._clock() + self.pause_s  # half-open: others wait for this call's result
            return True

    def succeeded(self) -> None:
        with self._lock:
            self._failed, self._retry_at = 0, None

    def failed(self) -> None:
        with self._lock:
            self._failed += 1
            if self._failed >= self.num_failures:
                self._retry_at = self._clock() + self.pause_s


_PREFIX = "kvfold:"
_MAX_VALUE_BYTES = 512 << 20  # of Redis itself
Operation = Literal["read", "touch", "write", "delete"]


class RedisTier(ByteTier):
    """`url` for redis-py, such as redis://host:6379/0; `timeout_s` for every command.

    Each operation has its own circuit breaker: successful reads do not hide that a replica or an account without DEL
    refuses writes, and failing writes do not block reads."""

    name = "redis"
    is_shared = True

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float = 2.0,
        make_breaker: Callable[[], Breaker] = Breaker,
        clock: Clock = time.time,
    ) -> None:
        self.events = Events()
        self.breakers: defaultdict[Operation, Breaker] = defaultdict(make_breaker)
        self._clock = clock
        self._redis, self._full, self._broken = _connect(url, timeout_s)

    def put(self, key: Key, value: bytes, lease: Lease) -> bool:
        left_ms = self._left_ms(lease.expires_at)
        if len(value) > _MAX_VALUE_BYTES or left_ms <= 0:
            self.emit("failed", key, len(value), "no_room")
            return False
        is_stored: bool | None = self._try("write", lambda: self._set(key, value, left_ms))
        if is_stored:
            self.emit("stored", key, len(value))
        else:
            self.emit("failed", key, len(value), "unavailable" if is_stored is None else "no_room")
        return bool(is_stored)

    def _set(self, key: Key, value: bytes, left_ms: int) -> bool:
        """False if the server is full."""
        try:
            return bool(self._redis.set(_name(key), value, px=left_ms))
        except self._full:
            return False

    def get(self, key: Key, at: float) -> BinaryIO | None:
        data = self._read(key, _MAX_VALUE_BYTES, at)
        return io.BytesIO(data) if data else None

    def touch(self, key: Key, at: float) -> None:
        self._read(key, PREAMBLE_BYTES, at)

    def _read(self, key: Key, num_bytes: int, at: float) -> bytes:
        """The first `num_bytes` of an entry (empty on a miss); refreshes its time to live."""
        data: bytes = self._try("read", lambda: self._redis.getrange(_name(key), 0, num_bytes - 1)) or b""
        preamble = peek(data)
        left_ms = 0 if preamble is None else self._left_ms(at + preamble.ttl_s)
        if left_ms > 0:
            self._try("touch", lambda: self._redis.pexpire(_name(key), left_ms, gt=True))
        return data

    def delete(self, key: Key) -> None:
        self._try("delete", lambda: self._redis.delete(_name(key)))

    def keys(self) -> Iterator[Key]:
        names = self._try("read", lambda: list(self._redis.scan_iter(f"{_PREFIX}*", count=1000))) or []
        keys = (Key.parse(name.decode(errors="replace").removeprefix(_PREFIX)) for name in names)
        return iter([key for key in keys if key is not None])

    def has(self, key: Key) -> bool:
        return bool(self._try("read", lambda: self._redis.exists(_name(key))))

    def num_leading(self, keys: Sequence[Key]) -> int:
        """One round trip for all of them."""

        def ask() -> list[int]:
            with self._redis.pipeline(transaction=False) as pipeline:
                for key in keys:
                    pipeline.exists(_name(key))
                found: list[int] = pipeline.execute()
                return found

        found = self._try("read", ask) or []
        return next((number for number, exists in enumerate(found) if not exists), len(found))

    def answers(self) -> bool:
        return bool(self._try("read", self._redis.ping))

    def look(self, key: Key) -> tuple[int, float, bytes] | None:
        """Size of an entry, seconds to live and preamble; does not refresh it."""
        num_bytes = self._try("read", lambda: self._redis.strlen(_name(key)))
        left_ms = self._try("read", lambda: self._redis.pttl(_name(key)))
        begins = self._try("read", lambda: self._redis.getrange(_name(key), 0, PREAMBLE_BYTES - 1))
        return (num_bytes, left_ms / 1e3, begins) if num_bytes and left_ms and begins else None

    def close(self) -> None:
        self._redis.close()

    def _left_ms(self, expires_at: float) -> int:
        return round(1000 * (expires_at - self._clock()))

    def _try(self, operation: Operation, command: Callable[[], Any]) -> Any:
        """Result of the command; None if the server fails or the breaker is open."""
        breaker = self.breakers[operation]
        if not breaker.enter():
            return None
        try:
            found = command()
        except self._broken:
            breaker.failed()
            return None
        breaker.succeeded()
        return found


def _name(key: Key) -> str:
    return f"{_PREFIX}{key.text}"


def _connect(url: str, timeout_s: float) -> tuple[Any, type[Exception], tuple[type[Exception], ...]]:
    """A client without retries, its exception for a full server, and its other exceptions."""
    try:
        import redis
        from redis.backoff import NoBackoff
        from redis.exceptions import OutOfMemoryError, RedisError
        from redis.retry import Retry
    except ImportError as error:
        raise MissingExtra('the Redis tier needs redis-py; install it with: pip install "kvfold[serve]"') from error
    options = {"socket_timeout": timeout_s, "socket_connect_timeout": timeout_s, "retry": Retry(NoBackoff(), 0)}
    try:
        client = redis.Redis.from_url(url, **options)
    except ValueError as error:
        raise InputError(f'"{url}" is no Redis URL ({error}); write redis://host:6379/0') from error
    return client, OutOfMemoryError, (RedisError, OSError)
