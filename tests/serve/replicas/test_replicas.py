"""`kvfold serve --replicas 2` from the shell: both vendors' clients, kills, signals, a bad disk, a Redis that goes."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.request import urlopen

import anthropic
import openai
import pytest

from tests.serve.asking import until
from tests.serve.replicas.command import Command, is_alive, serving, tiny_folder
from tests.store.common import entry_files, overwrite
from tests.store.servers import RedisServer

LONG = "the cat sat on the mat and looked at the other cat that sat there "


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("disk")


@pytest.fixture(scope="module")
def server(model: Path, disk: Path) -> Iterator[Command]:
    options = ("--replicas", "2", "--disk", str(disk), "--disk-size", "64MB")
    with serving(model, *options, log=disk / "log") as found:
        yield found


def get(server: Command, path: str) -> Any:
    with urlopen(f"{server.url}{path}", timeout=60) as answer:
        return json.loads(answer.read())


def test_clients_of_both_vendors_see_one_server(server: Command) -> None:
    hello: Any = {"model": "tiny", "messages": [{"role": "user", "content": "the cat"}], "max_tokens": 4}
    whole = server.anthropic.messages.create(**hello)
    with server.anthropic.messages.stream(**hello) as stream:
        streamed = stream.get_final_message()
    assert whole.content[0].to_dict() == streamed.content[0].to_dict()
    chat = server.openai.chat.completions.create(**hello)
    chunks = list(server.openai.chat.completions.create(**hello, stream=True))
    assert chat.choices[0].message.content == "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert server.openai.responses.create(model="tiny", input="the cat", max_output_tokens=4).status == "incomplete"
    assert [one.id for one in server.openai.models.list()] == ["tiny"]
    with pytest.raises(anthropic.NotFoundError, match="is not served here"):
        server.anthropic.messages.create(**{**hello, "model": "other"})
    with pytest.raises(openai.BadRequestError, match="n: only 1 is supported"):
        server.openai.chat.completions.create(**hello, n=2)


def test_turns_of_a_conversation_are_hits_and_the_dashboard_counts_all(server: Command) -> None:
    before = get(server, "/dashboard/state")["done"]
    where = []
    for i in range(6):
        (cold, first), (warm, second) = server.ask(f"{i} {LONG * 3}"), server.ask(f"{i} {LONG * 3}", "where?")
        assert first == second
        assert warm.usage.cache_read_input_tokens == cold.usage.cache_creation_input_tokens > 0
        where.append(first)
    assert set(where) == {0, 1}
    state = get(server, "/dashboard/state")
    assert (state["done"] - before, state["lookups"]["hit"]) == (12, 6)
    assert state["first_token_ms"]["num_samples"] == state["done"]
    kept = get(server, f"/dashboard/kept/{state['requests'][0]['request']}")
    assert kept["num_tokens"] == state["requests"][0]["tokens_in"]


def test_a_kill_loses_no_request_and_a_damaged_entry_is_a_miss(server: Command, disk: Path) -> None:
    cold, where = server.ask("killed " + LONG * 3)
    folder = disk / f"replica-{where}"
    until(lambda: len(entry_files(folder)) > 0)
    pid = server.replicas[where]
    results: list[int] = []

    def count(number: int) -> None:
        results.append(len(server.ask(f"{number} go " + LONG)[0].content))

    threads = [Thread(target=count, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    os.kill(pid, signal.SIGKILL)
    for path in entry_files(folder):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        overwrite(path, bytes(data))
    for thread in threads:
        thread.join()
    assert results == [1] * 8
    until(lambda: len(server.replicas) == 2 and server.replicas[where] != pid)
    until(lambda: get(server, "/health")["status"] == "ok")
    again, number = server.ask("killed " + LONG * 3)
    assert (number, again.content[0].to_dict()) == (where, cold.content[0].to_dict())
    assert server.ask("killed " + LONG * 3)[0].usage.cache_read_input_tokens > 0, "it was stored again"


def test_a_stream_ends_in_full_before_the_server_does(model: Path, tmp_path: Path) -> None:
    with serving(model, "--replicas", "2", "--shutdown-timeout", "30", log=tmp_path / "log") as server:
        pids = server.replicas
        hello: Any = {"model": "tiny", "messages": [{"role": "user", "content": "the cat"}], "max_tokens": 200}
        stream = server.anthropic.messages.create(**hello, stream=True)
        events = iter(stream)
        kinds = [next(events).type]
        server.process.send_signal(signal.SIGTERM)
        kinds += [event.type for event in events]
        assert kinds[-1] == "message_stop"
        assert server.process.wait(60) == 0
        assert not any(map(is_alive, pids))


@pytest.mark.parametrize("how", ["twice", "kill"])
def test_no_replica_outlives_its_parent(model: Path, tmp_path: Path, how: str) -> None:
    with serving(model, "--replicas", "2", "--shutdown-timeout", "600", log=tmp_path / "log") as server:
        pids = server.replicas
        hello: Any = {"model": "tiny", "messages": [{"role": "user", "content": "the cat"}], "max_tokens": 1000}
        stream = server.anthropic.messages.create(**hello, stream=True)
        next(iter(stream))
        if how == "kill":
            server.process.kill()
            stream.close()
        else:
            server.process.send_signal(signal.SIGINT)
            server.process.send_signal(signal.SIGTERM)  # of two that are the same and pending, one would be lost
            assert server.process.wait(60) in (128 + signal.SIGINT, 128 + signal.SIGTERM)
        until(lambda: not any(map(is_alive, pids)))


def test_a_prefix_of_another_replica_is_loaded_from_redis_and_redis_may_go(
    model: Path, tmp_path: Path, redis_server: RedisServer
) -> None:
    with serving(model, "--replicas", "2", "--redis", redis_server.url, log=tmp_path / "log") as server:
        cold, where = server.ask(LONG * 3)
        until(lambda: bool(redis_server.ask("KEYS", "kvfold:*")))
        os.kill(server.replicas[where], signal.SIGKILL)
        warm, other = server.ask(LONG * 3)
        assert other != where
        assert warm.usage.cache_read_input_tokens == cold.usage.cache_creation_input_tokens > 0
        assert warm.content[0].to_dict() == cold.content[0].to_dict()
        until(lambda: get(server, "/health")["status"] == "ok")
        assert redis_server.flip(40) > 0
        again, _ = server.ask(LONG * 3)
        assert again.content[0].to_dict() == cold.content[0].to_dict(), "a damaged entry is a miss"
        redis_server.kill()
        assert server.ask("other " + LONG * 3)[0].usage.cache_creation_input_tokens > 0
        assert server.ask("other " + LONG * 3)[0].usage.cache_read_input_tokens > 0


def test_a_replica_that_cannot_start_is_told_once(model: Path, tmp_path: Path) -> None:
    (tmp_path / "broken").mkdir()
    with (
        pytest.raises(AssertionError, match="error"),
        serving(tmp_path / "broken", "--replicas", "2", log=tmp_path / "log"),
    ):
        pass
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert [line["event"][:9] for line in lines if line["level"] == "error"][-1] == "replica 0"
    assert sum("broken" in line["event"] for line in lines if line["level"] == "error") == 1
