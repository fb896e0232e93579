"""`quest`: pages ranked by the published bound, read alone; the bound stays right however slots move.

H KV heads   G query heads per KV head   D head dim   P slots of a page
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvfold.attend.quest import Quest, upper_bound
from kvfold.core import ModelSpec
from kvfold.errors import PolicyError
from kvfold.models.check import check_policy
from kvfold.pages.dequantize import decode_run
from kvfold.pages.read import stored_slots
from kvfold.pages.sequence import SequenceCache
from kvfold.pages.serialize import dump, restore
from kvfold.passes.decode import DecodePass
from kvfold.policy import Policy
from kvfold.policy.registry import terms
from kvfold.stats import measure
from tests.attend.reference import Layers, part, seal_some, weights
from tests.pages.tiny import decode, new_sequence, prefill, random_layers, tiny_spec

SPEC = tiny_spec(num_heads=3, group=2, head_dim=64)
CODECS = [term.name for term in terms("codec") if not (term.variant.needs_below or term.variant.needs_basis)]
P = 4  # page size of these sequences; of kivi 32


def mixed(policy: str, layers: Layers, spec: ModelSpec = SPEC) -> SequenceCache:
    """Two shared segments and a tail of unequal heads, with a few slots open."""
    sequence = new_sequence(policy, spec)
    for start, end, share in ((0, 80, 0.9), (80, 150, 0.4), (150, 190, 0.9)):
        seal_some(sequence, part(layers, start, end), share, seed=start)
        if end < 190:
            sequence.fork()  # not released: its segments stay shared
    for at in range(190, 197):
        decode(sequence, layers, at)
    assert len(sequence.segments) == 2 and sequence.open.fill
    return sequence


def pages_of(sequence: SequenceCache, layer: int, head: int) -> list[range]:
    """Indices of stored slots, page by page, in a head's row; taken from the extents, not from the code under test."""
    found, at = [], 0
    for pages in sequence.layer_parts(layer):
        size = pages.page_class.page_size
        for extent in pages.extents[head]:
            ends = [min(begin + size, extent.length) for begin in range(0, extent.length, size)]
            found += [
                range(at + begin, at + end) for begin, end in zip(range(0, extent.length, size), ends, strict=True)
            ]
            at += extent.length
    return found


