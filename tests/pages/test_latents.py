"""Latents through pages: sealed, read, forked, saved and, of single heads, evicted.

The bases are drawn; slots are made of a few of their first axes, so that a rank that holds these loses nothing.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvfold.attend.kernels.step import layout_of
from kvfold.codec import Palu
from kvfold.pages.dump import dump, restore
from kvfold.pages.read import stored_slots
from kvfold.pages.sequence import SequenceCache
from kvfold.stats import measure
from tests.attend.reference import Layers, part, read_attention
from tests.codec.bases import random_bases
from tests.pages.tiny import decode, new_sequence, prefill, random_layers, tiny_spec

SPEC = tiny_spec(num_layers=3, num_heads=4, head_dim=16)


@pytest.fixture(params=[1, 2, 4], ids="heads={}".format)
def file(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / "bases.safetensors"
    random_bases(SPEC, request.param).write(path)
    return path


def low_rank(file: Path, rank: float, num_tokens: int) -> Layers:
    """Random queries; keys and values that the rank's axes hold whole."""
    codec, found = Palu(str(file), rank=rank), []
    for i, (q, *sides) in enumerate(random_layers(SPEC, num_tokens)):
        position_N, counts = torch.arange(num_tokens).repeat(4), [num_tokens] * 4
        kept = []
        for side, x_HTD in zip(("k", "v"), sides, strict=True):
            basis = codec.basis(side, SPEC, i, torch.device("cpu"))  # type: ignore[arg-type]
            shares = basis.latents(x_HTD.flatten(0, 1), position_N, counts).split(counts)
            size = basis.num_heads
            groups = [torch.cat(shares[head - head % size :][:size], -1) for head in range(4)]
            x_ND = torch.cat([basis.slots(head, latent) for head, latent in enumerate(groups)])
            kept.append(basis.turned(x_ND, position_N).view_as(x_HTD))
        found.append((q, kept[0], kept[1]))
    return found


def filled(policy: str, layers: Layers, num_tokens: int = 77) -> SequenceCache:
    """A prompt, a shared segment, and decoded tokens in the tail, in pages that are scattered."""
    sequence = new_sequence(policy, SPEC)
    prefill(sequence, part(layers, 0, 50))
    sequence.fork()  # not released: its segment stays shared
    for at in range(50, num_tokens):
        decode(sequence, layers, at)
    assert sequence.segments and sequence.open.fill
    return sequence


def worst(sequence: SequenceCache, layers: Layers) -> float:
    found = 0.0
    for i, (_, k, v) in enumerate(layers):
        stored = stored_slots(sequence, i, torch.float32)
        for rows, exact in ((stored.k, k), (stored.v, v)):
            error = torch.stack(rows) - exact[:, : sequence.sealed_len]
            found = max(found, float(error.abs().max()))
    return found


@pytest.mark.parametrize("rank", [1.0, 0.6])
def test_slots_on_the_axes_come_back(file: Path, rank: float) -> None:
    layers = low_rank(file, rank, 80)
    assert worst(filled(f'palu("{file}", rank={rank})', layers), layers) < 1e-4


@pytest.mark.parametrize("codec", ['palu("{}", rank=0.7)', 'palu("{}", int4)', 'codec(k=int4, v=palu("{}"))'])
def test_a_step_reads_what_is_stored(file: Path, codec: str) -> None:
    layers = random_layers(SPEC, 80)
    sequence = filled(codec.format(file), layers)
    expected = [read_attention(sequence, i, *(x[:, 77:78] for x in qkv)) for i, qkv in enumerate(layers)]
    for found, wanted in zip(decode(sequence, layers, 77), expected, strict=True):
        torch.testing.assert_close(found, wanted, atol=2e-5, rtol=1e-4)


def test_heads_whose_pages_lie_apart_are_read_together(file: Path) -> None:
    """Another sequence takes pages between each block, so that no two extents of a head are adjacent."""
    layers = low_rank(file, 0.6, 120)
    first = new_sequence(f'palu("{file}", rank=0.6)', SPEC)
    second = new_sequence("full", SPEC, arena=first.arena)
    for at in range(120):
        decode(first, layers, at)
        decode(second, layers, at)
    for layer in first.tail.layers:
        for head, extents in enumerate(layer.extents):  # as if memory had been given out in other pieces
            last = extents[-1]
            cut = 1 + head % 2
            if last.num_pages > cut and last.length > cut * 4:
                rest = type(last)(last.span, last.first + cut, last.num_pages - cut, last.length - cut * 4)
                last.num_pages, last.length = cut, cut * 4
                extents.append(rest)
        layer.touch()
    assert len({tuple(extent.length for extent in extents) for extents in first.tail.layers[0].extents}) > 1
    assert worst(first, layers) < 1e-4


def test_a_file_and_a_fork_give_the_same_slots(file: Path) -> None:
    layers = random_layers(SPEC, 80)
    sequence = filled(f'palu("{file}", int8, rank=0.5)', layers)
    again = new_sequence(str(sequence.policy), SPEC)
    saved = dump(sequence)
    assert not any("state" in name for name in saved)  # bases are the model's
    restore(again, saved)
    for other in (again, sequence.fork()):
        for i in range(SPEC.num_layers):
            mine, theirs = stored_slots(other, i, torch.float32), stored_slots(sequence, i, torch.float32)
            assert all(map(torch.equal, mine.k + mine.v, theirs.k + theirs.v))


def test_bytes_are_those_of_the_latents(file: Path) -> None:
    """A slot holds as many numbers as its head has latents on both sides, and a position."""
    layers = random_layers(SPEC, 64)
    widths = Palu(str(file), rank=0.5).widths
    assert sum(widths.values()) == 0.5 * 3 * 2 * 16
    read = {}
    for codec, per_number, extra in (("", 4, 0), ("int8, ", 1, 4), ("int4, ", 0.5, 4)):
        sequence = new_sequence(f'palu("{file}", {codec}rank=0.5)', SPEC)
        prefill(sequence, layers)
        read[codec] = sequence.resident_bytes
        numbers = sum(widths.values()) * per_number + 3 * 2 * extra + 3 * 4
        assert measure(sequence).bytes_per_step == 64 * 4 * numbers
    whole = new_sequence("full", SPEC)
    prefill(whole, layers)
    assert whole.resident_bytes > read[""] > read["int8, "] > read["int4, "]


@pytest.mark.parametrize(
    "policy", ["knorm + 2x + protect(recent=4)", "keydiff + ada + 40tok + protect(recent=4)", "streaming + 24tok + slot + protect(recent=4)"]
)
def test_single_heads_can_evict(tmp_path: Path, policy: str) -> None:
    path = tmp_path / "single.safetensors"
    random_bases(SPEC, 1).write(path)
    layers = low_rank(path, 0.6, 80)
    kept = []
    for codec in ("native", f'palu("{path}", rank=0.6)'):
        sequence = new_sequence(f"{policy} + {codec}", SPEC)
        prefill(sequence, part(layers, 0, 60))
        outs = [decode(sequence, layers, at) for at in range(60, 80)]
        kept.append((outs, [sequence.positions(i, head).tolist() for i in range(3) for head in range(4)]))
    (exact, positions), (found, same) = kept
    assert positions == same
    for mine, theirs in zip(found, exact, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-3)


def test_kernels_leave_it_to_the_plain_reader(file: Path) -> None:
    assert layout_of(new_sequence("full", SPEC, page_size=16)) is not None
    assert layout_of(new_sequence(f'palu("{file}")', SPEC, page_size=16)) is None
