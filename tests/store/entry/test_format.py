"""Entries: what was written comes back block by block; anything else is a fault that says what kind."""

from __future__ import annotations

import io
import json
import struct
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfold.store.entry.format import PREAMBLE_BYTES, EntryReader, InvalidEntry, encode, peek
from kvfold.store.key import FORMAT_REVISION, Key
from kvfold.store.tiers.eviction import Lease
from tests.store.common import BINDING, make_entry, make_key

LEASE = Lease(5.0, 300.0, 0.25)
KEY = make_key(1)
DATA = make_entry(KEY, LEASE)


def read(data: bytes, key: Key = KEY, **options: object) -> dict[str, dict[str, torch.Tensor]]:
    return dict(EntryReader(io.BytesIO(data), key, BINDING, **options).blocks())  # type: ignore[arg-type]


def reason(data: bytes, key: Key = KEY) -> str:
    with pytest.raises(InvalidEntry) as caught:
        read(data, key)
    return caught.value.reason


def test_what_was_written_comes_back() -> None:
    found = read(DATA)
    assert list(found) == ["0", "1"]
    assert found["1"]["k.x"].tolist() == [[1.0] * 3] * 2 and found["0"]["v.x"].tolist() == list(range(16, 21))
    assert peek(DATA[:PREAMBLE_BYTES]) == (300, 0.25, len(DATA[PREAMBLE_BYTES:].split(b"]]}")[0]) + 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.float8_e4m3fn])
def test_every_dtype_comes_back_bitwise(dtype: torch.dtype) -> None:
    x = torch.randint(0, 256, (7, 16), dtype=torch.uint8).view(dtype)
    found = read(encode(KEY, BINDING, {"0": {"x": x, "none": x[:0]}}, LEASE))["0"]
    assert found["x"].dtype == dtype and torch.equal(found["x"].view(torch.uint8), x.view(torch.uint8))
    assert found["none"].shape == x[:0].shape


@settings(max_examples=300, deadline=None)
@given(st.integers(0, len(DATA) - 1), st.integers(1, 255))
def test_any_flipped_byte_is_found(position: int, flip: int) -> None:
    data = bytearray(DATA)
    data[position] ^= flip
    assert reason(bytes(data)) in ("corrupt", "truncated", "foreign")


@settings(max_examples=100, deadline=None)
@given(st.integers(0, len(DATA) - 1))
def test_any_truncation_is_found(length: int) -> None:
    assert reason(DATA[:length]) in ("truncated", "foreign")


def test_more_than_was_written_is_found() -> None:
    assert reason(DATA + b"x") == "truncated"


def test_another_entry_under_this_key_is_swapped() -> None:
    assert reason(make_entry(make_key(2), LEASE)) == "swapped"


@pytest.mark.parametrize("name", ["weights", "dtype", "kv_dtype", "rope", "tokenizer", "policy", "tenant"])
def test_an_entry_of_another_binding_is_foreign(name: str) -> None:
    changed: dict[str, Any] = {name: "another"}
    other = replace(BINDING, **changed)
    assert reason(make_entry(KEY, LEASE, binding=other)) == "foreign"


def test_blocks_are_handed_out_before_later_ones_are_read() -> None:
    """A first layer can be used while the last is still on its way; a bad last layer is found when it comes."""
    data = bytearray(DATA)
    data[-1] ^= 1
    blocks = EntryReader(io.BytesIO(bytes(data)), KEY, BINDING).blocks()
    name, fields = next(blocks)
    assert name == "0" and fields["k.x"].tolist() == [[0.0] * 3] * 2
    with pytest.raises(InvalidEntry, match="block 1"):
        next(blocks)


def test_a_secret_is_needed_to_write_what_is_believed() -> None:
    blocks = {"0": {"x": torch.zeros(3)}}
    mine = encode(KEY, BINDING, blocks, LEASE, b"secret")
    assert read(mine, secret=b"secret")["0"]["x"].tolist() == [0.0] * 3
    for secret in (b"", b"other"):
        with pytest.raises(InvalidEntry):
            read(mine, secret=secret)


class Greedy(io.BytesIO):
    """Fails the test when somebody asks for more than there can be."""

    def read(self, size: int | None = -1, /) -> bytes:
        assert size is not None and size <= 2**20
        return super().read(size)


def test_sizes_are_checked_before_anything_is_read() -> None:
    """A header that claims gigabytes, in its length or in its list of blocks, allocates nothing."""
    lengths = struct.pack("<8sHxxIIQ", DATA[:8], FORMAT_REVISION, 300, 2**32 - 1, 0)
    with pytest.raises(InvalidEntry, match="4294967295 bytes"):
        EntryReader(Greedy(lengths + DATA[PREAMBLE_BYTES:]), KEY, BINDING)
    for claimed in (2**40, -1, 10**30, "9", None):
        with pytest.raises(InvalidEntry):
            EntryReader(Greedy(_with_block(claimed)), KEY, BINDING)


def _with_block(num_bytes: object) -> bytes:
    from kvfold.store.entry.format import _digest

    header = {"key": KEY.text, "binding": BINDING.facts(), "blocks": [["0", num_bytes, "0" * 64]]}
    text = json.dumps(header).encode()
    head = struct.pack("<8sHxxIIQ", DATA[:8], FORMAT_REVISION, 300, len(text), 0) + text
    return head + bytes.fromhex(_digest(head, b""))
