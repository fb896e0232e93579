"""Requests that start together: all write, and the later ones do not compute again what the first has stored."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvfold.engine.runner import Runner
from kvfold.engine.scheduling.jobs import Job, PrefillDone
from kvfold.engine.scheduling.scheduler import Scheduler
from kvfold.engine.scheduling.task import Task
from kvfold.models.loader import Model
from kvfold.policy.policy import Policy
from kvfold.serve.cache.breakpoints import Boundary, CachePlan, CacheWrite
from kvfold.serve.cache.source import CachedSource, PromptCache
from kvfold.serve.cache.usage import Usage
from kvfold.store import DiskTier, HostTier, PrefixStore
from kvfold.store.markers import CacheMarkers
from tests import tiny
from tests.engine.jobs import Heard
from tests.store.common import overwrite


def now() -> float:
    return 1.0


def test_an_entry_can_be_read_once_the_reply_that_writes_it_begins(model: Model) -> None:
    runner = Runner(model.hf, model.spec, model.arena, chunk_len=16)
    tokens, boundary = tiny.prompt(60), Boundary(48, bytes(32), "messages")
    plan = CachePlan([boundary], [boundary], [CacheWrite(boundary, 300.0)])
    with PrefixStore([HostTier(1 << 20, clock=now)], chunk_len=16, clock=now) as store:
        prefixes = store.prefixes(model, "full", prefill_len=16)
        cache = PromptCache(prefixes, CacheMarkers(store, prefixes.binding))
        first, second, third = (CachedSource(cache, tokens, plan, 0.0, now) for _ in range(3))
        begun = [source.begin() for source in (first, second)]
        assert [(one.num_read, list(one.cuts or ())) for one in begun] == [(0, [48]), (0, [48])]
        assert first.usage == second.usage == Usage(0, 0, 48, 12)
        for source, one in zip((first, second), begun, strict=True):
            runner.prefill([one.sequence], [tokens[:48]])
            source.reached(one.sequence, 48)
            one.sequence.release()
        store.flush()
        third_begun = third.begin()
        assert (third.usage, third.miss) == (Usage(0, 0, 48, 12), "absent")
        assert third_begun.num_read == 48, "tensors that are stored already save the work"
        third_begun.sequence.release()
        first.began()
        last = third.begin()
        assert (third.usage, third.miss, last.num_read) == (Usage(48, 0, 0, 12), None, 48)
        last.sequence.release()


def test_a_part_that_is_lost_alone_is_computed_and_stored_again(model: Model) -> None:
    """The request is a hit all the same, as far as whole chunks are there."""
    runner = Runner(model.hf, model.spec, model.arena, chunk_len=16)
    tokens, boundary = tiny.prompt(60), Boundary(53, bytes(32), "messages")
    plan, host = CachePlan([boundary], [boundary], [CacheWrite(boundary, 300.0)]), HostTier(1 << 20, clock=now)
    with PrefixStore([host], chunk_len=16, clock=now) as store:
        prefixes = store.prefixes(model, "full", prefill_len=16)
        cache, found = PromptCache(prefixes, CacheMarkers(store, prefixes.binding)), list[tuple[int, int]]()
        for _ in range(3):
            source = CachedSource(cache, tokens, plan, 0.0, now)
            begun = source.begin()
            found.append((begun.num_read, source.usage.num_read))
            if begun.num_read < 53:
                runner.prefill([begun.sequence], [tokens[begun.num_read : 53]])
                source.reached(begun.sequence, 53)
            source.began()
            begun.sequence.release()
            assert store.flush()
            if len(found) == 1:
                (part,) = filter(lambda key: (key.start, key.end) == (48, 53), host.keys())
                host.delete(part)
        assert found == [(0, 0), (48, 48), (53, 53)]


@pytest.mark.parametrize(("prefill_len", "loses"), [(16, None), (32, None), (48, None), (16, 64), (16, 32)])
def test_a_hit_is_the_cold_request(model: Model, prefill_len: int, loses: int | None) -> None:
    """However long the pieces are in which a prompt is read, up to rounding; bitwise where what is lost of it is read
    in the pieces of the cold one, since these end with stored chunks."""
    runner, tokens = Runner(model.hf, model.spec, model.arena, chunk_len=prefill_len), tiny.prompt(100)
    boundaries = [Boundary(37, bytes(32), "system"), Boundary(75, bytes([1] * 32), "messages")]
    plan = CachePlan(boundaries, boundaries[::-1], [CacheWrite(boundary, 300.0) for boundary in boundaries])
    host = HostTier(1 << 20, clock=now)
    with PrefixStore([host], chunk_len=16, clock=now) as store:
        prefixes = store.prefixes(model, "full", prefill_len=prefill_len)
        cache, found = PromptCache(prefixes, CacheMarkers(store, prefixes.binding)), []
        for _ in range(2):
            task = Task(
                Job(tokens, CachedSource(cache, tokens, plan, 0.0, now), lambda event: None),
                runner,
                model.tokenizer,
                in_chunks=True,
            )
            while task.is_prefilling:
                task.prefill(lambda: False)
            found.append((task.num_reused, task.output.request.logits_V))
            task.end("cancelled")
            assert store.flush()
            for key in filter(lambda key: key.start == loses, host.keys()):
                host.delete(key)
        (_, cold_V), (num_reused, warm_V) = found
        assert num_reused == (75 if loses is None else loses)
        torch.testing.assert_close(warm_V, cold_V, rtol=1e-4, atol=1e-4)
        assert loses is None or torch.equal(warm_V, cold_V)


@pytest.mark.parametrize("start", [0, 32])
def test_a_prefix_that_is_lost_while_the_model_runs_is_a_miss(model: Model, tmp_path: Path, start: int) -> None:
    """The last byte of an entry is of its last layer. The reply is the cold one, and nobody is told of an error."""
    tokens, boundary, found = tiny.prompt(60), Boundary(53, bytes(32), "messages"), list[tuple[str, int, str | None]]()
    plan = CachePlan([boundary], [boundary], [CacheWrite(boundary, 300.0)])
    runner = Runner(model.hf, model.spec, model.arena, chunk_len=16)
    with PrefixStore([DiskTier(tmp_path, 1 << 24, clock=now)], chunk_len=16, clock=now) as store:
        prefixes = store.prefixes(model, "full", prefill_len=16)
        cache = PromptCache(prefixes, CacheMarkers(store, prefixes.binding))
        scheduler = Scheduler(runner, Policy.parse("full"), model.tokenizer)
        for _ in range(3):
            source, heard = CachedSource(cache, tokens, plan, 0.0, now), Heard()
            scheduler.submit(Job(tokens, source, heard, max_new_tokens=12))
            assert heard.end().reason == "length" and store.flush()
            (began,) = (event for event in heard.events if isinstance(event, PrefillDone))
            found.append((heard.text, began.num_reused, source.miss))
            if len(found) == 2:
                (path,) = tmp_path.glob(f"entries/{prefixes.binding.scope}/*/{start:x}-*")
                data = path.read_bytes()
                overwrite(path, data[:-1] + bytes([data[-1] ^ 1]))
        scheduler.close()
        assert store.counters()["quarantined.disk.corrupt"] == 1
    (text, *cold), (again, *warm), (last, *lost) = found
    assert (cold, warm, lost) == ([0, "absent"], [53, None], [start, "lost"])
    assert text == again == last


def test_a_prefix_that_is_lost_every_time_is_read_without_the_store(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing is deleted and nothing remembered, a job begins again a few times, not for ever."""
    monkeypatch.setattr("kvfold.store.tiers.tiered_cache.BAD_S", 0.0)
    tokens, boundary = tiny.prompt(60), Boundary(53, bytes(32), "messages")
    plan, host = CachePlan([boundary], [boundary], [CacheWrite(boundary, 300.0)]), HostTier(1 << 20, clock=now)
    monkeypatch.setattr(host, "delete", lambda key: None)
    runner, found = Runner(model.hf, model.spec, model.arena, chunk_len=16), list[tuple[str, int, str | None]]()
    with PrefixStore([host], chunk_len=16, clock=now) as store:
        prefixes = store.prefixes(model, "full", prefill_len=16)
        cache = PromptCache(prefixes, CacheMarkers(store, prefixes.binding))
        scheduler = Scheduler(runner, Policy.parse("full"), model.tokenizer)
        for _ in range(2):
            source, heard = CachedSource(cache, tokens, plan, 0.0, now), Heard()
            scheduler.submit(Job(tokens, source, heard, max_new_tokens=12))
            assert heard.end().reason == "length" and store.flush()
            (began,) = (event for event in heard.events if isinstance(event, PrefillDone))
            found.append((heard.text, began.num_reused, source.miss))
            scope = prefixes.binding.scope
            host._data = {key: data[:-1] + bytes([data[-1] ^ (key.scope == scope)]) for key, data in host._data.items()}
        scheduler.close()
    (text, *cold), (last, *lost) = found
    assert (cold, lost, text) == ([0, "absent"], [0, "lost"], last)
