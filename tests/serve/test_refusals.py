"""A server whose Redis reads and refuses to change anything: bad entries are misses, and everybody is served."""

from __future__ import annotations

from typing import Any

import pytest

from tests.serve.running import Clock, Running, running, tool_model
from tests.store.servers import RedisServer

LONG = "the cat sat on the mat and looked at the other cat that sat there " * 3


def ask(server: Running, **marker: Any) -> Any:
    blocks: Any = [{"type": "text", "text": LONG, **marker}, {"type": "text", "text": "who?"}]
    client = server.anthropic.with_options(timeout=60)
    return client.messages.create(model="tiny", max_tokens=12, messages=[{"role": "user", "content": blocks}])


@pytest.mark.parametrize(
    ("how", "position", "policy"),
    [("replica", 40, "full"), ("replica", -1, "full"), ("acl", 40, "keydiff + 80tok"), ("acl", -1, "keydiff + 80tok")],
)
def test_a_bad_entry_that_cannot_be_deleted_is_a_miss_and_others_are_served(
    redis_server: RedisServer, how: str, position: int, policy: str
) -> None:
    clock, marker = Clock(), {"cache_control": {"type": "ephemeral"}}
    with running(tool_model(), policy, redis=redis_server.url, clock=clock) as server:
        before = ask(server, **marker)
        plain = ask(server)
    assert redis_server.flip(position) > 0
    with running(tool_model(), policy, redis=redis_server.refuse(how), clock=clock) as server:
        for was_read in (False, True):
            found = ask(server, **marker)
            assert found.content[0].text == before.content[0].text
            assert bool(found.usage.cache_read_input_tokens) == was_read
            server.settle()
        assert ask(server).content[0].text == plain.content[0].text
        counters = server.service.store.counters() if server.service.store is not None else {}
        assert sum(count for name, count in counters.items() if name.startswith("quarantined.redis")) > 0
