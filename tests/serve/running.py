"""A server that runs, on the tiny Llama and a free port, with a clock of the test's own."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import anthropic
import openai

from kvfold.models.loader import Model
from kvfold.serve.local_service import LocalService
from kvfold.serve.middleware import OnDone
from kvfold.serve.server import Server, service_of
from kvfold.serve.settings import Limits, Settings
from kvfold.store import DeviceTier, DiskTier, HostTier, PrefixStore, RedisTier
from kvfold.store.tiers.base import ByteTier
from tests import tiny

CHUNK_LEN = 16
TOOL_TEMPLATE = (
    "{% if tools %}<tools>{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}\n</tools>"
    "Reply with <tool_call>{json}</tool_call> to call one.{% endif %}"
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<end>\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


class Clock:
    """Stands still until it is set."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


class Running:
    """A running server and clients for it."""

    def __init__(self, service: LocalService, listening: Any, clock: Clock, key: str) -> None:
        self.service, self.clock, self.listening = service, clock, listening
        self.port = port = listening.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.anthropic = self.anthropic_as(key)
        self.openai = self.openai_as(key)

    def anthropic_as(self, key: str, **options: Any) -> anthropic.Anthropic:
        return anthropic.Anthropic(base_url=self.url, api_key=key, max_retries=0, timeout=120, **options)

    def openai_as(self, key: str) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=120)

    def settle(self) -> None:
        """Wait until what was cached has been written: a hit on a busy machine may come before that."""
        assert self.service.store is not None
        self.service.store.flush()

    @property
    def used_bytes(self) -> int:
        return self.service.model.arena.used_bytes


def typed(method: Any, **options: Any) -> Any:
    """Call a method of a client: what its version has no argument for goes into the body as it is."""
    known = inspect.signature(method).parameters
    more = {name: value for name, value in options.items() if name not in known}
    body = {**options.get("extra_body", {}), **more}
    given = {name: value for name, value in options.items() if name in known and name != "extra_body"}
    return method(**given, extra_body=body or None)


def diagnostics(message: Any) -> Any:
    """As JSON; None if there are none."""
    return message.to_dict().get("diagnostics")


def tool_model() -> Model:
    """A tiny Llama whose template has tools."""
    model = tiny.ready("llama")
    model.tokenizer.chat_template = TOOL_TEMPLATE
    return model


@contextmanager
def running(
    model: Model,
    policy: str = "full",
    *,
    limits: Limits | None = None,
    key: str = "any",
    disk: Path | None = None,
    redis: str | None = None,
    secret: bytes = b"",
    clock: Clock | None = None,
    on_done: OnDone = lambda trace: None,
    **settings: Any,
) -> Iterator[Running]:
    """Everything is closed at the end, and every page is back."""
    clock = clock or Clock()
    tiers: list[ByteTier] = [HostTier(64 << 20, clock=clock)]
    tiers += [] if disk is None else [DiskTier(disk, 64 << 20, clock=clock)]
    tiers += [] if redis is None else [RedisTier(redis, clock=clock)]
    device = DeviceTier(8 << 20, clock=clock)
    store = PrefixStore(tiers, device=device, chunk_len=CHUNK_LEN, secret=secret, clock=clock)
    settings = {"cache_min_tokens": 32, "point_tokens": 32, "temperature": 0.0, "clock": clock, **settings}
    chosen = Settings(("tiny", "tiny-too"), limits or Limits(), **settings)
    with service_of(model, policy, chosen, store) as service:
        server = Server(service, on_done)
        thread = Thread(target=server.run, daemon=True)
        thread.start()
        while not server.started:
            assert thread.is_alive()
        try:
            yield Running(service, server.servers[0].sockets[0], clock, key)
        finally:
            server.should_exit = True
            thread.join()
    gc.collect()
    assert model.arena.used_bytes == 0
