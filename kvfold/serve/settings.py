"""What an operator decides: sizes, limits, prices."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from kvfold.engine.sampling import Sampling
from kvfold.errors import InputError
from kvfold.serve.cache.cache_breakpoints import POINT_TOKENS
from kvfold.serve.cache.usage import Price, min_tokens_of

BODY_BYTES_PER_TOKEN, BODY_BYTES_BESIDE = 32, 64 << 10
MAX_STOP_CHARS = 1024  # of one stop string


@dataclass(frozen=True)
class Limits:
    """What one request, one tenant, and all of them together may take."""

    body_bytes: int | None = None  # None: in proportion to the model's context
    output_tokens: int = 32_768
    per_tenant: int | None = None  # requests at a time; None: half of `running` where tenants have keys, else all
    running: int = 64
    waiting: int = 256
    request_s: float = 600.0
    connections: int | None = None  # at a time; None: 1,024, or what the process's file descriptors allow
    header_s: float = 10.0  # for the head of a request to come
    body_s: float = 60.0  # for its body
    write_s: float = 30.0  # for the client to take what is written
    shutdown_s: float = 5.0  # from the signal to the end of the process

    def __post_init__(self) -> None:
        low = [name for name, value in vars(self).items() if value is not None and not value > 0]
        if low:
            raise InputError(f"the limit {low[0]} is {vars(self)[low[0]]}; it must be above 0")

    def body_bytes_for(self, max_tokens: int) -> int:
        """Text has about 4 bytes a token; escaped and in small blocks, JSON has several times as many."""
        return self.body_bytes or BODY_BYTES_PER_TOKEN * max_tokens + BODY_BYTES_BESIDE


@dataclass(frozen=True)
class Settings:
    """`names`: what clients may call the model, the first one is its own. `cache_min_tokens` None: by name."""

    names: tuple[str, ...]
    limits: Limits = field(default_factory=Limits)
    tenants: Mapping[str, str] | None = None  # digest of a key -> tenant; None: no key is asked for
    price: Price | None = None
    cache_min_tokens: int | None = None
    temperature: float = 1.0  # where a request names none
    point_tokens: int = POINT_TOKENS  # least distance of two places at which prompts are compressed
    clock: Callable[[], float] | None = None  # seconds since 1970; None: the system's

    def __post_init__(self) -> None:
        Sampling(temperature=self.temperature)  # InputError if no request could be sampled with it

    @property
    def per_tenant(self) -> int:
        """Requests of one tenant at a time."""
        limits = self.limits
        if limits.per_tenant is not None:
            return limits.per_tenant
        return limits.running if self.tenants is None else max(1, limits.running // 2)

    @property
    def num_reserved(self) -> int:
        """Places to run that are kept for tenants that run nothing; without keys there is one tenant."""
        return int(self.tenants is not None and self.limits.running > 1)

    def min_tokens(self, model: str) -> int:
        return min_tokens_of(model) if self.cache_min_tokens is None else self.cache_min_tokens
