"""`kvfold cache` on real folders, a real Redis and a running server."""

from __future__ import annotations

import io
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvfold.serve.auth import key_digest
from kvfold.store.entry.format import VARIABLE, encode, signer_of
from kvfold.store.tiers.disk import DiskTier
from kvfold.store.tiers.eviction import Lease
from kvfold.store.tiers.redis import RedisTier
from tests.cli.conftest import Call, Terminal
from tests.store.common import BINDING, CHUNK, entry_files, make_entry, make_key
from tests.store.servers import RedisServer

MARK = {"type": "ephemeral"}
LONG = "the cat sat on the mat and looked at the other cat that sat there "


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    """Three entries, the last one expired."""
    now, folder = time.time(), tmp_path / "disk"
    tier = DiskTier(folder, 1 << 20)
    for number, at in enumerate((now, now, now - 1000)):
        lease = Lease(at, 300, 1.0)
        tier.put(make_key(number), make_entry(make_key(number), lease), lease)
    tier.close()
    return folder


def read(done: Any) -> Any:
    assert done.err == ""
    return json.loads(done.out)


def test_entries_are_listed(call: Call, disk: Path) -> None:
    rows = read(call("cache", "ls", "--disk", disk, "--json"))
    assert {row["digest"] for row in rows} == {make_key(number).digest for number in range(3)}
    assert sorted(row["lives_s"] > 0 for row in rows) == [False, True, True]
    assert {(row["place"], row["start"], row["end"], row["ttl_s"]) for row in rows} == {("disk", 0, CHUNK, 300)}
    assert sum(row["bytes"] for row in rows) == sum(path.stat().st_size for path in entry_files(disk))
    text = call("cache", "ls", "--disk", disk, "--limit", 1).out
    assert "expired" in call("cache", "ls", "--disk", disk).out
    assert "3 entries" in text and "1 shown; --limit 0 shows all" in text


def test_scopes_are_counted_beside_their_owner(call: Call, disk: Path) -> None:
    tier = DiskTier(disk, 1 << 20)
    found = read(call("cache", "stats", "--disk", disk, "--json"))
    (scope,) = found["scopes"]
    assert (scope["entries"], scope["tokens"], scope["expired"], scope["scope"]) == (3, 3 * CHUNK, 1, BINDING.scope)
    assert scope["bound_to"]["weights"] == BINDING.weights
    assert (found["in_use"], found["quarantined"]) == (["disk"], 0)
    assert "a server owns the folder now" in call("cache", "stats", "--disk", disk).out
    tier.close()


def test_damage_is_found_and_set_aside(call: Call, disk: Path) -> None:
    assert call("cache", "verify", "--disk", disk).out == "3 entries checked, 0 bad\n"
    path = entry_files(disk)[0]
    path.write_bytes(path.read_bytes()[:-1])
    done = call("cache", "verify", "--disk", disk, "--json")
    (bad,) = read(done)["bad"]
    assert (done.code, bad["reason"], len(entry_files(disk))) == (1, "truncated", 3)
    done = call("cache", "verify", "--disk", disk, "--quarantine")
    assert (done.code, len(entry_files(disk))) == (1, 2)
    assert "3 entries checked, 1 bad and moved to quarantine" in done.out
    assert read(call("cache", "stats", "--disk", disk, "--json"))["quarantined"] == 1
    assert call("cache", "verify", "--disk", disk).code == 0


