"""`rocket`: pages weighed by a few channels as published, and how little of a long cache a step reads.

H KV heads   G query heads per KV head   D head dim   M pages   P slots of a page
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kvfold.attend.decode import DecodePass
from kvfold.attend.rocket import Rocket, page_weights
from kvfold.errors import PolicyError
from kvfold.pages.arena import Arena
from kvfold.pages.sequence import LayerChange, PageConfig, SequenceCache
from kvfold.policy import Policy
from kvfold.policy.reader import PageView
from kvfold.stats import measure
from tests.pages.tiny import decode, new_sequence, prefill, random_layers, tiny_spec

COARSE = "snapkv(window=32, kernel=63, pool=max, over_window=sum, over_group=sum)"


class Kept:
    """Summaries of one layer as tensors."""

    def __init__(self, low_HMD: Tensor, high_HMD: Tensor) -> None:
        self.bounds = torch.cat((low_HMD, high_HMD), dim=-1)

    def read(self, name: str, element_HC: Tensor | None = None) -> Tensor:
        assert name == "bounds" and element_HC is not None
        return self.bounds.gather(2, element_HC.unsqueeze(1).expand(-1, self.bounds.shape[1], -1))


def weights_by_loop(q_GD: Tensor, low_MD: Tensor, high_MD: Tensor, used: list[int], num_channels: int) -> list[float]:
    """The published formula for one KV head, one number at a time."""
    head_dim = q_GD.shape[1]
    size = [float(q_GD[:, d].abs().mean()) for d in range(head_dim)]
    channels = sorted(range(head_dim), key=lambda d: -size[d])[:num_channels]
    total = [0.0] * len(used)
    for q_D in q_GD:
        heat = math.sqrt(head_dim * sum(abs(float(q_D[d])) for d in channels) / float(q_D.abs().sum()))
        mass = []
        for page, slots in enumerate(used):
            key = [float((high_MD if q_GD[:, d].sum() > 0 else low_MD)[page, d]) for d in channels]
            score = sum(float(q_D[d]) * k for d, k in zip(channels, key, strict=True)) / heat
            mass.append(slots * math.exp(score))
        total = [t + m / sum(mass) / len(q_GD) for t, m in zip(total, mass, strict=True)]
    return total


@pytest.mark.parametrize("num_channels", [1, 3, 8])
def test_weights_are_the_published_formula(num_channels: int) -> None:
    generator = torch.Generator().manual_seed(num_channels)
    q_HGD = torch.randn(2, 3, 8, generator=generator)
    a_HMD, b_HMD = torch.randn(2, 2, 5, 8, generator=generator).unbind(0)
    low_HMD, high_HMD = torch.minimum(a_HMD, b_HMD), torch.maximum(a_HMD, b_HMD)
    used_HM = torch.tensor([[4, 4, 4, 4, 2], [4, 4, 1, 0, 0]])
    found = page_weights(q_HGD, Kept(low_HMD, high_HMD), used_HM, num_channels)
    for head in range(2):
        expected = weights_by_loop(q_HGD[head], low_HMD[head], high_HMD[head], used_HM[head].tolist(), num_channels)
        torch.testing.assert_close(found[head], torch.tensor(expected))


def view_of(q_D: list[float], low_MD: list[list[float]], high_MD: list[list[float]], num_pages: int) -> PageView:
    q_HGTD, used_HM = torch.tensor(q_D).view(1, 1, 1, -1), torch.full((1, len(low_MD)), 4)
    return PageView(q_HGTD, None, Kept(torch.tensor([low_MD]), torch.tensor([high_MD])), used_HM, num_pages)


def test_only_the_largest_channels_are_looked_at() -> None:
    """Two channels, four pages: with 2 tokens one channel counts and page 1 wins, with 4 both do and page 3."""
    low = [[0.0, 0.0], [3.0, -9.0], [1.0, 0.0], [2.0, 9.0]]
    view = view_of([2.0, 1.0], low, low, num_pages=1)
    assert Rocket(tokens=2).select(view).tolist() == [[[1]]]
    assert Rocket(tokens=4).select(view).tolist() == [[[3]]]


def test_pages_without_slots_come_last() -> None:
    """Both real pages weigh nothing beside each other's; the empty one, whatever memory holds, is no page."""
    view = view_of([100.0], [[-90.0], [90.0], [1e9]], [[-90.0], [90.0], [1e9]], num_pages=2)
    view.used_HM[0, 2] = 0
    assert sorted(Rocket(tokens=64).select(view)[0, 0].tolist()) == [0, 1]


