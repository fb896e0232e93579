"""Several live sequences against plain lists of token numbers, in an arena that runs out.

Whatever order of reading, drafting, committing, sealing, evicting, forking and freeing: every head holds exactly the
tokens the lists say, in their order, whatever the other branches do, and all memory comes back. A step that finds no
memory changes nothing, which the same comparison shows.

    H KV heads   T tokens   D head dim
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvfold.compression.seal import seal
from kvfold.compression.view import NewSlots
from kvfold.core import ModelSpec
from kvfold.errors import OutOfPages
from kvfold.pages.arena import Arena
from kvfold.pages.compaction import rewrite
from kvfold.pages.layer import LayerChange
from kvfold.pages.segment import Segment
from kvfold.pages.sequence import SequenceCache
from tests.pages.tiny import SMALL_BLOCK, fill, new_sequence, readable, tiny_spec, tokens_of

WINDOW = 6
MOST_TOKENS = 250  # numbers below 256 are exact in bf16


@dataclass
class Expected:
    """What one sequence must hold."""

    sealed: dict[tuple[int, int], list[int]]  # (compressible layer, head) -> tokens
    sealed_len: int = 0
    fill: int = 0
    committed: int = 0

    def copy(self) -> Expected:
        sealed = {key: list(tokens) for key, tokens in self.sealed.items()}
        return Expected(sealed, self.sealed_len, self.fill, self.committed)

    def seal(self, kept: dict[tuple[int, int], list[int]], num_tokens: int) -> None:
        self.sealed = kept
        self.sealed_len += num_tokens
        self.fill -= self.committed
        self.committed = 0


class SequenceMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.live: list[tuple[SequenceCache, Expected]] = []

    @initialize(
        has_window=st.booleans(),
        policy=st.sampled_from(["full", "full + bf16", "full + codec(k=bf16, v=native)", "full + bf16(layers=1:)"]),
        page_size=st.integers(1, 7),
        open_len=st.integers(1, 6),
        num_blocks=st.integers(8, 40),
    )
    def begin(self, has_window: bool, policy: str, page_size: int, open_len: int, num_blocks: int) -> None:
        self.spec: ModelSpec = tiny_spec(num_layers=3 if has_window else 2, sliding={1: WINDOW} if has_window else None)
        self.arena = Arena(num_blocks * SMALL_BLOCK, superblock_bytes=SMALL_BLOCK)
        self.policy, self.page_size, self.open_len = policy, page_size, open_len
        self.start_another(prompt_len=20)

    @property
    def heads(self) -> list[tuple[int, int]]:
        return [(i, h) for i in self.spec.compressible_layers for h in range(self.spec.layers[i].num_kv_heads)]

    def pick(self, which: int) -> tuple[SequenceCache, Expected]:
        return self.live[which % len(self.live)]

    @precondition(lambda self: len(self.live) < 3)
    @rule(prompt_len=st.integers(1, 25))
    def start_another(self, prompt_len: int) -> None:
        try:
            made = new_sequence(
                self.policy, self.spec, arena=self.arena, page_size=self.page_size, open_len=self.open_len
            )
        except OutOfPages:
            return
        self.live.append((made, Expected({key: [] for key in self.heads})))
        self.read(which=len(self.live) - 1, num_tokens=prompt_len)

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 3), num_tokens=st.integers(1, 25))
    def read(self, which: int, num_tokens: int) -> None:
        """A prompt; the commits before it are sealed first, even if the prompt then finds no memory."""
        sequence, expected = self.pick(which)
        if sequence.logical_len + num_tokens > MOST_TOKENS or expected.fill > expected.committed:
            return
        try:
            fill(sequence, num_tokens)
        except OutOfPages:
            if sequence.sealed_len > expected.sealed_len:
                self.sealed_all(expected)
            return
        self.sealed_all(expected)
        for tokens in expected.sealed.values():
            tokens += range(expected.sealed_len, expected.sealed_len + num_tokens)
        expected.sealed_len += num_tokens

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 3), num_tokens=st.integers(1, 4))
    def draft(self, which: int, num_tokens: int) -> None:
        sequence, expected = self.pick(which)
        num_tokens = min(num_tokens, sequence.open.room, MOST_TOKENS - sequence.logical_len)
        for i in range(self.spec.num_layers):
            k = readable(self.spec, i, sequence.logical_len, num_tokens)
            sequence.open.write(i, k, -k)
        sequence.open.advance(num_tokens)
        expected.fill += num_tokens

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 3), num_tokens=st.integers(1, 4))
    def decode(self, which: int, num_tokens: int) -> None:
        self.draft(which=which, num_tokens=num_tokens)
        self.commit(which=which, num_tokens=num_tokens)

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 3), num_tokens=st.integers(0, 4))
    def commit(self, which: int, num_tokens: int) -> None:
        sequence, expected = self.pick(which)
        sequence.open.commit(num_tokens)
        expected.committed = min(expected.committed + num_tokens, expected.fill)

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 3))
    def roll_back(self, which: int) -> None:
        sequence, expected = self.pick(which)
        sequence.open.rollback()
        expected.fill = expected.committed

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 3))
    def seal(self, which: int) -> None:
        sequence, expected = self.pick(which)
        try:
            seal(sequence)
        except OutOfPages:
            return
        self.sealed_all(expected)

    def sealed_all(self, expected: Expected) -> None:
        new = range(expected.sealed_len, expected.sealed_len + expected.committed)
        kept = {key: tokens + list(new) for key, tokens in expected.sealed.items()}
        expected.seal(kept, expected.committed)

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 3), seed=st.integers(0, 1 << 30), share=st.floats(0.2, 1), decoding=st.booleans())
    def evict(self, which: int, seed: int, share: float, decoding: bool) -> None:
        """Any slots of any head go, stored or about to be sealed."""
        sequence, expected = self.pick(which)
        rng, count = random.Random(seed), expected.committed
        kept: dict[tuple[int, int], list[int]] = {}
        changes = []
        for i, layer in enumerate(self.spec.layers):
            k = readable(self.spec, i, expected.sealed_len, count)
            change = NewSlots(k, -k, expected.sealed_len).whole
            if layer.compressible:
                heads = [expected.sealed[i, h] + list(change.position_N[:count].tolist()) for h in (0, 1)]
                stay = [sorted(rng.sample(range(len(head)), int(share * len(head)))) for head in heads]
                kept |= {(i, h): [heads[h][at] for at in stay[h]] for h in (0, 1)}
                change = some_of(change, stay, [len(expected.sealed[i, h]) for h in (0, 1)])
            changes.append(change)
        try:
            rewrite(sequence, changes, count, decoding=decoding)
        except OutOfPages:
            return
        sequence.open.drop_committed()
        expected.seal(kept, count)

    @precondition(lambda self: 0 < len(self.live) < 4 and any(s.sealed_len for s, _ in self.live))
    @rule(which=st.integers(0, 3))
    def fork(self, which: int) -> None:
        sequence, expected = self.pick(which)
        try:
            self.live.append((sequence.fork(), expected.copy()))
        except OutOfPages:
            return

    @precondition(lambda self: len(self.live) > 1)
    @rule(which=st.integers(0, 3))
    def free(self, which: int) -> None:
        self.live.pop(which % len(self.live))[0].release()

    @invariant()
    def every_head_holds_its_tokens(self) -> None:
        for sequence, expected in self.live:
            open_tokens = list(range(expected.sealed_len, expected.sealed_len + expected.fill))
            assert sequence.logical_len == expected.sealed_len + expected.fill
            assert sequence.committed_len == expected.sealed_len + expected.committed
            for layer in self.spec.compressible_layers:
                wanted = [expected.sealed[layer, head] + open_tokens for head in (0, 1)]
                assert tokens_of(sequence, layer) == wanted
                assert [sequence.positions(layer, head).tolist() for head in (0, 1)] == wanted

    @invariant()
    def windows_hold_what_the_next_query_sees(self) -> None:
        for sequence, expected in self.live:
            for i in set(range(self.spec.num_layers)) - set(self.spec.compressible_layers):
                first, second = tokens_of(sequence, i)
                visible = range(max(0, expected.sealed_len - WINDOW + 1), expected.sealed_len + expected.fill)
                assert first == second == sorted(set(first))
                assert first[len(first) - len(visible) :] == list(visible)

    @invariant()
    def memory_is_conserved(self) -> None:
        segments: set[Segment] = {s for sequence, _ in self.live for s in (*sequence.segments, sequence.tail)}
        held = sum(segment.num_bytes for segment in segments)
        held += sum(sequence.open.num_bytes for sequence, _ in self.live)
        if self.live or hasattr(self, "arena"):
            assert held == self.arena.used_bytes
        for segment in segments:
            owners = [s for s, _ in self.live for part in (*s.segments, s.tail) if part is segment]
            assert segment.refs == len(owners)

    def teardown(self) -> None:
        for sequence, _ in self.live:
            sequence.release()
        if hasattr(self, "arena"):
            assert self.arena.used_bytes == 0


def some_of(change: LayerChange, stay: list[list[int]], num_stored: list[int]) -> LayerChange:
    """The change that keeps `stay` (indices over stored, then new slots) of every head."""
    new = [[at - old for at in index if at >= old] for index, old in zip(stay, num_stored, strict=True)]
    offsets = [sum(change.counts[:head]) for head in range(len(stay))]
    flat = torch.tensor([o + at for o, index in zip(offsets, new, strict=True) for at in index], dtype=torch.int64)
    keep = [
        torch.tensor([at for at in index if at < old], dtype=torch.int64)
        for index, old in zip(stay, num_stored, strict=True)
    ]
    counts = [len(index) for index in new]
    return LayerChange(change.k_ND[flat], change.v_ND[flat], change.position_N[flat], counts, keep)


TestSequences = SequenceMachine.TestCase
TestSequences.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)
