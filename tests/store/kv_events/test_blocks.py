"""What routers are told of a store's blocks is what its tiers hold, whatever is stored, evicted, damaged or found."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvfold.models.loader import Model
from kvfold.policy.policy import Policy
from kvfold.store import DeviceTier, DiskTier, HostTier, PrefixStore
from kvfold.store.key import Key, chunk_keys, digest_text
from kvfold.store.prefixes import Prefixes
from kvfold.store.tiers.base import ByteTier
from kvfold.testing.prefix_reuse import prefill_reusing
from tests.store.common import CHUNK, entry_files, make_prefixes, make_runner, overwrite
from tests.store.kv_events.router import Router
from tests.tiny import prompt

TOKENS = prompt(4 * CHUNK + 3)
SNAPSHOTS = "knorm + 2x + int8"


def open_store(tiers: Sequence[ByteTier], device_bytes: int = 1 << 24) -> tuple[PrefixStore, Router]:
    store, router = PrefixStore(tiers, device=DeviceTier(device_bytes), chunk_len=CHUNK), Router()
    store.publish_blocks(router.hear)
    return store, router


def read(model: Model, prefixes: Prefixes, tokens: Sequence[int], markers: Sequence[int] | None = None) -> int:
    found = prefill_reusing(make_runner(model), prefixes, tokens, markers=markers)
    found.sequence.release()
    return found.matched_tokens


def digests(prefixes: Prefixes, tokens: Sequence[int]) -> list[bytes]:
    return [bytes.fromhex(key.digest) for key in chunk_keys(prefixes.binding.scope, tokens, CHUNK)]


def whole(keys: Sequence[Key]) -> set[bytes]:
    return {bytes.fromhex(key.digest) for key in keys if key.num_tokens == CHUNK}


def test_blocks_have_their_tokens_parents_policy_and_tenant(model: Model, tmp_path: Path) -> None:
    store, router = open_store([HostTier(1 << 24), DiskTier(tmp_path, 1 << 24)])
    with store:
        prefixes = make_prefixes(store, model, tenant="red")
        read(model, prefixes, TOKENS, [4 * CHUNK + 2])
        assert store.flush()
        expected = digests(prefixes, TOKENS)
        assert set(router.blocks) == {"GPU", "CPU", "STORAGE"} and router.num_cleared == 1
        for medium, blocks in router.blocks.items():
            assert list(blocks) == expected, "the part behind the last whole block is no block"
            assert router.prompt(medium, expected[-1]) == TOKENS[: 4 * CHUNK]
        assert router.extra == {("kvfold", Policy.parse("full").fingerprint, digest_text("red"))}


def test_snapshots_are_told_under_the_original_tokens_and_share_blocks(model: Model) -> None:
    host = HostTier(1 << 24)
    store, router = open_store([host])
    with store:
        prefixes = make_prefixes(store, model, SNAPSHOTS)
        longer = TOKENS[: 2 * CHUNK + 3] + prompt(60, seed=4)
        read(model, prefixes, TOKENS, [3 * CHUNK + 1])
        read(model, prefixes, longer, [2 * CHUNK + 1, 5 * CHUNK])
        assert store.flush()
        first, second = digests(prefixes, TOKENS), digests(prefixes, longer)
        assert first[:2] == second[:2] and first[2] != second[2]
        assert set(router.blocks["CPU"]) == set(router.blocks["GPU"]) == {*first[:3], *second[:5]}
        assert router.prompt("CPU", second[4]) == longer[: 5 * CHUNK]
        assert store.device is not None
        while store.device.shrink():
            pass
        assert router.blocks["GPU"] == {}
        (key,) = [key for key in list(host.keys()) if key.end == 3 * CHUNK + 1]
        host.delete(key)
        host.emit("evicted", key, 0, "space")
        assert set(router.blocks["CPU"]) == set(second[:5])


@pytest.mark.parametrize("seed", range(3))
def test_routers_know_what_small_tiers_hold(model: Model, tmp_path: Path, seed: int) -> None:
    """Prompts with common beginnings, in tiers of a few entries each."""
    rng = random.Random(seed)
    host, disk = HostTier(40_000), DiskTier(tmp_path, 60_000)
    store, router = open_store([host, disk], device_bytes=60_000)
    with store:
        prefixes, stems = make_prefixes(store, model), [prompt(3 * CHUNK, seed=number) for number in range(3)]
        for step in range(30):
            stem = rng.choice(stems)[: CHUNK * rng.randint(0, 3)]
            read(model, prefixes, stem + prompt(rng.randint(2, 3 * CHUNK), seed=100 + rng.randrange(8)))
            if rng.random() < 0.2 and store.device is not None:
                store.device.shrink()
            assert store.flush() and store.device is not None
            held = {"GPU": list(store.device.keys()), "CPU": list(host.keys()), "STORAGE": list(disk.keys())}
            for medium, keys in held.items():
                assert set(router.blocks.get(medium, {})) == whole(keys), (step, medium)
        evicted = {name.rpartition(".")[0] for name in store.counters() if name.startswith("evicted.")}
        assert evicted == {"evicted.device", "evicted.host", "evicted.disk"}


def test_a_disk_from_before_is_told_at_its_first_hit_and_damage_is_removed(model: Model, tmp_path: Path) -> None:
    with PrefixStore([DiskTier(tmp_path, 1 << 24)], chunk_len=CHUNK) as before:
        read(model, make_prefixes(before, model), TOKENS)
    for is_damaged in (False, True):
        store, router = open_store([DiskTier(tmp_path, 1 << 24)])
        with store:
            prefixes = make_prefixes(store, model)
            assert router.blocks == {}
            assert read(model, prefixes, TOKENS) == (2 * CHUNK if is_damaged else 4 * CHUNK)
            assert store.flush()
            assert set(router.blocks["STORAGE"]) == set(digests(prefixes, TOKENS)), "what was damaged is written again"
        (third,) = [path for path in entry_files(tmp_path) if path.name.startswith(f"{2 * CHUNK:x}-")]
        overwrite(third, third.read_bytes()[:-1] + b"\xff")


def test_files_that_somebody_deleted_are_removed_by_the_next_lookup(model: Model, tmp_path: Path) -> None:
    store, router = PrefixStore([DiskTier(tmp_path, 1 << 24)], chunk_len=CHUNK), Router()
    store.publish_blocks(router.hear)
    with store:
        prefixes = make_prefixes(store, model)
        read(model, prefixes, TOKENS)
        assert store.flush()
        (second,) = [path for path in entry_files(tmp_path) if path.name.startswith(f"{CHUNK:x}-")]
        second.unlink()
        hit = prefixes.lookup(TOKENS)
        hit.sequence.release()
        assert hit.matched_tokens == CHUNK and list(router.blocks["STORAGE"]) == digests(prefixes, TOKENS)[:1]


class FarTier(HostTier):
    """Shared by machines, as Redis is."""

    name = "far"
    is_shared = True


def test_tiers_that_machines_share_are_not_told(model: Model) -> None:
    store, router = PrefixStore([FarTier(1 << 24)], chunk_len=CHUNK), Router()
    store.publish_blocks(router.hear)
    with store:
        read(model, make_prefixes(store, model), TOKENS)
        assert store.flush() and store.counters()["stored.far"] == 4
    assert router.blocks == {}
