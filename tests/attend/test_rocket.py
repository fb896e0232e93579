"""`rocket`: slots weighed by sketches of their keys, and how little of a long cache a step reads.

H KV heads   G query heads per KV head   D head dim   M pages   P slots of a page
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kvfold.attend.rabitq import products, rotate, sketch
from kvfold.attend.rocket import Rocket
from kvfold.attend.topk import select_topk
from kvfold.errors import PolicyError
from kvfold.pages.arena import Arena
from kvfold.pages.compaction import rewrite
from kvfold.pages.layer import LayerChange
from kvfold.pages.page_config import PageConfig
from kvfold.pages.sequence import SequenceCache
from kvfold.passes.decode import DecodePass
from kvfold.policy import Policy
from kvfold.policy.reader import PageView
from kvfold.stats import measure
from tests.pages.tiny import decode, new_sequence, prefill, random_layers, tiny_spec

COARSE = "snapkv(window=32, kernel=63, pool=max, over_window=sum, over_group=sum)"


class Kept:
    """Sketches of one layer as tensors."""

    def __init__(self, k_HMPD: Tensor, used_HM: Tensor) -> None:
        used_MP = torch.arange(k_HMPD.shape[2]) < used_HM.flatten().unsqueeze(-1)
        self.rows = sketch(k_HMPD.flatten(0, 1), used_MP)
        self.shape = used_HM.shape

    def read(self, name: str) -> Tensor:
        return self.rows[name].reshape(*self.shape, -1)


def random_keys(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def product_by_loop(q_D: Tensor, k_D: Tensor, mean: list[float]) -> float:
    """The formula for one slot, one number at a time, over the mean that is kept of its page."""
    q, rotated = rotate(q_D).tolist(), rotate(k_D).tolist()
    rest = [k - m for k, m in zip(rotated, mean, strict=True)]
    factor = sum(r * r for r in rest) / sum(abs(r) for r in rest)
    terms = [a * (m + math.copysign(factor, r)) for a, m, r in zip(q, mean, rest, strict=True)]
    return math.fsum(terms)


@pytest.mark.parametrize("head_dim", [8, 12, 64])
def test_products_are_the_formula(head_dim: int) -> None:
    """Two heads of two pages, one of which is half used; what all keys share is part of the mean."""
    k_HMPD, q_HXD = random_keys(0, 2, 2, 4, head_dim) + 3.0, random_keys(1, 2, 3, head_dim)
    used_HM = torch.tensor([[4, 2], [4, 4]])
    k_HMPD[0, 1, 2], k_HMPD[0, 1, 3] = 1e4, torch.nan
    kept = Kept(k_HMPD, used_HM)
    found_HXS = products(q_HXD, kept)
    assert not found_HXS.isnan().any()
    for head, page, slot in ((0, 0, 0), (0, 0, 3), (0, 1, 1), (1, 1, 2)):
        scale, zero = kept.read("mean_grid")[head, page].float().tolist()
        mean = [code * scale + zero for code in kept.read("mean")[head, page].tolist()]
        k_PD = k_HMPD[head, page, : used_HM[head, page]]
        torch.testing.assert_close(torch.tensor(mean), rotate(k_PD).mean(0), atol=0.51 * scale, rtol=0)
        for x, q_D in enumerate(q_HXD[head]):
            expected = product_by_loop(q_D, k_PD[slot], mean)
            tolerance = 2**-8 * float(rotate(q_D).abs().sum())  # factors of about 1, in bf16
            assert float(found_HXS[head, x, 4 * page + slot]) == pytest.approx(expected, abs=tolerance)


def test_a_sketch_tells_the_product_with_what_it_was_made_of() -> None:
    """Along what a key differs from its page's mean by, nothing is lost: the factor is made for that."""
    k_HMPD = random_keys(2, 1, 1, 4, 64)
    rest_PD = k_HMPD[0, 0] - k_HMPD[0, 0].mean(0)
    found_HXS = products(rest_PD.unsqueeze(0), Kept(k_HMPD, torch.tensor([[4]])))
    expected_P = (rest_PD * k_HMPD[0, 0]).sum(-1)
    torch.testing.assert_close(found_HXS[0].diagonal(), expected_P, atol=0.5, rtol=0)


