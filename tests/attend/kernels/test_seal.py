"""Sealing many blocks in one launch writes what the plain seal writes: codes, scales, positions, lengths."""

from __future__ import annotations

import pytest
import torch

from kvfold.attend.decode import seal
from kvfold.attend.kernels.sealing import seal_blocks
from kvfold.attend.prefill import PrefillPass
from kvfold.core import ModelSpec
from kvfold.errors import OutOfPages
from kvfold.pages.arena import Arena
from kvfold.pages.kernels.writing import knows
from kvfold.pages.layer import LayerPages
from kvfold.pages.sequence import PageConfig, SequenceCache
from kvfold.policy.policy import Policy
from tests.attend.kernels.common import DEVICE
from tests.pages.tiny import tiny_spec

pytest.importorskip("triton")

OPEN = 16
SPEC = tiny_spec(num_layers=2, num_heads=3, head_dim=64)
HALF = tiny_spec(num_layers=2, num_heads=3, head_dim=64, kv_dtype=torch.bfloat16)


def sequence(
    policy: str, arena: Arena, prompt_len: int, seed: int, page_size: int = 16, spec: ModelSpec = SPEC
) -> SequenceCache:
    """Some stored slots, then `OPEN` committed ones in the open block."""
    found = SequenceCache(arena, spec, Policy.parse(policy), PageConfig(page_size, OPEN))
    generator = torch.Generator(DEVICE).manual_seed(seed)

    def draw(heads: int, count: int) -> torch.Tensor:
        return torch.randn(heads, count, 64, generator=generator, device=DEVICE).to(spec.kv_dtype)

    prefill = PrefillPass([found], [prompt_len])
    for layer in range(SPEC.num_layers):
        prefill.attend(layer, 0, draw(6, prompt_len), draw(3, prompt_len), draw(3, prompt_len))
        prefill.finish_layer(layer)
    prefill.finish()
    for layer in range(SPEC.num_layers):
        found.open.write(layer, draw(3, OPEN) * 2, draw(3, OPEN) + 1)
    found.open.advance(OPEN)
    found.open.commit(OPEN)
    return found


def fields(layer: LayerPages, name: str) -> list[torch.Tensor]:
    """Rows of used slots, head by head."""
    size = layer.page_class.page_size
    return [
        torch.cat([e.span.fields[name][e.first * size : e.first * size + e.length] for e in extents])
        for extents in layer.extents
    ]


@pytest.mark.parametrize(
    ("policy", "spec"),
    [
        ("full", SPEC),
        ("bf16", HALF),
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
    lengths = (40, 77, 100)
    plain = [sequence(policy, arena, length, seed, spec=spec) for seed, length in enumerate(lengths)]
    fast = [sequence(policy, arena, length, seed, spec=spec) for seed, length in enumerate(lengths)]
    assert all(knows(layer.page_class) for item in fast for layer in item.tail.layers)
    for item in plain:
        item.policy = Policy.parse("full")  # nothing is evicted; the codecs are in the pages already
        seal(item)
    seal_blocks(fast)
    for mine, theirs in zip(fast, plain, strict=True):
        assert (mine.sealed_len, mine.open.fill) == (theirs.sealed_len, 0)
        for i, (a, b) in enumerate(zip(mine.tail.layers, theirs.tail.layers, strict=True)):
            assert a.lens == b.lens
            for name in (field.name for field in a.page_class.fields):
                for x, y in zip(fields(a, name), fields(b, name), strict=True):
                    differing = (x.view(torch.uint8) != y.view(torch.uint8)).float().mean()
                    assert differing <= (0.002 if "code" in name else 0.0), (i, name)  # a sum may be rounded otherwise
    for item in (*plain, *fast):
        item.release()
    assert arena.lent_bytes == 0


def test_bf16_is_left_to_plain_operations_where_it_rounds() -> None:
    arena = Arena(1 << 24, device=DEVICE, superblock_bytes=4096)
    assert not knows(SequenceCache(arena, SPEC, Policy.parse("bf16")).page_class(0))


def test_an_arena_that_is_full_is_told_and_the_sequence_stays() -> None:
    arena = Arena(1 << 24, device=DEVICE, superblock_bytes=4096)
    first, second = sequence("full", arena, 48, 0), sequence("full", arena, 48, 1)
    page_class = first.tail.layers[0].page_class
    blocker = arena.lend(page_class, arena.free_bytes // page_class.bytes_per_page)
    before = second.sealed_len, second.open.fill, [layer.lens for layer in second.tail.layers]
    with pytest.raises(OutOfPages):
        seal_blocks([second])
    assert before == (second.sealed_len, second.open.fill, [layer.lens for layer in second.tail.layers])
    for span in blocker:
        arena.take_back(span)
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
