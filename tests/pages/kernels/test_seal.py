"""Sealing many blocks in one launch writes what the plain seal writes: codes, scales, positions, lengths."""

from __future__ import annotations

import pytest
import torch

from kvfold.compression import seal as sealing
from kvfold.compression.seal import prepare_seals, seal
from kvfold.core import ModelSpec
from kvfold.errors import OutOfPages
from kvfold.pages.append import lacks_room
from kvfold.pages.arena import Arena
from kvfold.pages.kernels.batch_seal import seal_blocks
from kvfold.pages.kernels.encodings import knows
from kvfold.pages.layer import LayerPages
from kvfold.pages.page_config import PageConfig
from kvfold.pages.sequence import SequenceCache
from kvfold.passes.prefill import PrefillPass
from kvfold.policy.policy import Policy
from tests.attend.kernels.common import DEVICE
from tests.pages.tiny import tiny_spec

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("triton_writes")

OPEN = 16
SPEC = tiny_spec(num_layers=2, num_heads=3, head_dim=64)
ONE = tiny_spec(num_layers=1, num_heads=3, head_dim=64)
HALF = tiny_spec(num_layers=2, num_heads=3, head_dim=64, kv_dtype=torch.bfloat16)


def stored(
    policy: str,
    arena: Arena,
    prompt_len: int,
    seed: int,
    page_size: int = 16,
    open_len: int = OPEN,
    spec: ModelSpec = SPEC,
) -> SequenceCache:
    """Some stored slots."""
    found = SequenceCache(arena, spec, Policy.parse(policy), PageConfig(page_size, open_len))
    generator = torch.Generator(DEVICE).manual_seed(seed)
    prefill = PrefillPass.begin([found], [prompt_len])
    for layer in range(spec.num_layers):
        prefill.attend(layer, 0, *(draw(found, heads, prompt_len, generator) for heads in (6, 3, 3)))
        prefill.finish_layer(layer)
    prefill.finish()
    return found


