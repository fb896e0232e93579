"""Server settings: limits (concurrency, time-outs, sizes), tenants, prices, prompt-cache thresholds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kvfold.errors import InputError
from kvfold.serve.cache.breakpoints import POINT_TOKENS
from kvfold.serve.cache.usage import Price, min_tokens_of

BODY_BYTES_PER_TOKEN, BODY_BYTES_BESIDE = 32, 64 << 10
MAX_STOP_CHARS = 1024  # of one stop string
MAX_TEMPERATURE = 2.0  # OpenAI's
_OPTIONS = {
    "body_bytes": "--max-body",
    "output_tokens": "--max-output",
    "per_tenant": "--max-per-tenant",
    "running": "--max-running",
    "waiting": "--max-waiting",
    "request_s": "--timeout",
    "connections": "--max-connections",
    "header_s": "--header-timeout",
    "body_s": "--body-timeout",
    "write_s": "--write-timeout",
    "shutdown_s": "--shutdown-timeout",
}


@dataclass(frozen=True)
class Limits:
    """Limits of one request, one tenant and the whole server."""

    body_bytes: int | None = None  # None: in proportion to the model's context
    output_tokens: int = 32_768
    per_tenant: int | None = None  # concurrent; None: half of `running` with API keys, else `running` + `waiting`
    running: int = 64
    waiting: int = 256
    request_s: float = 600.0
    connections: int | None = None  # concurrent; None: 1,024, or what the process's file descriptors allow
    header_s: float = 10.0  # for the request headers to arrive
    body_s: float = 60.0  # for the body to arrive
    write_s: float = 30.0  # for the client to read what is written
    shutdown_s: float = 5.0  # from the signal to the end of the process

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and not 0 < value < math.inf:
                raise InputError(f"{_OPTIONS[name]} is {value}; give a number above 0")

    def body_bytes_for(self, max_tokens: int) -> int:
        """Text has about 4 bytes a token; escaped JSON in small blocks several times as many."""
        return self.body_bytes or BODY_BYTES_PER_TOKEN * max_tokens + BODY_BYTES_BESIDE


@dataclass(frozen=True)
class Settings:
    """`names`: model names in the API, the model's own first. `cache_min_tokens`: None looks it up by name."""

    names: tuple[str, ...]
    limits: Limits = field(default_factory=Limits)
    tenants: Mapping[str, str] | None = None  # API key digest -> tenant; None: no key is needed
    proxy_digest: str | None = None  # of the secret of a proxy that names the tenants; None: there is none
    price: Price | None = None
    cache_min_tokens: int | None = None
    temperature: float = 1.0  # default of requests
    point_tokens: int = POINT_TOKENS  # minimum distance of two compression points
    clock: Callable[[], float] | None = None  # seconds since 1970; None: the system's
    memory_file: Path | None = None  # facts of users who are named; None: nothing is kept

    def __post_init__(self) -> None:
        if not 0 <= self.temperature <= MAX_TEMPERATURE:
            raise InputError(f"--temperature is {self.temperature:g}; requests take 0 (greedy) to {MAX_TEMPERATURE:g}")

    @property
    def has_tenants(self) -> bool:
        """Whether there can be more than one."""
        return self.tenants is not None or self.proxy_digest is not None

    @property
    def per_tenant(self) -> int:
        """Concurrent requests of one tenant, running or queued; without API keys there is one tenant."""
        limits = self.limits
        if limits.per_tenant is not None:
            return limits.per_tenant
        return max(1, limits.running // 2) if self.has_tenants else limits.running + limits.waiting

    @property
    def bound_of_tenants(self) -> tuple[str, str]:
        """Whom `per_tenant` bounds, and the options that say so."""
        if self.has_tenants or self.limits.per_tenant is not None:
            return "this tenant", "--max-per-tenant"
        return "the server", "--max-running and --max-waiting"

    @property
    def num_reserved(self) -> int:
        """Batch slots reserved for tenants without a running request; without API keys there is one tenant."""
        return int(self.has_tenants and self.limits.running > 1)

    def min_tokens(self, model: str) -> int:
        return min_tokens_of(model) if self.cache_min_tokens is None else self.cache_min_tokens
