"""On a CPU the compiled kernel writes, bit for bit, what the codecs write: prompts, and the open blocks of many."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from kvfold.codec.fp8 import Fp8
from kvfold.compression import seal as sealing
from kvfold.compression.seal import seal, seal_all
from kvfold.core import HAS_NUMBA, ModelSpec
from kvfold.pages import compaction
from kvfold.pages.arena import Arena
from kvfold.pages.kernels import dispatch
from kvfold.pages.kernels.batch_seal import can_seal, seal_blocks
from kvfold.pages.kernels.compact_write import can_write
from kvfold.pages.layer import LayerChange, LayerPages
from kvfold.pages.page_config import PageConfig
from kvfold.pages.segment import Segment
from kvfold.pages.sequence import SequenceCache
from kvfold.passes.prefill import PrefillPass
from kvfold.policy.policy import Policy
from tests.pages.tiny import tiny_spec

pytestmark = pytest.mark.skipif(not HAS_NUMBA, reason="numba is not installed")

OPEN = 8
SPEC = tiny_spec(num_layers=2, num_heads=2, head_dim=16)
WIDE = tiny_spec(num_layers=2, num_heads=2, head_dim=96)  # rotated in blocks of 32, whose root is no power of two
HALF = tiny_spec(num_layers=2, num_heads=2, head_dim=16, kv_dtype=torch.bfloat16)


@pytest.fixture
def arena() -> Iterator[Arena]:
    found = Arena(1 << 24, superblock_bytes=4096)
    found.memory.fill_(63)  # what others have left there, which fields must not show
    yield found


def read(arena: Arena, policy: str, spec: ModelSpec, lengths: tuple[int, ...]) -> SequenceCache:
    """Prompts one after the other."""
    found = SequenceCache(arena, spec, Policy.parse(policy), PageConfig(16, OPEN))
    generator = torch.Generator().manual_seed(1)
    for length in lengths:
        prefill = PrefillPass.begin([found], [length])
        for layer in range(spec.num_layers):
            q, k, v = (torch.randn(h, length, spec.layers[0].head_dim, generator=generator) for h in (4, 2, 2))
            prefill.attend(layer, 0, q, k * (layer + 1), v + layer)
            prefill.finish_layer(layer)
        prefill.finish()
    return found


def fill(sequence: SequenceCache, x_SD: Tensor) -> None:
    """Committed slots in the open block, the same in all heads but for a factor."""
    for layer in range(sequence.spec.num_layers):
        x_HSD = torch.stack([x_SD, 2 * x_SD]).to(sequence.spec.kv_dtype)
        sequence.open.write(layer, x_HSD * (layer + 1), x_HSD.flip(1))
    sequence.open.advance(len(x_SD))
    sequence.commit_all()


def rows(layer: LayerPages, name: str) -> Tensor:
    """Used slots of a field, head after head."""
    size = layer.page_class.page_size
    return torch.cat([
        extent.span.fields[name][extent.first * size :][: extent.length] for of in layer.extents for extent in of
    ])  # fmt: skip


def assert_same(mine: SequenceCache, theirs: SequenceCache) -> None:
    assert (mine.sealed_len, mine.open.fill) == (theirs.sealed_len, theirs.open.fill)
    for index, (a, b) in enumerate(zip(mine.tail.layers, theirs.tail.layers, strict=True)):
        assert a.lens == b.lens
        for name in (field.name for field in a.page_class.fields):
            x, y = rows(a, name), rows(b, name)
            if name.endswith(".code") and isinstance(a.page_class.v, Fp8):  # of one sign of 0 PyTorch makes the other
                x, y = (codes.view(torch.float8_e4m3fn).float() for codes in (x, y))
            equal = torch.equal(x, y) if not x.is_floating_point() else torch.allclose(x, y, 0, 0, equal_nan=True)
            assert equal, (index, name)


@contextmanager
def plainly() -> Iterator[None]:
    """Without kernels."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compaction, "can_write", lambda *_: False)
        patch.setattr(sealing, "can_seal", lambda _: False)
        yield


POLICIES = [
    ("full", SPEC),
    ("full", HALF),
    ("bf16", SPEC),
    ("int8", SPEC),
    ("int4", WIDE),
    ("int4", HALF),
    ("int2", WIDE),
    ("fp8", WIDE),
    ("codec(k=int4(group_size=8), v=int8(group_size=4))", SPEC),
    ("codec(k=bf16, v=int2)", SPEC),
    ("int4(layers=1:)", SPEC),
    ("knorm + ada + 2x + int4", SPEC),
    ("knorm + global + 2x", HALF),
    ("prefill(knorm + ada + 2x + fit(prompt)) + int4 + protect(none)", SPEC),
]


