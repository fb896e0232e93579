"""KV events of a running server and of two replicas: a router learns where a prompt is cached."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.request import urlopen

import msgspec

from kvfold.serve.kv_events import KvEventsConfig, publish_blocks, publisher_of
from kvfold.store.kv_events.messages import BlockRemoved, EventBatch
from tests.serve.asking import get, send, until
from tests.serve.replicas.command import serving, tiny_folder
from tests.serve.running import CHUNK_LEN, running, tool_model
from tests.store.kv_events.router import Router, replay

ANY = "tcp://127.0.0.1:0"


def learn(replay_endpoint: str) -> tuple[Router, list[int | None]]:
    """What a router knows that has read everything, and the ranks of the batches."""
    router, ranks = Router(), list[int | None]()
    for _, _, payload in replay(replay_endpoint, 0):
        batch = msgspec.msgpack.decode(payload, type=EventBatch)
        ranks.append(batch.data_parallel_rank)
        for event in batch.events:
            router.hear(event)
    return router, ranks


def test_a_router_learns_the_tokens_of_a_marked_prompt() -> None:
    with publisher_of(KvEventsConfig(ANY, ANY)) as publisher, running(tool_model()) as server:
        assert publisher is not None
        publish_blocks(server.service, publisher)
        usage = send(server).usage
        server.settle()
        until(lambda: len(learn(publisher.endpoints[1])[0].blocks) == 2)
        router, ranks = learn(publisher.endpoints[1])
        for medium in ("GPU", "CPU"):
            assert len(router.blocks[medium]) == usage.cache_creation_input_tokens // CHUNK_LEN > 5
            last = list(router.blocks[medium])[-1]
            assert "the cat sat on the mat" in server.service.model.tokenizer.decode(router.prompt(medium, last))
        assert set(ranks) == {0}
        lines = get(server, "/metrics")[1].splitlines()
        (published,) = [line for line in lines if line.startswith("kvfold_kv_events_total ")]
        assert float(published.split()[1]) == publisher.num_published and "kvfold_kv_events_dropped_total 0" in lines


def test_replicas_publish_side_by_side(tmp_path: Path) -> None:
    """At addresses of their own, in blocks of 256 tokens, each what it holds itself."""
    folder = tiny_folder(tmp_path)
    options = ("--kv-events", f"ipc://{tmp_path}/events", "--kv-events-replay", f"ipc://{tmp_path}/replay")
    with serving(folder, "--replicas", "2", *options, log=tmp_path / "log") as server:
        asked: dict[int, Any] = {}
        for number in range(20):
            text = f"{number} " + "the cat sat on the mat and looked at the other cat " * 8
            _, where = server.ask(text)
            asked.setdefault(where, text)
            if len(asked) == 2:
                break
        endpoints = [f"ipc://{tmp_path}/replay", f"ipc://{tmp_path}/replay-1"]
        until(lambda: all("CPU" in learn(endpoint)[0].blocks for endpoint in endpoints))
        with urlopen(f"{server.url}/metrics", timeout=60) as answer:
            text = answer.read().decode()
    assert "kvfold_kv_events_total" in text
    assert set(asked) == {0, 1}


def test_the_subscriber_of_the_docs_hears_events(tmp_path: Path) -> None:
    """It is one from the moment on at which it has connected, so events are sent until it hears one."""
    page = (Path(__file__).parents[2] / "docs" / "replicas.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    exec(page.split("```python\n")[1].split("```")[0], names)
    heard: list[Any] = []

    def subscribe(address: str) -> None:
        events = names["kv_events"](address)
        heard.append(next(events))
        events.close()

    with publisher_of(KvEventsConfig(f"ipc://{tmp_path}/e"), 3) as publisher:
        assert publisher is not None
        Thread(target=subscribe, args=(publisher.endpoints[0],), daemon=True).start()
        publish = partial(publisher.publish, BlockRemoved([b"digest"], "CPU"))

        def is_heard() -> bool:
            publish()
            return bool(heard)

        until(is_heard)
    number, replica, event = heard[0]
    assert event == {"type": "BlockRemoved", "block_hashes": [b"digest"], "medium": "CPU"}
    assert replica == 3 and 0 <= number < publisher.num_published


def test_ports_of_replicas_follow_each_other() -> None:
    config = KvEventsConfig("tcp://127.0.0.1:5557", "tcp://[::1]:6000")
    third = config.of_replica(2)
    assert (third.endpoint, third.replay_endpoint) == ("tcp://127.0.0.1:5559", "tcp://[::1]:6002")
    assert config.of_replica(0) == config
    assert KvEventsConfig("ipc:///a").of_replica(1).endpoint == "ipc:///a-1"
    config.check(400)
    KvEventsConfig("tcp://*:5557", is_remote=True).check(2)
