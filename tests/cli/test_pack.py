"""`kvfold pack`: an entry in a store, a record for clients, and what cannot be packed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import kvfold
from kvfold.packed import PackedPrefix
from kvfold.policy.size import bytes_text
from kvfold.store.key import Key
from kvfold.store.tiers.shared_disk import SharedDiskTier
from tests.cli.conftest import Call
from tests.store.servers import RedisServer


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(kvfold.example_text()[:500], encoding="utf-8")
    return path


def test_an_entry_and_its_record(call: Call, text: Path, folder: Path, tmp_path: Path) -> None:
    common = ["--model", folder, "--dtype", "float32", "--block-size", 16, "--store", tmp_path / "store"]
    done = call(
        "pack", text, *common, "--policy", "keydiff + uniform + 4x", "--for", "vllm", "--out", tmp_path / "r.json"
    )
    assert done.code == 0, done.err
    packed = PackedPrefix.load(tmp_path / "r.json")
    assert done.out.splitlines()[0] == packed.entry
    kept = f"{packed.num_tokens:,} tokens -> {packed.num_slots:,} slots in whole blocks of 16"
    told = f"{kept} ({packed.num_tokens / packed.num_slots:.1f}x), entry of {bytes_text(packed.num_bytes)} in float32"
    assert done.out.splitlines()[1] == f"{told}, keydiff + 4x"
    assert list(SharedDiskTier(tmp_path / "store").keys()) == [Key.parse(packed.entry)]
    assert PackedPrefix.of(json.loads(call("pack", text, *common, "--json").out)) == packed


def test_a_ragged_entry_takes_a_codec_and_tells_its_slack(call: Call, text: Path, folder: Path, tmp_path: Path) -> None:
    common = ["--model", folder, "--dtype", "float32", "--block-size", 16, "--store", tmp_path / "store", "--ragged"]
    plain, coded = (
        PackedPrefix.of(json.loads(call("pack", text, *common, "--policy", policy, "--json").out))
        for policy in ("keydiff + global + 2x", "keydiff + global + 2x + int4")
    )
    assert plain.is_ragged and coded.is_ragged and coded.num_slots < plain.num_slots < plain.num_tokens
    assert coded.slack_bytes > 0
    told = call("pack", text, *common, "--policy", "keydiff + global + 2x + int4").out
    assert f"{coded.num_slots:,} slots" in told and "of blocks unused" in told


def test_into_redis(call: Call, text: Path, folder: Path, redis_server: RedisServer) -> None:
    place = redis_server.url
    done = call("pack", text, "--model", folder, "--dtype", "float32", "--block-size", 16, "--store", place, "--json")
    assert done.code == 0, done.err
    key = Key.parse(json.loads(done.out)["entry"])
    assert key is not None
    from kvfold.store.tiers.redis import RedisTier

    tier = RedisTier(place)
    assert tier.has(key) and tier.num_leading([key, key._replace(end=99), key]) == 1
    assert tier.num_leading([key, key]) == 2 and not tier.has(key._replace(end=99))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--policy", "kvzip + global + 4x"], "different lengths (global)"),
        (["--policy", "keydiff + 4x + int4"], "quantises slots"),
        (["--policy", "keydiff + 4x + slot", "--ragged"], "closes up positions"),
        (["--policy", "full"], "evicts nothing"),
        (["--block-size", "0"], '"0" is no count'),
        (["--for", "sglang"], "invalid choice"),
        (["--out", "/nowhere/r.json"], "the folder /nowhere does not exist"),
    ],
)
def test_what_cannot_be_is_told_before_a_model_is_loaded(
    options: list[str], told: str, call: Call, text: Path, tmp_path: Path
) -> None:
    done = call("pack", text, "--model", "nowhere", "--store", tmp_path / "store", *options)
    assert done.code == 2 and told in done.err
