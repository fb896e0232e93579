"""Pages of heads against plain lists: whatever is appended, moved and given back, each head reads what was written.

N flat slots, head after head   D head dim
"""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from torch import Tensor

from kvfold.codec import Bf16, Int4, Kivi4, Native
from kvfold.errors import OutOfPages
from kvfold.pages.arena import Arena
from kvfold.pages.extent import Extent
from kvfold.pages.layer import LayerPages
from kvfold.pages.layout import PageClass
from kvfold.pages.segment import Segment
from tests.pages.tiny import SMALL_BLOCK

NUM_HEADS = 3
CLASSES = (PageClass(Native(), Native(), 8, torch.float32, 4), PageClass(Bf16(), Bf16(), 24, torch.float32, 2))


def slots(page_class: PageClass, numbers: list[int]) -> Tensor:
    """Keys [N, D] that hold their numbers (below 256: exact in bf16) in every channel."""
    return torch.tensor(numbers, dtype=torch.float32).unsqueeze(-1).expand(-1, page_class.head_dim)


def append(layer: LayerPages, heads: list[list[int]]) -> None:
    flat = [number for head in heads for number in head]
    x_ND, counts = slots(layer.page_class, flat), [len(head) for head in heads]
    layer.append(layer.encode(x_ND, -x_ND, torch.tensor(flat, dtype=torch.int64) * 7, counts), counts)


def read(layer: LayerPages) -> list[list[int]]:
    """The numbers of every head, read run by run as attention does."""
    heads: list[list[int]] = [[] for _ in range(layer.num_heads)]
    for run in layer.runs():
        k_ND = layer.page_class.k.decode("k", run.sides["k"], torch.float32)
        v_ND = layer.page_class.v.decode("v", run.sides["v"], torch.float32)
        for head, start, length in zip(run.heads, run.starts, run.lens, strict=True):
            mine = slice(start, start + length)
            assert torch.equal(v_ND[mine], -k_ND[mine])
            assert torch.equal(run.position_N[mine], (k_ND[mine, 0] * 7).to(torch.int32))
            heads[head] += [int(number) for number in k_ND[mine, -1]]
    return heads


class SegmentMachine(RuleBasedStateMachine):
    """`model[layer][head]` is the list of numbers that a head must hold."""

    def __init__(self) -> None:
        super().__init__()
        self.arena = Arena(16 * SMALL_BLOCK, superblock_bytes=SMALL_BLOCK)
        self.segment = Segment(self.arena, [LayerPages(page_class, NUM_HEADS) for page_class in CLASSES])
        self.model: list[list[list[int]]] = [[[] for _ in range(NUM_HEADS)] for _ in CLASSES]
        self.next = 0

    def fresh(self, count: int) -> list[int]:
        self.next += count
        return [number % 256 for number in range(self.next - count, self.next)]

    @rule(
        counts=st.lists(st.lists(st.integers(0, 30), min_size=3, max_size=3), min_size=2, max_size=2),
        growing=st.sets(st.integers(0, 1)),
    )
    def grow(self, counts: list[list[int]], growing: set[int]) -> None:
        try:
            self.segment.reserve(counts, growing=growing)
        except OutOfPages:
            return
        for i, layer in enumerate(self.segment.layers):
            new = [self.fresh(count) for count in counts[i]]
            append(layer, new)
            self.model[i] = [old + added for old, added in zip(self.model[i], new, strict=True)]

    @rule(layer=st.integers(0, 1), seed=st.integers(0, 1 << 30), share=st.floats(0, 1), spare_len=st.integers(0, 6))
    def compact(self, layer: int, seed: int, share: float, spare_len: int) -> None:
        rng, pages = random.Random(seed), self.segment.layers[layer]
        keep = [sorted(rng.sample(range(len(head)), int(share * len(head)))) for head in self.model[layer]]
        codes = pages.gather([torch.tensor(index, dtype=torch.int64) for index in keep])
        pages.truncate()
        assert pages.lens == [0] * NUM_HEADS and not pages.runs()
        pages.append(codes, [len(index) for index in keep])
        pages.release_unused(spare_len)
        self.segment.trim()
        self.model[layer] = [[head[i] for i in index] for head, index in zip(self.model[layer], keep, strict=True)]

    @invariant()
    def every_head_reads_what_was_written(self) -> None:
        for layer, heads in zip(self.segment.layers, self.model, strict=True):
            assert read(layer) == heads
            assert layer.lens == [len(head) for head in heads]
            assert [layer.positions(h).tolist() for h in range(NUM_HEADS)] == [[7 * n for n in x] for x in heads]

    @invariant()
    def every_page_has_one_owner(self) -> None:
        for layer, page_class in zip(self.segment.layers, CLASSES, strict=True):
            owned = [page for extents in layer.extents for extent in extents for page in pages_of(extent)]
            assert len(owned) == len(set(owned))
            spans = self.segment.spans.get(page_class, [])
            assert len(owned) == sum(span.num_pages - span.num_free_pages for span in spans)

    @invariant()
    def bytes_are_those_of_the_spans(self) -> None:
        assert self.segment.num_bytes == self.arena.used_bytes

    def teardown(self) -> None:
        self.segment.share()
        self.segment.release()
        assert self.segment.num_bytes == self.arena.used_bytes
        self.segment.release()
        assert self.arena.used_bytes == 0