def test_signed_entries_are_verified_with_their_secret(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it nobody can tell whether they are good: they are named, and stay where they are."""
    secret, binding, file = b"0123456789abcdef", replace(BINDING, signer=signer_of(b"0123456789abcdef")), tmp_path / "s"
    key, lease, tier = make_key(1, binding=binding), Lease(time.time(), 300, 1.0), DiskTier(tmp_path / "disk", 1 << 20)
    tier.put(key, encode(key, binding, {}, lease, secret), lease)
    tier.close()
    file.write_bytes(secret)
    done = call("cache", "verify", "--disk", tmp_path / "disk", "--quarantine")
    assert done.code == 1 and "unsigned" in done.out and "1 of another secret, not checked" in done.out
    assert len(entry_files(tmp_path / "disk")) == 1
    assert call("cache", "verify", "--disk", tmp_path / "disk", "--store-secret", file).code == 0
    monkeypatch.setenv(VARIABLE, secret.decode())
    assert call("cache", "verify", "--disk", tmp_path / "disk").code == 0
    (scope,) = read(call("cache", "stats", "--disk", tmp_path / "disk", "--json"))["scopes"]
    assert scope["bound_to"]["kind"] == "chunks"


def test_entries_are_cleared(call: Call, disk: Path) -> None:
    assert read(call("cache", "clear", "--disk", disk, "--scope", "none", "--yes", "--json"))["deleted"] == 0
    assert read(call("cache", "clear", "--disk", disk, "--expired", "--yes", "--json"))["deleted"] == 1
    assert "2 entries deleted" in call("cache", "clear", "--disk", disk, "--scope", BINDING.scope[:4], "--yes").out
    assert entry_files(disk) == []


def test_clear_asks_first(call: Call, disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    done = call("cache", "clear", "--disk", disk)
    assert (done.code, done.err.count("\n")) == (2, 1) and "no terminal to ask on; add --yes" in done.err
    for answer, code, num_left in (("\n", 2, 3), ("no\n", 2, 3), ("", 2, 3), ("y\n", 0, 0)):
        monkeypatch.setattr(sys, "stdin", Terminal(answer))
        done = call("cache", "clear", "--disk", disk)
        assert (done.code, len(entry_files(disk))) == (code, num_left)
        assert done.err.startswith("delete 3 entries, ") and "? [y/N] " in done.err


def test_a_folder_that_is_in_use_is_not_changed(call: Call, disk: Path) -> None:
    tier = DiskTier(disk, 1 << 20)
    for words in (("clear", "--yes"), ("verify", "--quarantine")):
        done = call("cache", *words, "--disk", disk)
        assert (done.code, "in use by another store" in done.err) == (2, True)
    assert len(entry_files(disk)) == 3
    tier.close()


def test_redis_and_a_folder_are_shown_together(call: Call, disk: Path, redis_server: RedisServer) -> None:
    tier, lease = RedisTier(redis_server.url), Lease(time.time(), 300, 1.0)
    tier.put(make_key(5), make_entry(make_key(5), lease), lease)
    both = ("--disk", disk, "--redis", redis_server.url)
    assert [row["place"] for row in read(call("cache", "ls", *both, "--json"))] == ["disk"] * 3 + ["redis"]
    assert read(call("cache", "verify", *both, "--json"))["checked"] == 4
    assert [one["place"] for one in read(call("cache", "stats", *both, "--json"))["scopes"]] == ["disk", "redis"]
    assert read(call("cache", "clear", "--redis", redis_server.url, "--yes", "--json"))["deleted"] == 1
    assert len(entry_files(disk)) == 3
    tier.close()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("ls",), "no store is named"),
        (("stats", "--disk", "nowhere"), "nowhere holds no prefix store"),
        (("verify", "--quarantine", "--redis", "unix:///nobody"), "name one"),
        (("warm", "nowhere.jsonl"), "nowhere.jsonl cannot be read"),
        (("explain", "nowhere.json"), "nowhere.json cannot be read as JSON"),
    ],
)
def test_bad_input_is_told_in_one_line(call: Call, words: tuple[str, ...], message: str) -> None:
    done = call("cache", *words)
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert message in done.err


# warm


@pytest.fixture(scope="module")
def server() -> Iterator[Any]:
    for name in ("uvicorn", "anthropic", "openai"):
        pytest.importorskip(name)
    from tests.serve.running import running, tool_model

    with running(tool_model(), key="secret", tenants={key_digest("secret"): "red"}) as found:
        yield found


def body(content: str, **more: Any) -> dict[str, Any]:
    block = {"type": "text", "text": content, "cache_control": MARK}
    return {"model": "tiny", "max_tokens": 9, "messages": [{"role": "user", "content": [block]}], **more}


def test_prompts_are_read_ahead(call: Call, server: Any, tmp_path: Path) -> None:
    file = tmp_path / "requests.jsonl"
    bodies = [body("1 " + LONG, stream=True), body("2 " + LONG), body("1 " + LONG), body("3", fly=True)]
    file.write_text("\n\n".join(map(json.dumps, bodies)), encoding="utf-8")
    done = call("cache", "warm", file, "--url", f"{server.url}/", "--key", "secret", "--json")
    found = read(done)
    assert (done.code, found["requests"], found["hits"]) == (1, 4, 1)
    assert found["written_tokens"] == 2 * found["read_tokens"] > 100
    assert [one["line"] for one in found["refused"]] == [7]
    assert "400: fly: the field is not supported" in found["refused"][0]["error"]
    server.settle()
    usage = server.anthropic.messages.create(**body("2 " + LONG)).usage
    assert usage.cache_read_input_tokens == found["read_tokens"]
    again = call("cache", "warm", file, "--url", server.url, "--key", "secret").out
    assert "4 requests, 3 hits" in again and "line 7: 400: fly" in again


def test_who_may_not_warm_is_told(call: Call, server: Any, tmp_path: Path) -> None:
    file = tmp_path / "requests.jsonl"
    file.write_text(json.dumps(body(LONG)), encoding="utf-8")
    assert "line 1: 401: the API key is missing" in call("cache", "warm", file, "--url", server.url).out
    done = call("cache", "warm", file, "--url", "http://127.0.0.1:1")
    assert (done.code, "no kvfold server answers at http://127.0.0.1:1" in done.err) == (2, True)


@pytest.mark.parametrize(("content", "message"), [("", "holds no requests"), ("[]", "line 1"), ("{", "cannot be read")])
def test_a_bad_file_is_told_before_anything_is_sent(call: Call, tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "requests.jsonl"
    file.write_text(content, encoding="utf-8")
    done = call("cache", "warm", file)
    assert (done.code, message in done.err) == (2, True)


# explain


def test_requests_are_explained(call: Call, folder: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    first.write_text(json.dumps(body(LONG)), encoding="utf-8")
    second.write_text(json.dumps(body("other " + LONG)), encoding="utf-8")
    words = ("cache", "explain", first, second, "--model", folder, "--cache-min-tokens", 32)
    found = read(call(*words, "--json"))
    assert [one["places"][0]["status"] for one in found["requests"]] == ["written", "written"]
    assert found["requests"][0]["break_even"] == 2
    assert found["second_after_first"]["reason"]["type"] == "messages_changed"
    text = call(*words).out
    assert "caching pays from request 2 on" in text and "(messages_changed)" in text
    assert "nothing is cached: its last marker is at" in call(*words[:3], "--model", folder).out
    short = call(*words[:-1], 1000).out
    assert "the first request caches nothing" in short and "(messages_changed)" not in short
    second.write_text(json.dumps(body(LONG)), encoding="utf-8")
    assert "that the first request wrote are read\n" in call(*words).out
    first.write_text(json.dumps({**body(LONG), "max_tokens": -1}), encoding="utf-8")
    done = call(*words)
    assert (done.code, "first.json would be refused: max_tokens" in done.err) == (2, True)
