"""A server in front of an engine, on a free port; kvfold's own server is an engine that every machine has."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import closing, contextmanager
from threading import Thread
from typing import Any

import anthropic
import openai

from kvfold.policy.policy import Policy
from kvfold.serve.remote.http import EngineHttp
from kvfold.serve.remote.packer import Packer
from kvfold.serve.remote.service import EngineFacts, RemoteService
from kvfold.serve.server import Server
from kvfold.serve.settings import Limits, Settings
from tests.serve.running import Clock


class Front:
    """Clients of a running server."""

    def __init__(self, service: RemoteService, port: int, clock: Clock) -> None:
        self.service, self.port, self.clock = service, port, clock
        self.url = f"http://127.0.0.1:{port}"
        self.anthropic = anthropic.Anthropic(base_url=self.url, api_key="any", max_retries=0, timeout=300)
        self.openai = openai.OpenAI(base_url=f"{self.url}/v1", api_key="any", max_retries=0, timeout=300)


@contextmanager
def fronting(
    engine: str,
    tokenizer: Any,
    policy: str = "full",
    packer: Packer | None = None,
    *,
    facts: EngineFacts | None = None,
    key: str | None = None,
    **settings: Any,
) -> Iterator[Front]:
    http, clock = EngineHttp(engine, key), Clock()
    facts = facts or asyncio.run(EngineFacts.ask(http))
    known = {"cache_min_tokens": 32, "point_tokens": 32, "temperature": 0.0, "clock": clock, **settings}
    chosen = Settings(("tiny",), Limits(), **known)
    with closing(RemoteService(tokenizer, facts, http, Policy.parse(policy), chosen, packer)) as service:
        server = Server(service, lambda trace: None)
        thread = Thread(target=server.run, daemon=True)
        thread.start()
        while not server.started:
            assert thread.is_alive()
        try:
            yield Front(service, server.servers[0].sockets[0].getsockname()[1], clock)
        finally:
            server.should_exit = True
            thread.join()