def pages_of(extent: Extent) -> list[tuple[int, int]]:
    return [(id(extent.span), page) for page in range(extent.first, extent.first + extent.num_pages)]


TestSegment = SegmentMachine.TestCase
TestSegment.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)


@settings(max_examples=30, deadline=None)
@given(rounds=st.lists(st.tuples(st.integers(0, 70), st.integers(0, 70)), min_size=1, max_size=4))
def test_groups_closed_early_read_back_in_order(rounds: list[tuple[int, int]]) -> None:
    """kivi4: 32 slots share a key grid, so each append starts a group of its own; no slot is lost or doubled."""
    page_class = PageClass(Kivi4(), Int4(), 16, torch.float32, 32)
    segment = Segment(Arena(1 << 20, superblock_bytes=SMALL_BLOCK), [LayerPages(page_class, 2)])
    layer, start = segment.layers[0], 0
    written: tuple[list[int], list[int]] = ([], [])
    for counts in rounds:
        segment.reserve([counts])
        heads = [list(range(start, start + count)) for count in counts]
        start += 100
        flat = torch.tensor([number for head in heads for number in head], dtype=torch.int64)
        x_ND = torch.randn(len(flat), 16, generator=torch.Generator().manual_seed(start))
        layer.append(layer.encode(x_ND, x_ND, flat, counts), counts)
        for head, numbers in enumerate(heads):
            written[head].extend(numbers)
    assert [layer.positions(head).tolist() for head in (0, 1)] == list(written)


def test_values_of_a_group_come_back_close() -> None:
    page_class = PageClass(Kivi4(), Kivi4(), 16, torch.float32, 32)
    layer = LayerPages(page_class, 2)
    segment = Segment(Arena(1 << 20, superblock_bytes=SMALL_BLOCK), [layer])
    x_ND = torch.randn(45 + 3, 16, generator=torch.Generator().manual_seed(0))
    segment.reserve([[45, 3]])
    layer.append(layer.encode(x_ND, -x_ND, torch.arange(48), [45, 3]), [45, 3])
    found = {0: torch.empty(0, 16), 1: torch.empty(0, 16)}
    for run in layer.runs():
        k_ND = page_class.k.decode("k", run.sides["k"], torch.float32)
        for head, start, length in zip(run.heads, run.starts, run.lens, strict=True):
            found[head] = torch.cat((found[head], k_ND[start : start + length]))
    assert torch.allclose(torch.cat((found[0], found[1])), x_ND, atol=0.25)


def test_a_group_closed_early_is_written_whole() -> None:
    """A saved page holds repeats of its last slot there, never what was in memory before."""
    arena = Arena(1 << 20, superblock_bytes=SMALL_BLOCK)
    arena.memory.fill_(255)
    layer = LayerPages(PageClass(Kivi4(), Kivi4(), 16, torch.float32, 32), 2)
    Segment(arena, [layer]).reserve([[45, 3]])
    layer.append(layer.encode(torch.zeros(48, 16), torch.zeros(48, 16), torch.arange(48), [45, 3]), [45, 3])
    (run,) = layer.runs()
    assert run.position_N.tolist() == [*range(45), *[44] * 19, 45, 46, *[47] * 30]
    assert all((rows == 0).all() for side in (run.sides["k"], run.sides["v"]) for rows in side.values())


def test_heads_of_one_layer_lie_side_by_side() -> None:
    """Equal heads are one run with one view; unequal ones one run with a view each."""
    for counts, is_uniform in (([9, 9, 9], True), ([9, 5, 9], False)):
        segment = Segment(Arena(1 << 20, superblock_bytes=SMALL_BLOCK), [LayerPages(CLASSES[0], 3)])
        segment.reserve([counts])
        append(segment.layers[0], [list(range(count)) for count in counts])
        (run,) = segment.layers[0].runs()
        assert run.is_uniform == is_uniform
        assert run.lens == tuple(counts)


def test_growth_takes_an_eighth_more_only_if_there_is_memory() -> None:
    def grown_in(num_blocks: int) -> LayerPages:
        arena = Arena(num_blocks * SMALL_BLOCK, superblock_bytes=SMALL_BLOCK)
        segment = Segment(arena, [LayerPages(CLASSES[0], 1)])
        segment.reserve([[4000]])
        append(segment.layers[0], [[0] * 4000])
        segment.reserve([[1]], growing=[0])
        return segment.layers[0]

    exact = -(-CLASSES[0].span_bytes(1000) // SMALL_BLOCK)
    assert grown_in(2 * exact).room(0) >= 501
    assert 1 <= grown_in(exact + 1).room(0) <= 4


def test_reserving_all_classes_or_none() -> None:
    arena = Arena(2 * SMALL_BLOCK, superblock_bytes=SMALL_BLOCK)
    segment = Segment(arena, [LayerPages(page_class, 1) for page_class in CLASSES])
    with pytest.raises(OutOfPages):
        segment.reserve([[4], [10_000]])
    assert arena.used_bytes == 0 and segment.layers[0].extents == [[]]
