"""A request that has to wait: its prefix travels from the disk to the host meanwhile."""

from __future__ import annotations

from pathlib import Path
from threading import Event, Thread

from kvfold.engine.scheduling.jobs import Job
from kvfold.serve.cache.source import PlainSource
from tests.serve.running import Running, running, tool_model
from tests.serve.test_restart import ask


def occupy(server: Running) -> tuple[Event, Event]:
    """A reply that stops the scheduler with its first event: (it has, it may go on)."""
    stopped, released = Event(), Event()

    def listen(event: object) -> None:
        stopped.set()
        released.wait()

    service = server.service
    service.acquire_slot("another")
    source = PlainSource(service.new_sequence, 3)
    service.scheduler.submit(Job([1, 2, 3], source, listen, max_new_tokens=2))
    return stopped, released


def test_the_prefix_of_a_request_in_line_comes_to_the_host(tmp_path: Path) -> None:
    with running(tool_model(), disk=tmp_path) as server:
        ask(server)
        server.settle()
    with running(tool_model(), disk=tmp_path) as server:
        store = server.service.store
        assert store is not None
        arrived = Event()
        store.subscribe(lambda event: arrived.set() if event.kind == "promoted" else None)
        stopped, released = occupy(server)
        stopped.wait()
        asking = Thread(target=ask, args=(server,))
        asking.start()
        try:
            assert arrived.wait(60), "nothing travels while the scheduler stands still"
            store.flush()
        finally:
            released.set()
            asking.join()
        assert "hit.host" in store.counters() and "hit.disk" not in store.counters()