@pytest.mark.parametrize(("policy", "spec"), POLICIES)
def test_prompts_are_written_as_codecs_write_them(
    policy: str, spec: ModelSpec, arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = (70,) if "fit" in policy else (70, 10, 30)  # the second finds extents half full, and some heads full
    with plainly():
        plain = read(arena, policy, spec, lengths)
    served: list[bool] = []

    def noted(tail: Segment, changes: Sequence[LayerChange]) -> bool:
        served.append(can_write(tail, changes))
        return served[-1]

    monkeypatch.setattr(compaction, "can_write", noted)
    fast = read(arena, policy, spec, lengths)
    assert served == [True] * len(lengths)
    assert_same(fast, plain)
    fast.release()
    plain.release()
    assert arena.used_bytes == 0


@pytest.mark.parametrize(("policy", "spec"), POLICIES)
def test_open_blocks_of_many_are_sealed_as_alone(policy: str, spec: ModelSpec, arena: Arena) -> None:
    generator = torch.Generator().manual_seed(2)
    plain, fast = ([read(arena, policy, spec, (length,)) for length in (40, 23)] for _ in range(2))
    for _ in range(5):  # pages fill up in between
        for mine, theirs in zip(fast, plain, strict=True):
            x_SD = torch.randn(OPEN, spec.layers[0].head_dim, generator=generator)
            fill(mine, x_SD)
            fill(theirs, x_SD)
            with plainly():
                seal_all([theirs])
        assert all(map(can_seal, fast))
        seal_all(fast)
        for mine, theirs in zip(fast, plain, strict=True):
            assert_same(mine, theirs)
    for item in (*plain, *fast):
        item.release()
    assert arena.used_bytes == 0


@pytest.mark.parametrize("num_threads", [1, 3])
def test_threads_share_many_slots(num_threads: int, arena: Arena) -> None:
    before = torch.get_num_threads()
    with plainly():
        plain = read(arena, "knorm + ada + 2x + int4", SPEC, (1400,))
    try:
        torch.set_num_threads(num_threads)
        assert_same(read(arena, "knorm + ada + 2x + int4", SPEC, (1400,)), plain)
    finally:
        torch.set_num_threads(before)


def test_mean_keys_of_layers_in_one_go_are_those_of_each(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    together = [read(arena, "int4", WIDE, (length,)) for length in (3, 70)]
    monkeypatch.setattr(compaction, "_FEW_SLOTS", 0)
    for mine, length in zip(together, (3, 70), strict=True):
        for a, b in zip(mine.tail.layers, read(arena, "int4", WIDE, (length,)).tail.layers, strict=True):
            assert torch.equal(a.state["k"]["mean"], b.state["k"]["mean"])
            assert a.state["v"] == b.state["v"] == {}


def test_mean_keys_of_heads_of_unequal_length(arena: Arena) -> None:
    sequence, generator = SequenceCache(arena, SPEC, Policy.parse("int4"), PageConfig(16, OPEN)), torch.Generator()
    counts = [[9, 5], [3, 17]]
    heads = [[torch.randn(n, 16, generator=generator.manual_seed(n)) for n in mine] for mine in counts]
    columns = [(torch.cat(mine), torch.arange(sum(map(len, mine)))) for mine in heads]
    changes = [LayerChange(k, k, at, mine) for (k, at), mine in zip(columns, counts, strict=True)]
    compaction.rewrite(sequence, changes, 17)
    for layer, mine in zip(sequence.tail.layers, heads, strict=True):
        torch.testing.assert_close(layer.state["k"]["mean"], torch.stack([k_SD.mean(0) for k_SD in mine]))


@pytest.mark.parametrize("policy", ["full", "bf16", "fp8", "int8", "int4", "int2"])
def test_broken_and_extreme_slots_are_sealed_as_codecs_seal_them(policy: str, arena: Arena) -> None:
    plain, fast = (read(arena, policy, WIDE, (20,)) for _ in range(2))
    line = 2.0 ** torch.arange(-40, 56)
    broken = line.clone()
    broken[3], broken[7], broken[11] = torch.nan, torch.inf, -torch.inf
    extreme = [line, -line * 1.0625, line * 1e-30, line * 1e30, line * 0 - 3.1, torch.full_like(line, torch.nan)]
    for x_SD in (torch.stack(extreme), torch.stack([broken, -broken, line * 1e22, torch.full_like(line, -torch.inf)])):
        fill(plain, x_SD)
        with plainly():
            seal(plain)
        fill(fast, x_SD)
        seal_blocks([fast])
        assert_same(fast, plain)


@pytest.mark.parametrize("policy", ["kivi4", "minicache", "int4 + quest(skip_layers=0)"])
def test_what_the_kernel_does_not_know_is_left_to_plain_operations(policy: str, arena: Arena) -> None:
    layers = SequenceCache(arena, SPEC, Policy.parse(policy)).tail.layers
    assert not all(dispatch.knows(layer.page_class, arena.memory) for layer in layers)


def test_seals_that_drop_what_a_window_has_passed_are_left_to_plain_operations(arena: Arena) -> None:
    spec = tiny_spec(num_layers=2, num_heads=2, head_dim=16, sliding={1: 16})
    sequence = read(arena, "int4", spec, (20,))
    assert not can_seal(sequence)
    for _ in range(4):
        fill(sequence, torch.ones(OPEN, 16))
        seal_all([sequence])
    assert max(sequence.stored_lens(1)) < 16 < min(sequence.stored_lens(0))
