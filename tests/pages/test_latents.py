"""Latents through pages: sealed, read, forked, saved and, of single heads, evicted.

The bases are drawn; slots are made of a few of their first axes, so that a rank that holds these loses nothing.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvfold.codec import Palu
from kvfold.pages.dequantize import decode_run
from kvfold.pages.read import stored_slots
from kvfold.pages.sequence import SequenceCache
from kvfold.pages.serialize import dump, restore
from kvfold.passes.captured.step import layout_of
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
            kept.append(basis.rotated(x_ND, position_N).view_as(x_HTD))
        found.append((q, kept[0], kept[1]))
    return found


def filled(policy: str, layers: Layers, num_tokens: int = 77) -> SequenceCache:
    """A prompt, a shared segment, and decoded tokens in the tail."""
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


@pytest.mark.parametrize(
    "given",
    [
        [(0, 0, 1), (1, 2, 2), (0, 5, 1), (1, 6, 1), (0, 8, 1)],  # pages 5 and 6 are adjacent, and of other slots
        [(1, 0, 1), (0, 2, 3), (1, 6, 2)],
        [(0, 0, 3), (1, 3, 3)],
    ],
    ids=["adjacent", "apart", "together"],
)
def test_heads_are_read_together_wherever_their_pages_lie(tmp_path: Path, given: list[tuple[int, int, int]]) -> None:
    """Two heads of 12 slots in pages of 4, in stretches (head, first page, pages)."""
    path, spec = tmp_path / "pair.safetensors", tiny_spec(num_layers=1, num_heads=2)
    random_bases(spec, 2).write(path)
    sequence = new_sequence(f'palu("{path}", rank=1.0)', spec)
    pages = sequence.tail.layers[0]
    (span,) = sequence.arena.allocate(pages.page_class, 9)
    for head, first, count in given:
        pages.grow(head, span, first, count)
    ((_, k, v),) = random_layers(spec, 12)
    counts, position_N = [12, 12], torch.arange(12).repeat(2)
    pages.append(pages.encode(k.flatten(0, 1), v.flatten(0, 1), position_N, counts), counts)
    for side, exact in (("k", k), ("v", v)):
        found: list[list[Tensor]] = [[], []]
        for run in pages.runs():
            x_ND = decode_run(pages, run, side, torch.float32)  # type: ignore[arg-type]
            for head, start, length in zip(run.heads, run.starts, run.lens, strict=True):
                found[head].append(x_ND[start : start + length])
        torch.testing.assert_close(torch.stack([torch.cat(parts) for parts in found]), exact, atol=1e-4, rtol=0)


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
            for x_SD, y_SD in zip(mine.k + mine.v, theirs.k + theirs.v, strict=True):
                torch.testing.assert_close(x_SD, y_SD, rtol=1e-6, atol=1e-6)  # products round by the slots of a run


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


@pytest.mark.parametrize("policy", ["knorm + 2x", "keydiff + ada + 40tok", "streaming + 24tok + slot"])
def test_single_heads_can_evict(tmp_path: Path, policy: str) -> None:
    path = tmp_path / "single.safetensors"
    random_bases(SPEC, 1).write(path)
    layers = low_rank(path, 0.6, 80)
    kept = []
    for codec in ("native", f'palu("{path}", rank=0.6)'):
        sequence = new_sequence(f"{policy} + protect(recent=4) + {codec}", SPEC)
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