def draw(sequence: SequenceCache, heads: int, count: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(heads, count, 64, generator=generator, device=DEVICE).to(sequence.spec.kv_dtype)


def fill(sequence: SequenceCache, count: int, seed: int) -> None:
    """Committed slots in the open block."""
    generator = torch.Generator(DEVICE).manual_seed(1000 + seed)
    for layer in range(sequence.spec.num_layers):
        k_HSD, v_HSD = (draw(sequence, 3, count, generator) for _ in range(2))
        sequence.open.write(layer, k_HSD * 2, v_HSD + 1)
    sequence.open.advance(count)
    sequence.open.commit(count)


def sequence(
    policy: str, arena: Arena, prompt_len: int, seed: int, page_size: int = 16, spec: ModelSpec = SPEC
) -> SequenceCache:
    """Some stored slots, then `OPEN` committed ones in the open block."""
    found = stored(policy, arena, prompt_len, seed, page_size, spec=spec)
    fill(found, OPEN, seed)
    return found


def fields(layer: LayerPages, name: str) -> list[torch.Tensor]:
    """Rows of used slots, head by head; where slots share rows, of whole groups."""
    page_class = layer.page_class
    rows = page_class.rows_per_page(next(field for field in page_class.fields if field.name == name))
    per, group = page_class.page_size // rows, page_class.group
    return [
        torch.cat([e.span.fields[name][e.first * rows :][: -(-e.length // group) * group // per] for e in extents])
        for extents in layer.extents
    ]


def assert_same(mine: SequenceCache, theirs: SequenceCache, share: float = 0.0) -> None:
    """But for a share of the codes: a sum may be rounded otherwise."""
    assert (mine.sealed_len, mine.open.fill) == (theirs.sealed_len, theirs.open.fill)
    for i, (a, b) in enumerate(zip(mine.tail.layers, theirs.tail.layers, strict=True)):
        assert a.lens == b.lens
        for name in (field.name for field in a.page_class.fields):
            for x, y in zip(fields(a, name), fields(b, name), strict=True):
                differing = (x.view(torch.uint8) != y.view(torch.uint8)).float().mean()
                assert differing <= (share if "code" in name else 0.0), (i, name)


@pytest.mark.parametrize(
    ("policy", "spec"),
    [
        ("full", SPEC),
        ("bf16", HALF),
        ("fp8", HALF),
        ("kivi4", HALF),
        ("codec(k=kivi2, v=int8(group_size=16))", SPEC),
        ("int8", SPEC),
        ("int4", SPEC),
        ("int2", SPEC),
        ("int4(layers=1:)", SPEC),
        ("knorm + ada + 64tok", SPEC),
        ("prefill(knorm + ada + 48tok + fit(prompt)) + int4 + protect(none)", SPEC),
    ],
)
def test_one_launch_writes_what_the_plain_seal_writes(policy: str, spec: ModelSpec) -> None:
    arena = Arena(1 << 24, device=DEVICE, superblock_bytes=4096)
    arena.memory.fill_(63)  # what others have left there, which fields must not show
    lengths = (40, 77)
    plain = [sequence(policy, arena, length, seed, spec=spec) for seed, length in enumerate(lengths)]
    fast = [sequence(policy, arena, length, seed, spec=spec) for seed, length in enumerate(lengths)]
    assert all(knows(layer.page_class) for item in fast for layer in item.tail.layers)
    for item in plain:
        item.policy = Policy.parse("full")  # nothing is evicted; the codecs are in the pages already
        seal(item)
    seal_blocks(fast)
    for mine, theirs in zip(fast, plain, strict=True):
        assert_same(mine, theirs, 0.002 if "int" in policy or "fp8" in policy else 0.0)
    for item in (*plain, *fast):
        item.release()
    assert arena.used_bytes == 0


@pytest.mark.parametrize(("lengths", "policy"), [((40, 77), "int4(layers=1:)"), ((64, 64), "kivi4")])
def test_seals_go_on_where_the_last_one_ended(lengths: tuple[int, int], policy: str) -> None:
    """Of both sequences, of one alone, and of both again: a page has room for three or four seals."""
    arena = Arena(1 << 24, device=DEVICE, superblock_bytes=4096)
    plain, fast = (
        [stored(policy, arena, n, i, page_size=192, open_len=32) for i, n in enumerate(lengths)] for _ in "ab"
    )
    for turn, which in enumerate(((0, 1), (0, 1), (1,), (0, 1), (0, 1))):
        for i in which:
            for item in (plain[i], fast[i]):
                fill(item, 32, seed=10 * turn + i)
            seal(plain[i])
        seal_blocks([fast[i] for i in which])
        for i in which:
            assert_same(fast[i], plain[i], 0.002)
    for item in (*plain, *fast):
        item.release()
    assert arena.used_bytes == 0


@pytest.mark.parametrize("policy", ["kivi4", "kivi2(layers=1:)"])
def test_groups_fill_pages_and_end_early(policy: str) -> None:
    """A block may end within a group, which then ends its extent, and a group never goes on in another block."""
    arena = Arena(1 << 24, device=DEVICE, superblock_bytes=4096)
    plain, fast = (stored(policy, arena, 70, 0, page_size=64, open_len=48) for _ in range(2))
    for count in (48, 32, 7, 32, 33):
        for item in (plain, fast):
            fill(item, count, seed=count)
        seal(plain)
        seal_blocks([fast])
        assert_same(fast, plain)
    assert max(len(extents) for layer in fast.tail.layers for extents in layer.extents) > 2


@pytest.mark.parametrize("policy", ["fp8", "kivi4", "int8"])
def test_broken_and_extreme_slots_are_sealed_as_plain_operations_seal_them(policy: str) -> None:
    arena = Arena(1 << 24, device=DEVICE, superblock_bytes=4096)
    plain, fast = (stored(policy, arena, 32, 0, spec=ONE) for _ in range(2))
    line = 2.0 ** torch.arange(-24, 40, device=DEVICE)  # below and above the normal numbers of fp8
    rows = [line, -line * 1.0625, line * 1.1875, line * 0, line * 1e-30, line * 1e30, line * 1e-20]
    broken = line.clone()
    broken[3], broken[7], broken[11] = torch.nan, torch.inf, -torch.inf
    x_SD = torch.stack([*rows, broken, torch.full_like(line, torch.nan), torch.full_like(line, -torch.inf)])
    for item in (plain, fast):
        item.open.write(0, x_SD.expand(3, -1, -1), x_SD.flip(1).expand(3, -1, -1))
        item.open.advance(len(x_SD))
        item.open.commit(len(x_SD))
    seal(plain)
    seal_blocks([fast])
    assert_same(fast, plain, 0.0 if policy == "kivi4" else 0.1)


def test_bf16_is_left_to_plain_operations_where_it_rounds() -> None:
    arena = Arena(1 << 24, device=DEVICE, superblock_bytes=4096)
    assert not knows(SequenceCache(arena, SPEC, Policy.parse("bf16")).page_class(0))


def test_an_arena_that_is_full_is_told_and_the_sequence_stays() -> None:
    arena = Arena(1 << 24, device=DEVICE, superblock_bytes=4096)
    first, second = sequence("full", arena, 48, 0), sequence("full", arena, 48, 1)
    page_class = first.tail.layers[0].page_class
    blocker = arena.allocate(page_class, arena.free_bytes // page_class.bytes_per_page)
    before = second.sealed_len, second.open.fill, [layer.lens for layer in second.tail.layers]
    with pytest.raises(OutOfPages):
        seal_blocks([second])
    assert before == (second.sealed_len, second.open.fill, [layer.lens for layer in second.tail.layers])
    for span in blocker:
        arena.free(span)
    seal_blocks([first, second])
    assert second.sealed_len == 48 + OPEN


def test_pages_that_another_sequence_took_over_get_its_own_slots() -> None:
    arena = Arena(1 << 24, device=DEVICE, superblock_bytes=4096)
    first = sequence("full", arena, 8 * OPEN, 0, page_size=16 * OPEN)  # a page has room for all that follows
    seal_blocks([first])
    second = first.fork()
    first.release()
    for layer, side in enumerate(second.open.k):
        second.open.write(layer, torch.full_like(side, 1 + layer), torch.full_like(side, 3 + layer))
    second.open.advance(OPEN)
    second.open.commit(OPEN)
    seal_blocks([second])
    for index, pages in enumerate(second.tail.layers):
        for name, value in (("k.x", 1 + index), ("v.x", 3 + index)):
            assert all((rows[-OPEN:] == value).all() for rows in fields(pages, name))
    second.release()


def test_pages_are_found_before_a_seal_is_due_by_one_sequence_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sealing, "can_seal", lambda _: True)  # as on a GPU
    arena = Arena(1 << 24, device=DEVICE, superblock_bytes=4096)
    sequences = [stored("int4", arena, 40, i, spec=ONE) for i in range(3)]
    found = []
    for _ in range(16 * OPEN):  # pages of several blocks are found at once
        lacking = sum(map(lacks_room, sequences))
        prepare_seals(sequences)
        found.append(lacking - sum(map(lacks_room, sequences)))
        for item in sequences:
            item.open.advance(1)
            item.open.commit(1)
        if not sequences[0].open.room:
            used_bytes = arena.used_bytes
            seal_blocks(sequences)
            assert arena.used_bytes == used_bytes
    assert found[:4] == [1, 1, 1, 0] and max(found) == 1 and sum(found) > 3
    for item in sequences:
        item.release()
    assert arena.used_bytes == 0


@pytest.mark.parametrize("policy", ["int4", "decode(keydiff + 96tok) + int4", "full + slot"])
def test_pages_are_not_found_ahead_without_memory_or_where_seals_do_more_than_add(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sealing, "can_seal", lambda _: True)  # as on a GPU
    arena = Arena(1 << 24, device=DEVICE, superblock_bytes=4096)
    waiting = stored(policy, arena, 40, 0, spec=ONE)
    if policy == "int4":
        page_class = waiting.tail.layers[0].page_class
        arena.allocate(page_class, arena.free_bytes // page_class.bytes_per_page)
    assert lacks_room(waiting)
    prepare_seals([waiting])
    assert lacks_room(waiting)
