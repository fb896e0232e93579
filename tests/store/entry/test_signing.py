"""A shared tier that others write to: with a secret, what they forge is a miss; without it, it is believed."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path
from time import time

import pytest
import torch
from safetensors.torch import load, save

from kvfold.errors import FileError, InputError
from kvfold.models.loader import Model
from kvfold.store import PrefixStore, RedisTier
from kvfold.store.entry.format import VARIABLE, read_secret
from kvfold.store.inspect import RedisInspector
from kvfold.store.markers import CacheMarkers, Marker
from kvfold.testing.prefix_reuse import prefill_reusing
from tests.store.common import CHUNK, cold_logits, make_prefixes, make_runner
from tests.store.servers import RedisServer
from tests.tiny import prompt

TOKENS = prompt(3 * CHUNK + 5)
SECRET = b"0123456789abcdef"


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=32).hexdigest()


def forged(data: bytes) -> bytes:
    """An entry with other tensors and a longer life, whose digests agree with them, as anybody can write it."""
    preamble = struct.Struct("<8sHxxIIQ")
    magic, revision, ttl_s, header_bytes, saved_us = preamble.unpack_from(data)
    header = json.loads(data[28 : 28 + header_bytes])
    rest, blocks, listed = data[28 + header_bytes + 32 :], b"", []
    for name, size, _ in header["blocks"]:
        block, rest = rest[:size], rest[size:]
        block = save({key: torch.zeros_like(tensor) for key, tensor in load(block).items()})
        listed.append((name, len(block), _digest(block)))
        blocks += block
    text = json.dumps({**header, "blocks": listed}).encode()
    head = preamble.pack(magic, revision, 10 * ttl_s, len(text), saved_us) + text
    return head + bytes.fromhex(_digest(head)) + blocks


def forge(server: RedisServer) -> int:
    """Every entry; returns how many there are."""
    names = server.ask("KEYS", "kvfold:*")
    for name in names:
        server.ask("SET", name, forged(server.ask("GET", name)), "KEEPTTL")
    return len(names)


def open_store(server: RedisServer, secret: bytes) -> PrefixStore:
    return PrefixStore([RedisTier(server.url)], chunk_len=CHUNK, secret=secret)


@pytest.mark.parametrize("secret", [SECRET, b""])
def test_what_is_forged_is_a_miss_where_there_is_a_secret(
    model: Model, redis_server: RedisServer, secret: bytes
) -> None:
    with open_store(redis_server, secret) as store:
        prefill_reusing(make_runner(model), make_prefixes(store, model), TOKENS).sequence.release()
    assert forge(redis_server) == 3
    with open_store(redis_server, secret) as store:
        read = prefill_reusing(make_runner(model), make_prefixes(store, model), TOKENS)
        read.sequence.release()
        assert torch.equal(read.logits_V, cold_logits(model, TOKENS)) == bool(secret)
        assert read.matched_tokens == (0 if secret else 3 * CHUNK)
        assert store.counters().get("quarantined.redis.corrupt", 0) == bool(secret)


@pytest.mark.parametrize("secret", [SECRET, b""])
def test_a_forged_mark_is_a_miss_where_there_is_a_secret(
    model: Model, redis_server: RedisServer, secret: bytes
) -> None:
    marker = Marker(40, bytes(range(32)))
    with open_store(redis_server, secret) as store:
        CacheMarkers(store, make_prefixes(store, model).binding).write(marker, 300.0, time())
    assert forge(redis_server) == 1
    with open_store(redis_server, secret) as store:
        found = CacheMarkers(store, make_prefixes(store, model).binding).find(marker, time())
        assert found == (None if secret else 3000)
        assert store.counters().get("quarantined.redis.corrupt", 0) == bool(secret)


def test_stores_of_different_secrets_leave_each_others_entries_alone(model: Model, redis_server: RedisServer) -> None:
    """So a secret can be changed, one server after the other."""
    secrets = (b"", SECRET, SECRET[::-1])
    for expected in (0, 3 * CHUNK):
        for secret in secrets:
            with open_store(redis_server, secret) as store:
                read = prefill_reusing(make_runner(model), make_prefixes(store, model), TOKENS)
                read.sequence.release()
                assert read.matched_tokens == expected
                assert not [name for name in store.counters() if name.startswith("quarantined")]


def test_a_view_tells_what_was_signed_otherwise(model: Model, redis_server: RedisServer) -> None:
    with open_store(redis_server, SECRET) as store:
        prefill_reusing(make_runner(model), make_prefixes(store, model), TOKENS).sequence.release()
    for secret, expected in ((SECRET, {None}), (b"", {"unsigned"}), (SECRET[::-1], {"unsigned"})):
        inspector = RedisInspector(redis_server.url, secret)
        errors = [inspector.check(one.key) for one in inspector.find()]
        assert len(errors) == 3 and {error and error.reason for error in errors} == expected
        inspector.close()


def test_a_secret_is_read_from_a_file_or_a_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "secret"
    path.write_bytes(SECRET + b"\n")
    monkeypatch.delenv(VARIABLE, raising=False)
    assert (read_secret(None), read_secret(path)) == (b"", SECRET)
    monkeypatch.setenv(VARIABLE, "abcdef0123456789")
    assert (read_secret(None), read_secret(path)) == (b"abcdef0123456789", SECRET)
    for bad in ("", "too short", "x" * 65):
        monkeypatch.setenv(VARIABLE, bad)
        with pytest.raises(InputError, match=f"the secret in {VARIABLE} has {len(bad)} bytes"):
            read_secret(None)
    with pytest.raises(FileError, match="cannot be read"):
        read_secret(tmp_path / "nowhere")
    with pytest.raises(InputError, match="has 3 bytes; give 16 to 64"):
        PrefixStore([], secret=b"abc")
