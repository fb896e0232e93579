"""`minicache`: the formula on worked numbers, what is kept whole, exact bytes, and slots through pages.

N flat slots   D head dim
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kvfold.codec import MiniCache, Slots
from kvfold.codec.minicache import GROUP, between
from kvfold.errors import InputError, PolicyError
from kvfold.models.check import check_policy
from kvfold.pages.arena import Arena
from kvfold.pages.read import stored_slots
from kvfold.policy import Policy
from kvfold.stats import measure
from tests.attend.reference import part, read_attention
from tests.pages.tiny import SMALL_BLOCK, decode, new_sequence, prefill, random_layers, tiny_spec

SPEC = tiny_spec(num_layers=4, num_heads=2, head_dim=16)


def pairs(num_slots: int, apart: float = 0.3, head_dim: int = 32) -> tuple[Tensor, Tensor]:
    """Slots of two layers that point nearly the same way, of different norms."""
    g = torch.Generator().manual_seed(0)
    lower = torch.randn(num_slots, head_dim, generator=g)
    return lower, 3 * (lower + apart * torch.randn(num_slots, head_dim, generator=g))


def merged(codec: MiniCache, lower_ND: Tensor, upper_ND: Tensor) -> tuple[Tensor, Tensor]:
    """Both layers as a reader gets them."""
    merged_ND = codec.merge_below("k", lower_ND, upper_ND)
    slots = Slots(upper_ND, torch.zeros(len(upper_ND), dtype=torch.int64), merged_ND)
    return merged_ND, codec.decode("k", codec.encode("k", slots, {}), torch.float32, merged_ND)


def test_two_slots_worked_by_hand() -> None:
    """(2, 0) and (0, 4), half the way: both along (1, 1), each as long as before; their mean (1, 2) would be wrong."""
    lower, upper = torch.tensor([[2.0, 0.0]] * GROUP), torch.tensor([[0.0, 4.0]] * GROUP)
    below, above = merged(MiniCache(t=0.5, kept=0), lower, upper)
    torch.testing.assert_close(below, torch.full((GROUP, 2), math.sqrt(2)))
    torch.testing.assert_close(above, torch.full((GROUP, 2), 2 * math.sqrt(2)))


def test_directions_lie_on_the_arc() -> None:
    """A part t of a right angle is t * 90 degrees."""
    u, w = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]])
    for t in (0.0, 0.25, 0.6, 1.0):
        expected = torch.tensor([[math.cos(t * math.pi / 2), math.sin(t * math.pi / 2)]])
        torch.testing.assert_close(between(u, w, t), expected)


def test_equal_and_opposite_directions_stay_finite() -> None:
    u = torch.tensor([[0.6, 0.8]] * 3)
    w = torch.tensor([[0.6, 0.8], [-0.6, -0.8], [0.6 + 1e-6, 0.8 - 1e-6]])
    torch.testing.assert_close(between(u, w, 0.6), u, atol=1e-5, rtol=0)


def test_the_least_alike_of_every_group_stay_whole_in_both_layers() -> None:
    lower, upper = pairs(3 * GROUP)
    distinct = torch.tensor([5, GROUP + 2, 3 * GROUP - 1])
    upper[distinct] = -upper[distinct]
    below, above = merged(MiniCache(kept=1), lower, upper)
    assert below[distinct].equal(lower[distinct]) and above[distinct].equal(upper[distinct])
    others = torch.ones(3 * GROUP, dtype=torch.bool).index_fill(0, distinct, False)
    assert not torch.isclose(below[others], lower[others]).all(-1).any()


def test_norms_stay_and_directions_are_shared() -> None:
    lower, upper = pairs(4 * GROUP)
    below, above = merged(MiniCache(kept=0), lower, upper)
    torch.testing.assert_close(below.norm(dim=-1), lower.norm(dim=-1))
    torch.testing.assert_close(above.norm(dim=-1), upper.norm(dim=-1), rtol=2**-8, atol=0)
    torch.testing.assert_close(torch.cosine_similarity(below, above, dim=-1), torch.ones(4 * GROUP))


def test_what_is_between_errs_less_than_the_layer_below_alone() -> None:
    lower, upper = pairs(4 * GROUP)
    totals = []
    for t in (0.0, 0.5, 1.0):
        below, above = merged(MiniCache(t=t, kept=0), lower, upper)
        turned = [
            torch.cosine_similarity(a, b, dim=-1).clamp(max=1).arccos() for a, b in ((below, lower), (above, upper))
        ]
        totals.append(float(sum(angle.square().sum() for angle in turned)))
    assert totals[1] < 0.6 * min(totals[0], totals[2])


def test_bytes_are_a_norm_and_the_kept_slots() -> None:
    for kept, expected in ((0, 2), (2, 2 + 2 * (32 * 2 + 1) / GROUP)):
        fields = MiniCache(kept=kept).fields("v", 32, torch.bfloat16)
        assert sum(item.bytes() / (GROUP if item.per == "group" else 1) for item in fields) == expected


@pytest.mark.parametrize("codec", ["minicache(layers=1::2)", "codec(v=minicache(kept=3), layers=1::2)"])
def test_pages_hold_merged_layers(codec: str) -> None:
    """A prompt, a shared segment and decoded tokens: pairs that are alike come back nearly as they were, and a step
    reads what is stored."""
    layers = random_layers(SPEC, 120)
    for i in (1, 3):  # like the layer below, and a little more
        (q, k, v), (_, lower_k, lower_v) = layers[i], layers[i - 1]
        layers[i] = q, 2 * lower_k + 0.1 * k, 2 * lower_v + 0.1 * v
    sequence = new_sequence(f"full + {codec}", SPEC)
    prefill(sequence, part(layers, 0, 50))
    branch = sequence.fork()
    for at in range(50, 119):
        decode(sequence, layers, at)
    assert sequence.segments and sequence.sealed_len > 64
    for i, (_, k, v) in enumerate(layers):
        stored = stored_slots(sequence, i, torch.float32)
        for found, exact in ((stored.k, k), (stored.v, v)):
            exact = exact[:, : sequence.sealed_len]
            assert (torch.stack(found) - exact).norm() < 0.05 * exact.norm()
    expected = [read_attention(sequence, i, *(x[:, 119:120] for x in qkv)) for i, qkv in enumerate(layers)]
    for read, wanted in zip(decode(sequence, layers, 119), expected, strict=True):
        torch.testing.assert_close(read, wanted, atol=2e-5, rtol=1e-4)
    branch.release()


def test_what_memory_held_before_bears_on_nothing() -> None:
    """Heads that grow have pages to spare, which are decoded with the others."""
    layers = random_layers(SPEC, 308)
    arena = Arena(4 << 20, superblock_bytes=SMALL_BLOCK)
    found = []
    for byte in (0, 0xFF):
        arena.memory.fill_(byte)
        sequence = new_sequence("full + minicache(layers=1::2)", SPEC, arena=arena)
        prefill(sequence, part(layers, 0, 300))
        found.append(torch.stack([torch.stack(decode(sequence, layers, at)) for at in range(300, 308)]))
        assert any(extent.capacity - extent.length > GROUP for extent in sequence.tail.layers[1].extents[0])
        sequence.release()
    assert found[0].equal(found[1])


def test_memory_is_what_the_fields_say() -> None:
    layers = random_layers(SPEC, 64)
    resident = []
    for codec in ("native", "minicache(kept=2, layers=1::2)"):
        sequence = new_sequence(f"full + {codec}", SPEC)
        prefill(sequence, layers)
        classes = [pages.page_class for pages in sequence.tail.layers]
        resident.append(sum(mine.code_bytes * (64 // mine.page_size) * 2 for mine in classes))
        assert [pages.lens for pages in sequence.tail.layers] == [[64, 64]] * 4
        assert measure(sequence).logical_len == 64
    native, slot = 2 * 16 * 4 + 4, 2 * (2 + 2 * (16 * 4 + 1) / GROUP) + 4
    assert resident == [2 * 64 * 4 * native, 2 * 64 * 2 * (native + slot)]


def test_layers_and_arguments_that_cannot_work_are_refused() -> None:
    with pytest.raises(PolicyError, match="layer 0 has no layer below"):
        check_policy(Policy.parse("full + minicache"), SPEC)
    with pytest.raises(PolicyError, match="may be evicted there"):
        Policy.parse("snapkv + 4x + minicache(layers=1::2)")
    with pytest.raises(PolicyError, match=r"minicache\(t=1.5\): t lies between"):
        Policy.parse("minicache(t=1.5, layers=1::2)")
    with pytest.raises(PolicyError, match=r"minicache\(kept=16\): kept is at least 0"):
        Policy.parse("minicache(kept=16, layers=1::2)")
    with pytest.raises(InputError, match="slots of the layer below, which are missing"):
        MiniCache().encode("k", Slots(torch.zeros(GROUP, 4), torch.zeros(GROUP, dtype=torch.int64)), {})
