"""Budgets are bytes: what heads keep is what spans hold, and every byte a sequence holds is counted."""

from __future__ import annotations

from collections import defaultdict

import pytest

from kvfold.core import ModelSpec
from kvfold.pages.layout import PageClass
from kvfold.pages.segment import Segment
from tests.pages.tiny import SMALL_BLOCK, decode, new_sequence, prefill, random_layers, tiny_spec

SPEC = tiny_spec(num_layers=3, num_heads=4, head_dim=64)
PROMPT = 200
SMALL = "protect(sinks=2, recent=4)"


def expected_bytes(segment: Segment) -> int:
    """One span per class: whole pages of each head, each field aligned to 64 bytes, rounded up to superblocks."""
    pages: dict[PageClass, int] = defaultdict(int)
    for layer in segment.layers:
        pages[layer.page_class] += sum(-(-length // layer.page_class.page_size) for length in layer.lens)
    total = 0
    for page_class, num_pages in pages.items():
        rows = [num_pages * page_class.rows_per_page(item) * item.bytes() for item in page_class.fields]
        total += -(-sum(-(-num_bytes // 64) * 64 for num_bytes in rows) // SMALL_BLOCK) * SMALL_BLOCK
    return total


@pytest.mark.parametrize("codec", ["native", "bf16", "fp8", "int8", "int4", "int2", "kivi4", "int4(layers=1:)"])
@pytest.mark.parametrize("budget", ["uniform", "ada", "global"])
def test_spans_hold_what_heads_keep(budget: str, codec: str) -> None:
    sequence = new_sequence(f"snapkv(window=4) + {budget} + 4x + {SMALL} + {codec}", SPEC, page_size=8)
    prefill(sequence, random_layers(SPEC, PROMPT))
    assert sequence.tail.num_bytes == expected_bytes(sequence.tail)
    assert sum(sum(sequence.stored_lens(i)) for i in range(3)) == 12 * (PROMPT // 4 - 4)
    lens = {length for i in range(3) for length in sequence.stored_lens(i)}
    assert (len(lens) == 1) == (budget == "uniform")


def test_unequal_heads_cost_what_equal_ones_cost() -> None:
    """The same number of slots under another allocation is the same memory, up to a page per head."""
    held = {}
    for budget in ("uniform", "ada"):
        sequence = new_sequence(f"snapkv(window=4) + {budget} + 4x + {SMALL}", SPEC, page_size=8)
        prefill(sequence, random_layers(SPEC, PROMPT))
        held[budget] = sequence.tail.num_bytes
    page = sequence.page_class(0).bytes_per_page
    assert abs(held["ada"] - held["uniform"]) <= 12 * page + SMALL_BLOCK


def test_resident_bytes_are_all_there_is() -> None:
    spec = tiny_spec(num_heads=4, head_dim=64)
    sequence = new_sequence(f"h2o + ada + 60tok + {SMALL} + int8", spec)
    layers = random_layers(spec, 100)
    prefill(sequence, [(q[:, :90], k[:, :90], v[:, :90]) for q, k, v in layers])
    for at in range(90, 100):
        decode(sequence, layers, at)
    extents = sum(len(head) for layer in sequence.tail.layers for head in layer.extents)
    mass = sum(4 * 4 * (max(sequence.stored_lens(i)) + 4) for i in range(2))  # fp32: stored slots and open block
    means = 2 * 4 * 64 * 4  # int8 keys: a mean of 64 floats for each head of each layer
    assert sequence.observed.num_bytes == mass
    assert sequence.resident_bytes == sequence.arena.used_bytes + 24 * extents + means + mass


def test_a_branch_counts_what_it_shares() -> None:
    sequence = new_sequence("full + int8", SPEC)
    prefill(sequence, random_layers(SPEC, 50))
    alone = sequence.resident_bytes
    branch = sequence.fork()
    assert sequence.resident_bytes == branch.resident_bytes == alone
    assert sequence.arena.used_bytes == sequence.segments[0].num_bytes + 2 * sequence.open.num_bytes


def test_forking_returns_what_was_reserved_for_growth() -> None:
    sequence = new_sequence("full", SPEC, open_len=4)
    layers = random_layers(SPEC, 150)
    prefill(sequence, [(q[:, :100], k[:, :100], v[:, :100]) for q, k, v in layers])
    for at in range(100, 106):
        decode(sequence, layers, at)
    assert any(layer.room(0) > 8 for layer in sequence.tail.layers)
    sequence.fork()
    assert all(layer.room(head) < 4 for layer in sequence.segments[0].layers for head in range(4))


def capacities(sequence_spec: ModelSpec, segment: Segment) -> list[tuple[int, int]]:
    """(slots that fit, slots used) of every head."""
    return [
        (sum(extent.capacity for extent in layer.extents[head]), layer.lens[head])
        for layer in segment.layers
        for head in range(sequence_spec.layers[0].num_kv_heads)
    ]


@pytest.mark.parametrize("budget", ["ada", "global", "uniform"])
def test_bounded_decoding_holds_its_bytes(budget: str) -> None:
    """Heads lose and win budget round by round; pages follow, so memory stays that of the bound."""
    sequence = new_sequence(f"random + {budget} + 40tok + {SMALL}", SPEC, page_size=4, open_len=4)
    layers = random_layers(SPEC, 260)
    prefill(sequence, [(q[:, :100], k[:, :100], v[:, :100]) for q, k, v in layers])
    for at in range(100, 260):
        decode(sequence, layers, at)
        if sequence.open.fill == 1:  # a round has just ended
            assert all(used <= held < used + 3 * 4 for held, used in capacities(SPEC, sequence.tail))
            assert sum(used for _, used in capacities(SPEC, sequence.tail)) <= 12 * 36
