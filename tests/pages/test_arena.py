"""The arena against a plain list of superblocks: nothing is lent twice, nothing is lost, nobody writes elsewhere."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import groupby

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvfold.codec import Int4, Kivi4, Native
from kvfold.errors import InputError, OutOfPages
from kvfold.pages.arena import Arena, Span
from kvfold.pages.layout import PageClass

BLOCK = 4096
NUM_BLOCKS = 20
CLASSES = (
    PageClass(Native(), Native(), 8, torch.float32, page_size=4),
    PageClass(Int4(), Int4(), 16, torch.float32, page_size=8),
    PageClass(Kivi4(), Int4(), 48, torch.bfloat16, page_size=32),
    PageClass(Native(), Native(), 128, torch.bfloat16, page_size=5, has_positions=False),
)


class ArenaMachine(RuleBasedStateMachine):
    """`lent` is the model: field i of a span is full of its byte + i."""

    def __init__(self) -> None:
        super().__init__()
        self.arena = Arena(NUM_BLOCKS * BLOCK + 17, superblock_bytes=BLOCK)
        self.lent: list[tuple[Span, int]] = []
        self.next_byte = 1
        self.peak = 0

    def blocks_taken(self) -> list[int]:
        return [block for span, _ in self.lent for block in range(span.start, span.start + span.num_superblocks)]

    def free_runs(self) -> list[int]:
        taken = set(self.blocks_taken())
        runs = groupby(range(NUM_BLOCKS), key=lambda block: block in taken)
        return [len(list(run)) for is_taken, run in runs if not is_taken]

    @rule(page_class=st.sampled_from(CLASSES), num_pages=st.integers(0, 120), whole=st.booleans())
    def lend(self, page_class: PageClass, num_pages: int, whole: bool) -> None:
        in_runs = [page_class.pages_in(length * BLOCK) for length in self.free_runs()]
        fits = num_pages <= (max(in_runs, default=0) if whole else sum(in_runs))
        if not fits:
            with pytest.raises(OutOfPages, match="free a session"):
                self.arena.allocate(page_class, num_pages, whole=whole)
            return
        spans = self.arena.allocate(page_class, num_pages, whole=whole)
        assert sum(span.num_pages for span in spans) >= num_pages
        assert all(span.num_pages == page_class.pages_in(span.num_bytes) for span in spans)
        assert len(spans) <= 1 or not whole
        for span in spans:
            for i, rows in enumerate(span.fields.values()):
                rows.view(torch.uint8).fill_(self.next_byte + i)
            self.lent.append((span, self.next_byte))
            self.next_byte = (self.next_byte + 9) % 240
        self.peak = max(self.peak, len(self.blocks_taken()) * BLOCK)

    @precondition(lambda self: self.lent)
    @rule(data=st.data())
    def take_back(self, data: st.DataObject) -> None:
        span, _ = self.lent.pop(data.draw(st.integers(0, len(self.lent) - 1)))
        self.arena.free(span)

    @invariant()
    def nothing_overlaps_and_nothing_is_lost(self) -> None:
        taken = self.blocks_taken()
        assert len(taken) == len(set(taken))
        assert self.arena.used_bytes == len(taken) * BLOCK
        assert self.arena.free_bytes + self.arena.used_bytes == self.arena.capacity_bytes == NUM_BLOCKS * BLOCK
        assert self.arena.peak_bytes == self.peak

    @invariant()
    def every_byte_is_as_its_owner_left_it(self) -> None:
        for span, byte in self.lent:
            for i, rows in enumerate(span.fields.values()):
                assert (rows.view(torch.uint8) == byte + i).all()

    @invariant()
    def fields_hold_all_pages(self) -> None:
        for span, _ in self.lent:
            held = sum(rows.nbytes for rows in span.fields.values())
            assert held == span.page_class.bytes_per_page * span.num_pages <= span.num_bytes

    def teardown(self) -> None:
        for span, _ in self.lent:
            self.arena.free(span)
        assert self.arena.free_bytes == self.arena.capacity_bytes
        whole = CLASSES[0].pages_in(self.arena.capacity_bytes)
        assert len(self.arena.allocate(CLASSES[0], whole, whole=True)) == 1  # the runs joined again


TestArena = ArenaMachine.TestCase
TestArena.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)


class SpanMachine(RuleBasedStateMachine):
    """Pages inside one span: `taken` is the model."""

    def __init__(self) -> None:
        super().__init__()
        self.span = Arena(4 * BLOCK, superblock_bytes=BLOCK).allocate(CLASSES[0], 20)[0]
        self.all = range(self.span.num_pages)
        self.taken: list[tuple[int, int]] = []

    def pages(self) -> list[int]:
        return [page for first, count in self.taken for page in range(first, first + count)]

    @rule(num_pages=st.integers(1, 9))
    def take(self, num_pages: int) -> None:
        free = set(self.all) - set(self.pages())
        found = self.span.allocate_pages(num_pages)
        if found is None:
            assert not free
            return
        assert set(range(found[0], sum(found))) <= free
        longest = max(len(list(run)) for is_free, run in groupby(self.all, key=free.__contains__) if is_free)
        assert found[1] == min(num_pages, longest)
        self.taken.append(found)

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def give_a_part(self, data: st.DataObject) -> None:
        first, count = self.taken.pop(data.draw(st.integers(0, len(self.taken) - 1)))
        kept = data.draw(st.integers(0, count - 1))
        self.span.free_pages(first + kept, count - kept)
        if kept:
            self.taken.append((first, kept))

    @invariant()
    def free_and_taken_are_all(self) -> None:
        assert self.span.num_free_pages == len(self.all) - len(self.pages())


TestSpan = SpanMachine.TestCase
TestSpan.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)


@pytest.mark.parametrize("num_bytes", [0, 100, 4095, 5000])
def test_odd_superblocks_are_refused(num_bytes: int) -> None:
    with pytest.raises(InputError, match="multiple of 4096"):
        Arena(1 << 20, superblock_bytes=num_bytes)


def test_an_arena_below_one_superblock_is_refused() -> None:
    with pytest.raises(InputError, match="holds no superblock"):
        Arena(4095, superblock_bytes=4096)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems count no memory that was never written")
def test_a_process_with_large_arenas_can_fork() -> None:
    """Each could be the arena of a model, half of a machine's memory; side by side they are more than there is."""
    most = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    arenas = [Arena(most // 10 * 9) for _ in range(3)]
    for arena in arenas:
        arena.memory[-1] = 7
    subprocess.run([sys.executable, "-c", ""], preexec_fn=lambda: None, check=True)  # which forks
    assert [int(arena.memory[-1]) for arena in arenas] == [7] * 3
