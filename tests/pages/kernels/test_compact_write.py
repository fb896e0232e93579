"""What survives a compression is the same whether one launch writes it or plain operations do."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from kvfold.compression.seal import seal
from kvfold.pages import compaction as rewrite
from kvfold.pages.arena import Arena
from kvfold.pages.kernels import compact_write as writing
from kvfold.pages.kernels.batch_seal import seal_blocks
from kvfold.pages.kernels.encodings import knows
from kvfold.pages.layer import LayerChange
from kvfold.pages.page_config import PageConfig
from kvfold.pages.segment import Segment
from kvfold.pages.sequence import SequenceCache
from kvfold.passes.prefill import PrefillPass
from kvfold.policy.policy import Policy
from tests.attend.kernels.common import DEVICE
from tests.pages.kernels.test_seal import ONE, assert_same, fields, fill, stored
from tests.pages.tiny import tiny_spec

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("triton_writes")

SPEC = tiny_spec(num_layers=2, num_heads=2, head_dim=16)


def read(policy: str, arena: Arena, lengths: tuple[int, ...]) -> SequenceCache:
    """Prompts one after the other, each compressed."""
    found = SequenceCache(arena, SPEC, Policy.parse(policy), PageConfig(16, 16))
    generator = torch.Generator(DEVICE).manual_seed(1)
    for length in lengths:
        prefill = PrefillPass.begin([found], [length])
        for layer in range(SPEC.num_layers):
            q, k, v = (torch.randn(h, length, 16, generator=generator, device=DEVICE) for h in (4, 2, 2))
            prefill.attend(layer, 0, q, k * (layer + 1), v + layer)
            prefill.finish_layer(layer)
        prefill.finish()
    return found


@pytest.mark.parametrize(
    "policy",
    [
        "full",
        "int4",
        "int2",
        "fp8",
        "int4(layers=1:)",
        "codec(k=int4(group_size=8), v=kivi2)",
        "codec(k=kivi4, v=fp8)",
        "knorm + ada + 2x",
        "knorm + global + 2x + int4",
        "prefill(knorm + ada + 2x + fit(prompt)) + int4 + protect(none)",
        "prefill(knorm + ada + 2x + fit(prompt)) + protect(none)",
    ],
)
def test_one_launch_writes_what_plain_operations_write(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arena = Arena(1 << 24, device=DEVICE, superblock_bytes=4096)
    arena.memory.fill_(63)  # what others have left there, which fields must not show
    lengths = (110,) if "fit" in policy else (110, 20, 50)  # the second time extents are half full, and some heads full
    monkeypatch.setattr(rewrite, "can_write", lambda *_: False)
    plain = read(policy, arena, lengths)
    served: list[bool] = []

    def can_write(tail: Segment, changes: Sequence[LayerChange]) -> bool:
        memory, dtype = tail.arena.memory, changes[0].k_ND.dtype
        served.append(all(writing.serves(layer.page_class, memory, dtype) for layer in tail.layers))
        return served[-1]

    monkeypatch.setattr(rewrite, "can_write", can_write)
    fast = read(policy, arena, lengths)
    assert served == [True] * len(lengths)
    assert fast.sealed_len == plain.sealed_len
    for i, (a, b) in enumerate(zip(fast.tail.layers, plain.tail.layers, strict=True)):
        assert a.lens == b.lens
        for name in (field.name for field in a.page_class.fields):
            for x, y in zip(fields(a, name), fields(b, name), strict=True):
                differing = (x.view(torch.uint8) != y.view(torch.uint8)).float().mean()
                rotated = name in ("k.code", "k.scale", "k.zero")  # by a sum that may be rounded otherwise
                assert differing <= (0.005 if rotated else 0.0), (i, name)
    fast.release()
    plain.release()
    assert arena.used_bytes == 0


def begin_together(policies: Sequence[str], arenas: Sequence[Arena], lens: Sequence[int]) -> list[SequenceCache]:
    """Prompts that run through every layer in one call."""
    parsed = map(Policy.parse, policies)
    found = [
        SequenceCache(arena, SPEC, policy, PageConfig(16, 16)) for policy, arena in zip(parsed, arenas, strict=True)
    ]
    generator = torch.Generator(DEVICE).manual_seed(1)
    prefill = PrefillPass.begin(found, lens)
    for layer in range(SPEC.num_layers):
        q, k, v = (torch.randn(h, sum(lens), 16, generator=generator, device=DEVICE) for h in (4, 2, 2))
        assert prefill.attend_joined(layer, range(len(lens)), lens, q, k * (layer + 1), v + layer) is not None
        prefill.finish_layer(layer)
    prefill.finish()
    return found


@pytest.mark.parametrize("lens", [(20, 110, 33), (40, 40, 40)])
def test_one_launch_writes_several_prompts(lens: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    arena = Arena(1 << 24, device=DEVICE, superblock_bytes=4096)
    arena.memory.fill_(63)
    policies, arenas = ("full", "keydiff + 60tok + fp8", "codec(k=kivi4, v=fp8)"), [arena] * 3
    monkeypatch.setattr(rewrite, "can_write", lambda *_: False)
    plain = begin_together(policies, arenas, lens)
    launches: list[int] = []
    monkeypatch.setattr(rewrite, "can_write", lambda *_: True)

    def write_new(tails: Sequence[tuple[Segment, Sequence[LayerChange]]]) -> None:
        launches.append(len(tails))
        writing.write_new(tails)

    monkeypatch.setattr(rewrite, "write_new", write_new)
    fast = begin_together(policies, arenas, lens)
    assert launches == [3]
    for mine, theirs in zip(fast, plain, strict=True):
        assert_same(mine, theirs)
        for sequence in (mine, theirs):
            sequence.release()
    assert arena.used_bytes == 0


def test_prompts_of_several_arenas_are_written_each_in_its_own() -> None:
    arenas = [Arena(1 << 24, device=DEVICE, superblock_bytes=4096) for _ in range(3)]
    policies = ("full", "int8", "keydiff + 60tok + int8")
    apart = begin_together(policies, arenas, (40, 70, 70))
    for mine, theirs in zip(apart, begin_together(policies, arenas[:1] * 3, (40, 70, 70)), strict=True):
        assert_same(mine, theirs)


def test_a_block_that_ends_within_a_group_ends_its_extent(monkeypatch: pytest.MonkeyPatch) -> None:
    arena = Arena(1 << 24, device=DEVICE, superblock_bytes=4096)
    plain, fast = (stored("kivi4", arena, 64, 0, page_size=128, open_len=48, spec=ONE) for _ in range(2))
    for count in (40, 32):
        fill(plain, count, seed=count)
        seal(plain)
    fill(fast, 40, seed=40)
    monkeypatch.setattr(rewrite, "can_write", lambda *_: True)
    seal(fast)
    fill(fast, 32, seed=32)
    seal_blocks([fast])
    assert_same(fast, plain)


@pytest.mark.parametrize("policy", ["minicache", "int4 + quest(skip_layers=0)"])
def test_what_the_kernel_does_not_know_is_left_to_plain_operations(policy: str) -> None:
    arena = Arena(1 << 24, device=DEVICE, superblock_bytes=4096)
    layers = SequenceCache(arena, SPEC, Policy.parse(policy), PageConfig(16, 16)).tail.layers
    assert not all(knows(layer.page_class) for layer in layers)
