"""Placeholder ids, the one rotation, and entries that were changed on disk."""

from __future__ import annotations

import io

import pytest
import torch

from kvfold.core import Rope
from kvfold.packed.entry import PackedReader, packed_binding, packed_blocks, packed_key, rotate_keys
from kvfold.packed.placeholders import NUM_MARKS, is_marked, placeholder_ids
from kvfold.store.entry.format import InvalidEntry, encode
from kvfold.store.key import Key
from kvfold.store.tiers.eviction import Lease
from tests.store.common import BINDING, make_entry, make_key

LEASE = Lease(0.0, 100.0, 0.0)
ROPE = Rope(tuple(10000.0 ** (-i / 8) for i in range(8)))
SIGNED = packed_binding("w", torch.float32, "r", "p", "")


def entry(num_tokens: int = 40, num_slots: int = 16, num_layers: int = 2) -> tuple[Key, bytes]:
    rows = [(torch.randn(num_slots, 2, 4), torch.randn(num_slots, 2, 4)) for _ in range(num_layers)]
    blocks = packed_blocks(num_tokens, 100, rows)
    key = packed_key(SIGNED, num_slots, blocks)
    return key, encode(key, SIGNED, blocks, LEASE)


def test_placeholder_ids_follow_from_the_entry_alone() -> None:
    ids = placeholder_ids("entry", 128, 49152)
    assert ids == placeholder_ids("entry", 128, 49152)
    assert len(ids) == 128 and all(0 <= token < 49152 for token in ids)
    other = placeholder_ids("entrz", 128, 49152)
    assert ids[:NUM_MARKS] == other[:NUM_MARKS]
    assert sum(a == b for a, b in zip(ids[NUM_MARKS:], other[NUM_MARKS:], strict=True)) < 5
    # Clients in other languages compute them too: SHAKE-256, eight bytes each, little-endian.
    assert ids[:10] == [3, 30, 48, 52, 17, 21, 12, 30, *ids[8:10]] and len(set(ids)) > 100


def test_placeholders_are_told_from_text() -> None:
    assert is_marked(placeholder_ids("entry", 16, 100))
    assert not is_marked([]) and not is_marked([5] * 16) and not is_marked(placeholder_ids("entry", 16, 100)[1:])


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotated_keys_meet_queries_at_their_old_distance(interleaved: bool) -> None:
    rope = Rope(ROPE.frequencies, interleaved=interleaved)
    num_tokens, num_slots = 1000, 16
    generator = torch.Generator().manual_seed(0)
    raw_nHD, q_HD = torch.randn(num_slots, 2, 20, generator=generator), torch.randn(2, 20, generator=generator)
    position_n = torch.randint(0, num_tokens, (num_slots,), generator=generator)
    k_nHD = rope.rotate(raw_nHD, position_n[:, None].expand(-1, 2))
    for i in (0, 7, 300):
        there = rope.rotate(q_HD, torch.full((2,), num_tokens + i))
        here = rope.rotate(q_HD, torch.full((2,), num_slots + i))
        expected, moved = (k_nHD * there).sum(-1), rotate_keys(rope, k_nHD, num_tokens, num_slots)
        torch.testing.assert_close((moved * here).sum(-1), expected, rtol=1e-4, atol=1e-4)


def test_rows_come_back() -> None:
    key, data = entry()
    reader = PackedReader(io.BytesIO(data), key)
    assert (reader.num_tokens, reader.num_slots, reader.vocab_size) == (40, 16, 100)
    assert [rows.layer for rows in reader.layers({1: (2, 4)})] == [1]


def test_other_shapes_and_missing_layers_are_foreign() -> None:
    key, data = entry()
    for shapes in ({0: (3, 4)}, {1: (2, 8)}, {2: (2, 4)}):
        with pytest.raises(InvalidEntry) as found:
            list(PackedReader(io.BytesIO(data), key).layers(shapes))
        assert found.value.reason == "foreign"


def test_changed_cut_and_swapped_entries_are_told() -> None:
    key, data = entry()
    other, _ = entry()
    chunk = make_key(1)
    flipped = data[:-40] + bytes([data[-40] ^ 1]) + data[-39:]
    for bad, asked, reason in (
        (flipped, key, "corrupt"),
        (data[:-1], key, "truncated"),
        (data, other, "swapped"),
        (make_entry(chunk, LEASE, binding=BINDING), chunk, "foreign"),
    ):
        with pytest.raises(InvalidEntry) as found:
            list(PackedReader(io.BytesIO(bad), asked).layers({0: (2, 4), 1: (2, 4)}))
        assert found.value.reason == reason