@pytest.mark.parametrize("where", [3, 500, 1021])
@pytest.mark.parametrize("codec", ["native", "int8", "int4"])
def test_a_needle_is_found_among_a_thousand_tokens(where: int, codec: str) -> None:
    """Two pages of 256 are read by two channels of 64, and one of them holds the value that answers."""
    spec = tiny_spec(num_layers=1, num_heads=1, group=2, head_dim=64)
    generator = torch.Generator().manual_seed(where)
    k, v = torch.randn(2, 1, 1024, 64, generator=generator).unbind(0)
    needle = torch.zeros(64)
    needle[where % 64] = 30.0
    k[0, where], v[0, where] = needle, torch.arange(64.0)
    sequence = new_sequence(f"full + {codec} + rocket(tokens=16)", spec)
    prefill(sequence, [(k.repeat(2, 1, 1), k, v)])
    nothing = torch.zeros(1, 1, 64)
    found = DecodePass([sequence]).attend(0, 0, needle.expand(2, 1, 64), nothing, nothing)
    torch.testing.assert_close(found, torch.arange(64.0).expand(2, 1, 64), atol=4.5 if codec == "int4" else 0.5, rtol=0)


def test_every_token_of_a_draft_chooses_for_itself() -> None:
    spec = tiny_spec(num_heads=3)
    layers = random_layers(spec, 103)
    alone, draft = (new_sequence("full + rocket(tokens=16)", spec) for _ in range(2))
    for sequence in (alone, draft):
        prefill(sequence, [(q[:, :100], k[:, :100], v[:, :100]) for q, k, v in layers])
    singly = [decode(alone, layers, at) for at in range(100, 103)]
    step = DecodePass([draft], 3)
    for i, (q, k, v) in enumerate(layers):
        together = step.attend(i, 0, q[:, 100:103], k[:, 100:103], v[:, 100:103])
        for t, one in enumerate(singly):
            torch.testing.assert_close(together[:, t : t + 1], one[i])


def test_with_room_for_every_page_it_is_full() -> None:
    spec = tiny_spec()
    layers = random_layers(spec, 61)
    plain, every = (new_sequence(f"full{more}", spec) for more in ("", " + rocket(tokens=999)"))
    for sequence in (plain, every):
        prefill(sequence, [(q[:, :60], k[:, :60], v[:, :60]) for q, k, v in layers])
    for found, expected in zip(decode(every, layers, 60), decode(plain, layers, 60), strict=True):
        assert torch.equal(found, expected)


def sealed(policy: str, num_slots: int, num_tokens: int) -> SequenceCache:
    """A sequence of so many tokens that holds so many slots in each head, bf16, pages of 16."""
    spec = tiny_spec(num_layers=1, num_heads=2, head_dim=64, kv_dtype=torch.bfloat16)
    sequence = SequenceCache(Arena(64 << 20), spec, Policy.parse(policy), PageConfig())
    x_ND = torch.zeros(2 * num_slots, 64, dtype=torch.bfloat16)
    position_N = torch.arange(num_slots).repeat(2)
    sequence.rewrite([LayerChange(x_ND, x_ND, position_N, [num_slots, num_slots])], num_tokens)
    return sequence


@pytest.mark.parametrize(
    ("policy", "num_slots", "read", "channels"),
    [("rocket(tokens=1024)", 32768, 32, 32), (f"{COARSE} + 5.7x + rocket(tokens=256)", 5749, 8, 45)],
)
def test_a_step_at_32k_reads_less_than_a_tenth_of_what_is_held(
    policy: str, num_slots: int, read: int, channels: int
) -> None:
    """Chosen pages, and of every page the channels that are looked at, once."""
    sizes = measure(sealed(policy, num_slots, 32768))
    slot_bytes, pages = 2 * 64 * 2 + 4, -(-num_slots // 16)
    assert sizes.bytes_per_step == 2 * (read * 16 * slot_bytes + pages * (channels * 2 + 8))
    assert sizes.bytes_per_step <= sizes.resident_bytes / 10


def test_elements_are_read_of_the_head_that_owns_a_page() -> None:
    """Two heads in several runs of pages, each asked for channels of its own."""
    spec = tiny_spec(num_heads=2)
    sequence = new_sequence("full + rocket(tokens=16)", spec)
    for start in range(0, 100, 20):  # spans of their own
        now = slice(start, start + 20)
        prefill(sequence, [(q[:, now], k[:, now], v[:, now]) for q, k, v in random_layers(spec, 100)])
    pages = sequence.page_list(0)
    assert len(pages.runs) > 1
    element_HC = torch.tensor([[0, 9], [5, 2]])
    expected = pages.read("bounds").gather(2, element_HC.unsqueeze(1).expand(-1, pages.num_pages, -1))
    assert torch.equal(pages.read("bounds", element_HC), expected)


def test_no_tokens_are_refused() -> None:
    with pytest.raises(PolicyError, match="tokens is at least 1"):
        Policy.parse("full + rocket(tokens=0)")