def stored_basis(sequence: SequenceCache, layer: int, head: int, q_GD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, what to add to their scores, and decoded keys of one head."""
    pages = sequence.tail.layers[layer]
    q_all = torch.zeros(pages.num_heads, *q_GD.shape)
    q_all[head] = q_GD
    q, offset = pages.page_class.k.query(q_all, pages.state.get("k", {}))
    keys = []
    for part_ in sequence.layer_parts(layer):
        for run in part_.runs():
            k_ND = decode_run(part_, run, "k", torch.float32)
            mine = [(s, n) for h, s, n in zip(run.heads, run.starts, run.lens, strict=True) if h == head]
            keys += [k_ND[s : s + n] for s, n in mine]
    return q[head], torch.zeros(len(q_GD)) if offset is None else offset[head], torch.cat(keys)


def best_pages(sequence: SequenceCache, layer: int, head: int, q_GD: Tensor, count: int) -> list[int]:
    """The formula of the paper, channel by channel; the largest bound among the queries of the group."""
    q, offset, k_SD = stored_basis(sequence, layer, head, q_GD)
    bounds = []
    for slots in pages_of(sequence, layer, head):
        low_D, high_D = k_SD[slots.start : slots.stop].amin(0), k_SD[slots.start : slots.stop].amax(0)
        bounds.append(float((torch.maximum(q * low_D, q * high_D).sum(-1) + offset).max()))
    return sorted(sorted(range(len(bounds)), key=lambda page: -bounds[page])[:count])


def expected_step(sequence: SequenceCache, layer: int, q: Tensor, k: Tensor, v: Tensor, count: int) -> Tensor:
    """[Q, T, D]: each new token over its best pages, exact slots, the open block and the new tokens up to itself."""
    spec, stored, fill = sequence.spec.layers[layer], stored_slots(sequence, layer, torch.float32), sequence.open.fill
    out = torch.empty_like(q)
    for head in range(spec.num_kv_heads):
        mine = slice(head * spec.group, (head + 1) * spec.group)
        for t in range(q.shape[1]):
            best, pages = best_pages(sequence, layer, head, q[mine, t], count), pages_of(sequence, layer, head)
            chosen = {slot for page in best for slot in pages[page]}
            index = torch.tensor(sorted(chosen.union(range(sequence.num_fp_sinks(layer)))))
            k_SD = torch.cat((stored.k[head][index], sequence.open.k[layer][head, :fill].float(), k[head, : t + 1]))
            v_SD = torch.cat((stored.v[head][index], sequence.open.v[layer][head, :fill].float(), v[head, : t + 1]))
            out[mine, t] = (weights(q[mine, t], k_SD, spec.scale) @ v_SD.double()).float()
    return out


def tokens_for(codec: str, num_pages: int) -> int:
    return num_pages * (32 if codec.startswith("kivi") else P)


@pytest.mark.parametrize("codec", CODECS)
def test_a_step_reads_the_pages_of_largest_bound(codec: str) -> None:
    layers = random_layers(SPEC, 200)
    sequence = mixed(f"full + {codec} + quest(tokens={tokens_for(codec, 3)}, skip_layers=0)", layers)
    step = DecodePass.begin([sequence])
    for i, (q, k, v) in enumerate(layers):
        new = q[:, 197:198], k[:, 197:198], v[:, 197:198]
        expected = expected_step(sequence, i, *new, count=3)
        torch.testing.assert_close(step.attend(i, 0, *new), expected, atol=2e-5, rtol=1e-4)


def test_every_token_of_a_draft_chooses_for_itself() -> None:
    layers = random_layers(SPEC, 200)
    sequence = mixed("full + int8 + quest(tokens=12, skip_layers=0)", layers)
    step = DecodePass.begin([sequence], 3)
    q, k, v = (x[:, 197:200] for x in layers[0])
    best = [[best_pages(sequence, 0, head, q[2 * head : 2 * head + 2, t], 3) for t in range(3)] for head in range(3)]
    assert all(pages.count(pages[0]) < 3 for pages in best)
    expected = expected_step(sequence, 0, q, k, v, count=3)
    torch.testing.assert_close(step.attend(0, 0, q, k, v), expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("codec", CODECS)
def test_with_room_for_every_page_it_is_full(codec: str) -> None:
    layers = random_layers(SPEC, 200)
    plain, every = (mixed(f"full + {codec}{more}", layers) for more in ("", " + quest(tokens=9999, skip_layers=0)"))
    for at in range(197, 200):
        for found, expected in zip(decode(every, layers, at), decode(plain, layers, at), strict=True):
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_the_first_layers_read_everything_and_keep_no_summaries() -> None:
    layers = random_layers(SPEC, 200)
    plain, some = (mixed(f"full{more}", layers) for more in ("", " + quest(tokens=8, skip_layers=1)"))
    (first, second), (first_full, second_full) = decode(some, layers, 197), decode(plain, layers, 197)
    assert torch.equal(first, first_full) and not torch.allclose(second, second_full, atol=0.01)
    assert some.page_class(0) == plain.page_class(0)
    assert some.page_class(1).bytes_per_page == plain.page_class(1).bytes_per_page + 2 * 64 * 4


def test_a_prompt_reads_everything() -> None:
    layers = random_layers(SPEC, 120)
    plain, some = (new_sequence(f"full{more}", SPEC) for more in ("", " + quest(tokens=4, skip_layers=0)"))
    for start, end in ((0, 70), (70, 120)):
        for found, expected in zip(*(prefill(s, part(layers, start, end)) for s in (some, plain)), strict=True):
            assert torch.equal(found, expected)


@pytest.mark.parametrize("where", [3, 500, 1021])
def test_a_needle_is_found_among_a_thousand_tokens(where: int) -> None:
    """One page of 256 is read, and it is the one whose value answers."""
    spec = tiny_spec(num_layers=1, num_heads=1, group=2, head_dim=16)
    generator = torch.Generator().manual_seed(where)
    k, v = torch.randn(2, 1, 1024, 16, generator=generator).unbind(0)
    needle = torch.randn(16, generator=generator)
    k[0, where], v[0, where] = 4 * needle, torch.arange(16.0)
    sequence = new_sequence("full + quest(tokens=4, skip_layers=0)", spec)
    prefill(sequence, [(k.repeat(2, 1, 1), k, v)])
    q, nothing = (8 * needle).expand(2, 1, 16), torch.zeros(1, 1, 16)
    found = DecodePass.begin([sequence]).attend(0, 0, q, nothing, nothing)
    torch.testing.assert_close(found, torch.arange(16.0).expand(2, 1, 16), atol=1e-3, rtol=0)
    assert measure(sequence).bytes_per_step < measure_full(spec, k, v) / 3


def measure_full(spec: ModelSpec, k: Tensor, v: Tensor) -> int:
    sequence = new_sequence("full", spec)
    prefill(sequence, [(k.repeat(2, 1, 1), k, v)])
    return measure(sequence).bytes_per_step


def test_the_bound_takes_the_largest_value_for_positive_channels() -> None:
    """By hand: 2 * 3 + (-1) * (-5) = 11. With min and max swapped it would be 2 * 1 + (-1) * 4 = -2."""
    q, low, high = torch.tensor([2.0, -1.0]), torch.tensor([1.0, -5.0]), torch.tensor([3.0, 4.0])
    assert upper_bound(q.view(1, 1, 1, 2), low.view(1, 1, 2), high.view(1, 1, 2)).item() == 11.0


def test_summaries_are_the_least_and_largest_of_used_slots() -> None:
    k = torch.tensor([[[1.0, -5.0], [3.0, 4.0], [torch.nan, 9.0]]])
    found = Quest().summarise(k, torch.tensor([[True, True, False]]))
    assert found["min"].tolist() == [[1.0, -5.0]] and found["max"].tolist() == [[3.0, 4.0]]


def check_summaries(sequence: SequenceCache) -> None:
    """Every listed page: its summary is the least and largest of the keys it holds now."""
    for layer in range(sequence.spec.num_layers):
        pages = sequence.page_list(layer)
        low_HMD, high_HMD = pages.read("min"), pages.read("max")
        for head in range(3):
            k_SD = stored_slots(sequence, layer, torch.float32).k[head]
            listed = pages_of(sequence, layer, head)
            assert pages.used_HM[head].count_nonzero() == len(listed) > 1
            for page, slots in enumerate(listed):
                torch.testing.assert_close(low_HMD[head, page], k_SD[slots.start : slots.stop].amin(0))
                torch.testing.assert_close(high_HMD[head, page], k_SD[slots.start : slots.stop].amax(0))


@pytest.mark.parametrize("policy", ["h2o + ada + 60tok", "keydiff + 60tok", "streaming + 60tok", "full"])
def test_summaries_follow_eviction_forks_and_files(policy: str) -> None:
    layers = random_layers(SPEC, 200)
    protect = "" if policy == "full" else " + protect(sinks=1, recent=4)"
    sequence = new_sequence(f"{policy}{protect} + quest(tokens=12, skip_layers=0)", SPEC)
    prefill(sequence, part(layers, 0, 100))
    check_summaries(sequence)
    for at in range(100, 130):
        decode(sequence, layers, at)
    check_summaries(sequence)
    branch = sequence.fork()
    for at in range(130, 160):
        decode(sequence, layers, at)
        decode(branch, layers, at + 30)
    check_summaries(sequence)
    check_summaries(branch)
    again = new_sequence(str(sequence.policy), SPEC)
    restore(again, dump(sequence))
    check_summaries(again)
    for found, expected in zip(decode(again, layers, 190), decode(sequence, layers, 190), strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("codec", ["native", "int4", "kivi4"])
@pytest.mark.parametrize("reader", ["quest(tokens=12, skip_layers=0)", "rocket(tokens=12)", "quest(12, skip_layers=1)"])
@pytest.mark.parametrize("policy", ["full", "h2o + ada + 60tok + protect(sinks=1, recent=4)"])
def test_a_fork_reads_as_a_sequence_that_was_not_forked(policy: str, reader: str, codec: str) -> None:
    """A half-filled page is copied on write, so pages end where they would have, in the branch and in what was forked,
    also when it is forked again and again, and when the branch has gone."""
    if codec == "kivi4" and policy != "full":
        pytest.skip("kivi4 shares scales between slots: none can be evicted alone")
    layers = random_layers(SPEC, 140)
    expression = f"{policy} + {reader} + {codec}"
    plain, forked = new_sequence(expression, SPEC), new_sequence(expression, SPEC)
    for sequence in (plain, forked):
        prefill(sequence, part(layers, 0, 101))
    branches: list[SequenceCache] = []
    for at in range(101, 136):
        expected = decode(plain, layers, at)
        for sequence in (forked, *branches):
            for found, wanted in zip(decode(sequence, layers, at), expected, strict=True):
                torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
        if at in (103, 110, 121):
            branches.append(forked.fork())
        if at == 126:
            branches.pop(0).release()
    shapes = [[len(pages) for pages in pages_of(plain, 1, head)] for head in range(3)]
    assert all([[len(pages) for pages in pages_of(one, 1, head)] for head in range(3)] == shapes for one in branches)
    for sequence in (plain, forked, *branches):
        sequence.release()
    assert forked.arena.free_bytes == forked.arena.capacity_bytes


def test_memory_that_was_never_written_is_not_read() -> None:
    layers = random_layers(SPEC, 130)
    outs = []
    for garbage in (0, 255):  # a float of all ones is NaN
        sequence = new_sequence(
            "h2o + ada + 60tok + protect(sinks=1, recent=2) + quest(tokens=12, skip_layers=0)", SPEC
        )
        sequence.arena.memory.fill_(garbage)
        prefill(sequence, part(layers, 0, 100))
        outs.append(torch.cat([x for at in range(100, 130) for x in decode(sequence, layers, at)]))
    assert outs[0].isfinite().all() and torch.equal(outs[0], outs[1])


def test_mass_is_given_to_slots_that_were_read() -> None:
    """Each query gives one unit to what it read; slots of other pages get none of it."""
    layers = random_layers(SPEC, 120)
    sequence = new_sequence("h2o + 90tok + protect(sinks=1, recent=2) + never + quest(tokens=8, skip_layers=0)", SPEC)
    prefill(sequence, part(layers, 0, 100))
    before = [side.mass_HS.clone() for side in sequence.observed.layers if side.mass_HS is not None]
    chosen = [best_pages(sequence, 1, head, layers[1][0][2 * head : 2 * head + 2, 100], 2) for head in range(3)]
    decode(sequence, layers, 100)
    side = sequence.observed.layers[1]
    assert side.mass_HS is not None and side.open_mass_HR is not None
    gained_HS = side.mass_HS - before[1]
    for head in range(3):
        read = [slot for page in chosen[head] for slot in pages_of(sequence, 1, head)[page]]
        assert gained_HS[head].nonzero().flatten().tolist() == read
        total = float(gained_HS[head].sum() + side.open_mass_HR[head].sum())
        assert total == pytest.approx(SPEC.layers[1].group, abs=1e-4)


def test_bytes_read_fall_and_bytes_held_do_not() -> None:
    layers = random_layers(SPEC, 400)
    plain, some = (
        new_sequence(f"full{more}", SPEC, page_size=16) for more in ("", " + quest(tokens=64, skip_layers=0)")
    )
    for sequence in (plain, some):
        prefill(sequence, layers)
    slot_bytes = 64 * 4 * 2 + 4
    assert measure(plain).bytes_per_step == 2 * 3 * 400 * slot_bytes
    assert measure(some).bytes_per_step == 2 * 3 * (4 * 16 * slot_bytes + 25 * (2 * 64 * 4 + 8))
    assert measure(some).resident_bytes > measure(plain).resident_bytes


def test_sizes_in_bytes_count_summaries() -> None:
    layers = random_layers(SPEC, 400)
    held = []
    for more in ("", " + quest(tokens=32, skip_layers=0)"):
        sequence = new_sequence(f"keydiff + 400KB + protect(sinks=1, recent=4){more}", SPEC, page_size=16)
        prefill(sequence, layers)
        decode(sequence, layers, 399)
        assert sequence.resident_bytes <= 400_000
        held.append(sum(sequence.stored_lens(0)))
    assert held[1] < held[0]


def test_moved_positions_are_refused() -> None:
    with pytest.raises(PolicyError, match="reader quest ranks pages by keys as they are stored"):
        Policy.parse("streaming + 64tok + slot + quest")


def test_a_reader_that_skips_every_layer_is_refused() -> None:
    with pytest.raises(PolicyError, match="no layer of tiny would select pages"):
        check_policy(Policy.parse("full + quest"), SPEC)
    check_policy(Policy.parse("full + quest(skip_layers=1)"), SPEC)


def test_no_tokens_are_refused() -> None:
    with pytest.raises(PolicyError, match="tokens is at least 1"):
        Policy.parse("full + quest(tokens=0)")