def test_the_rotation_keeps_products_and_is_not_its_own_inverse() -> None:
    """Keys that a codec has rotated already would stand as they were."""
    a_ND, b_ND = random_keys(3, 2, 5, 64).unbind(0)
    torch.testing.assert_close(rotate(a_ND) @ rotate(b_ND).T, a_ND @ b_ND.T)
    spike_D = torch.zeros(64)
    spike_D[7] = 8.0
    assert rotate(rotate(spike_D)).abs().max() < 4.0


def view_of(k_HMPD: Tensor, q_HGTD: Tensor, num_units: int, *, unit: int = 1, scale: float = 1.0) -> PageView:
    num_heads, num_pages, page_size, _ = k_HMPD.shape
    used_HU = torch.full((num_heads, num_pages * page_size // unit), unit)
    kept = Kept(k_HMPD, torch.full((num_heads, num_pages), page_size))
    return PageView(q_HGTD, None, scale, kept, used_HU, num_units, page_size)


@pytest.mark.parametrize("unit", [1, 4])
@pytest.mark.parametrize("scale", [0.1, 1.0])
def test_weights_are_shares_of_attention_averaged_over_the_group(scale: float, unit: int) -> None:
    """And the first four slots are read whatever they weigh."""
    k_HMPD, q_HGTD = random_keys(4, 2, 6, 4, 16), random_keys(5, 2, 3, 2, 16)
    view = view_of(k_HMPD, q_HGTD, 8 // unit, unit=unit, scale=scale)
    z_HGTS = products(q_HGTD.flatten(1, 2), view.summaries).view(2, 3, 2, 24)
    weight_HTU = (z_HGTS * scale).softmax(-1).mean(1).view(2, 2, 24 // unit, unit).sum(-1)
    found_HTW = Rocket().select(view)
    first, others = list(range(4 // unit)), 4 // unit
    for head in range(2):
        for t in range(2):
            order = weight_HTU[head, t].argsort(descending=True).tolist()
            best = [u for u in order if u not in first][:others]
            assert sorted(found_HTW[head, t].tolist()) == sorted(first + best)


@pytest.mark.parametrize(("empty", "light"), [(1, 3), (3, 1)])
def test_units_without_slots_come_last(empty: int, light: int) -> None:
    """Slots that weigh nothing beside the best are slots all the same; the empty page, whatever it holds, is none."""
    k_HMPD = torch.full((1, 4, 4, 8), -90.0)
    k_HMPD[0, 2], k_HMPD[0, empty] = 90.0, torch.inf
    view = view_of(k_HMPD, torch.full((1, 1, 1, 8), 100.0), 12)
    view.used_HU[0, 4 * empty : 4 * empty + 4] = 0
    read = {slot // 4 for slot in Rocket().select(view)[0, 0].tolist()}
    assert read == {0, 2, light}


@pytest.mark.parametrize("where", [3, 500, 1021])
@pytest.mark.parametrize("codec", ["native", "fp8", "int8", "int4"])
def test_a_needle_is_found_among_a_thousand_tokens(where: int, codec: str) -> None:
    """16 slots are read, and one of them holds the value that answers."""
    spec = tiny_spec(num_layers=1, num_heads=1, group=2, head_dim=64)
    generator = torch.Generator().manual_seed(where)
    k, v = torch.randn(2, 1, 1024, 64, generator=generator).unbind(0)
    needle = torch.zeros(64)
    needle[where % 64] = 30.0
    k[0, where], v[0, where] = needle, torch.arange(64.0)
    sequence = new_sequence(f"full + {codec} + rocket(tokens=16)", spec)
    prefill(sequence, [(k.repeat(2, 1, 1), k, v)])
    nothing = torch.zeros(1, 1, 64)
    found = DecodePass.begin([sequence]).attend(0, 0, needle.expand(2, 1, 64), nothing, nothing)
    atol = {"fp8": 2.0, "int4": 4.5}.get(codec, 0.5)  # of the values
    torch.testing.assert_close(found, torch.arange(64.0).expand(2, 1, 64), atol=atol, rtol=0)


def test_every_token_of_a_draft_chooses_for_itself() -> None:
    spec = tiny_spec(num_heads=3)
    layers = random_layers(spec, 103)
    alone, draft = (new_sequence("full + rocket(tokens=16)", spec) for _ in range(2))
    for sequence in (alone, draft):
        prefill(sequence, [(q[:, :100], k[:, :100], v[:, :100]) for q, k, v in layers])
    singly = [decode(alone, layers, at) for at in range(100, 103)]
    step = DecodePass.begin([draft], 3)
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
    rewrite(sequence, [LayerChange(x_ND, x_ND, position_N, [num_slots, num_slots])], num_tokens)
    return sequence


@pytest.mark.parametrize(
    ("policy", "num_slots", "read"),
    [("rocket(tokens=1024)", 32768, 1024), (f"{COARSE} + 5.7x + rocket(tokens=256)", 5749, 256)],
)
def test_a_step_at_32k_reads_less_than_a_tenth_of_what_is_held(policy: str, num_slots: int, read: int) -> None:
    """Chosen slots, and all sketches: a bit of each channel and a factor by slot, a byte of each and a grid by page."""
    sizes = measure(sealed(policy, num_slots, 32768))
    slot_bytes, pages = 2 * 64 * 2 + 4, -(-num_slots // 16)
    assert sizes.bytes_per_step == 2 * (read * slot_bytes + pages * (16 * (64 // 8 + 2) + 64 + 4 + 8))
    assert sizes.bytes_per_step <= sizes.resident_bytes / 10


def test_codecs_that_decode_groups_are_read_by_the_group() -> None:
    spec = tiny_spec(num_layers=1, num_heads=1, head_dim=64)
    sequence = new_sequence("full + kivi4 + rocket(tokens=64)", spec)
    layers = random_layers(spec, 321)
    prefill(sequence, [(q[:, :320], k[:, :320], v[:, :320]) for q, k, v in layers])
    page_class = sequence.page_list(0).page_class
    assert page_class.reader.unit(page_class.page_size, page_class.group) == 32
    q_HGTD = layers[0][0][:, 320:].unflatten(0, (1, -1))
    chosen = select_topk(sequence, 0, q_HGTD)
    assert chosen is not None and chosen.slot_RS.shape == (1, 64)
    assert chosen.slot_RS[0].view(2, 32).diff(dim=1).eq(1).all() and int(chosen.slot_RS[0, 0]) == 0


def test_slots_come_from_the_run_that_holds_them() -> None:
    """Two heads in several runs: what is gathered is what lies at the place it names."""
    spec = tiny_spec(num_heads=2)
    sequence = new_sequence("full + rocket(tokens=16)", spec)
    layers = random_layers(spec, 100)
    for start in range(0, 100, 20):  # spans of their own
        now = slice(start, start + 20)
        prefill(sequence, [(q[:, now], k[:, now], v[:, now]) for q, k, v in layers])
    assert len(sequence.page_list(0).runs) > 1
    q, k_HSD, v_HSD = layers[0]
    chosen = select_topk(sequence, 0, q[:, 99:].unflatten(0, (2, -1)))
    assert chosen is not None and chosen.valid_RS.all()
    for head in range(2):
        torch.testing.assert_close(chosen.k_RSD[head], k_HSD[head, chosen.slot_RS[head]])
        torch.testing.assert_close(chosen.v_RSD[head], v_HSD[head, chosen.slot_RS[head]])


def published_order(q_GD: Tensor, k_SD: Tensor, ratio: float) -> Tensor:
    """Weights [S] of RocketKV's second stage for one step of one KV head, as its code has them."""
    num_slots, dim = k_SD.shape
    page = math.ceil(math.sqrt(ratio))
    page = page if page <= ratio else 1
    channels = q_GD.abs().mean(0).topk(int(dim * page / ratio)).indices.tolist()
    sign = [1.0 if float(total) > 0 else -1.0 for total in q_GD.sum(0)]
    rows = []
    for q_D in q_GD:
        row = []
        for slot in range(num_slots):
            first = slot // page * page
            largest = {d: max(float(k_D[d]) * sign[d] for k_D in k_SD[first : first + page]) for d in channels}
            row.append(sum(float(q_D[d]) * sign[d] * largest[d] for d in channels))
        share = sum(abs(float(q_D[d])) for d in channels) / float(q_D.abs().sum())
        rows.append(torch.softmax(torch.tensor(row) / math.sqrt(dim * share), dim=0))
    return torch.stack(rows).mean(0)


@pytest.mark.parametrize("ratio", [1.5, 4.0, 5.6, 12.0])
def test_pages_are_the_published_second_stage(ratio: float) -> None:
    """Pages of 1, 2, 3 and 4 slots, judged in all channels, a half, nearly a half and a third; memory pages of 12, so
    that both begin together. Of tied slots of a page any may be read, so only weights are compared."""
    spec = tiny_spec(num_layers=1, num_heads=2, group=3, head_dim=16)
    sequence = new_sequence(f"full + rocket(tokens=10, reader=pages, ratio={ratio})", spec, page_size=12)
    q, k, v = random_layers(spec, 61, seed=7)[0]
    prefill(sequence, [(q[:, :60], k[:, :60], v[:, :60])])
    chosen = select_topk(sequence, 0, q[:, 60:].unflatten(0, (2, -1)))
    assert chosen is not None and chosen.valid_RS.all()
    for head in range(2):
        expected_S = published_order(q[3 * head : 3 * head + 3, 60], k[head, :60], ratio)
        found = expected_S[chosen.slot_RS[head]].sort(descending=True).values
        torch.testing.assert_close(found, expected_S.topk(10).values)
        assert len(set(chosen.slot_RS[head].tolist())) == 10


def test_pages_that_end_with_a_memory_page_are_shorter() -> None:
    """Memory pages of 4 and pages of 3: slots 0-2, 3, 4-6, 7, ...; a page half filled counts what it has."""
    spec = tiny_spec(num_layers=1, num_heads=1, group=1, head_dim=8)
    sequence = new_sequence("full + rocket(tokens=1, reader=pages, ratio=9)", spec, page_size=4)
    k, q = torch.zeros(1, 14, 8), torch.zeros(1, 1, 1, 8)
    k[0, 7, 0], k[0, 13, 1], q[..., :2] = 5.0, 9.0, torch.tensor([1.0, 0.5])
    prefill(sequence, [(k, k, k)])
    for bigger, slot in ((0, 7), (1, 13)):
        q[..., bigger] = 50.0
        chosen = select_topk(sequence, 0, q)
        assert chosen is not None
        read = int(chosen.slot_RS[0, 0])
        assert read == slot if slot == 7 else read in (12, 13)
        q[..., bigger] = 1.0


@pytest.mark.parametrize("codec", ["native", "int8", "kivi4"])
def test_pages_with_room_for_everything_read_all(codec: str) -> None:
    spec = tiny_spec(head_dim=32)
    layers = random_layers(spec, 65)
    policies = [f"full + {codec}", f"full + {codec} + rocket(tokens=999, reader=pages)"]
    sequences = [new_sequence(policy, spec, page_size=32) for policy in policies]
    for sequence in sequences:
        prefill(sequence, [(q[:, :64], k[:, :64], v[:, :64]) for q, k, v in layers])
    plain, every = (decode(sequence, layers, 64) for sequence in sequences)
    for found, expected in zip(every, plain, strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("tokens=0", "tokens is at least 1"),
        ("ratio=4", "ratio sizes the pages of reader=pages"),
        ("reader=pages, ratio=0.5", "ratio, of slots held to the token budget, is at least 1, not 0.5"),
        ("reader=bits", "reader takes sketch or pages, not bits"),
    ],
)
def test_bad_arguments_are_refused(arguments: str, message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        Policy.parse(f"full + rocket({arguments})")
