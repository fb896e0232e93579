"""Layers that the one below tells of, through pages: sealed, read, forked and saved.

The lifts are drawn; odd layers are made by them from what stands below, and a little more.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvfold.attend.kernels.step import layout_of
from kvfold.codec import Aqua
from kvfold.pages.dump import dump, restore
from kvfold.pages.read import stored_slots
from kvfold.pages.sequence import SequenceCache
from kvfold.stats import measure
from tests.attend.reference import Layers, part, read_attention
from tests.codec.lifts import random_lifts
from tests.pages.tiny import decode, new_sequence, prefill, random_layers, tiny_spec

SPEC = tiny_spec(num_layers=4, num_heads=3, head_dim=16)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "lifts.safetensors"
    random_lifts(SPEC).write(path)
    return path


def told(file: Path, num_tokens: int, more: float = 0.05) -> Layers:
    """Random queries; odd layers follow from even ones but for `more`."""
    codec, found = Aqua(str(file)), list(random_layers(SPEC, num_tokens))
    for i in (1, 3):
        q, more_k, more_v = found[i]
        lifts = [codec.lift(side, SPEC, i, torch.device("cpu")) for side in ("k", "v")]
        k, v = (lift(x, torch.arange(num_tokens)) for lift, x in zip(lifts, found[i - 1][1:], strict=True))
        found[i] = q, k + more * more_k, v + more * more_v
    return found


def filled(policy: str, layers: Layers) -> SequenceCache:
    """A prompt, a shared segment, and decoded tokens in the tail."""
    sequence = new_sequence(policy, SPEC)
    prefill(sequence, part(layers, 0, 50))
    sequence.fork()  # not released: its segment stays shared
    for at in range(50, 77):
        decode(sequence, layers, at)
    assert sequence.segments and sequence.open.fill
    return sequence


def errors(sequence: SequenceCache, layers: Layers) -> list[float]:
    """By layer, the largest of both sides."""
    found = []
    for i, (_, *sides) in enumerate(layers):
        stored = stored_slots(sequence, i, torch.float32)
        pairs = zip((stored.k, stored.v), sides, strict=True)
        found.append(max(float((torch.stack(x) - exact[:, : sequence.sealed_len]).abs().max()) for x, exact in pairs))
    return found


def test_what_is_told_costs_no_bits(file: Path) -> None:
    """Two bits of a twentieth, over roots that are exact: as fine as 6 bits of the whole."""
    layers = told(file, 80)
    found = errors(filled(f'aqua("{file}", roots=native)', layers), layers)
    assert found[0] == found[2] == 0 and max(found) < 0.12
    assert max(errors(filled("int2", layers), layers)[1::2]) > 10 * max(found)


def test_errors_of_roots_are_made_up_for(file: Path) -> None:
    """A layer is coded against what a reader will have of the one below, not against what that was."""
    layers = told(file, 80)
    found = errors(filled(f'aqua("{file}", int8, roots=int2)', layers), layers)
    assert max(found[1::2]) < 0.02 < 1 < max(found[::2])


@pytest.mark.parametrize("codec", ['aqua("{}")', 'aqua("{}", layers=1:)', 'codec(k=aqua("{}", int4), v=int8)'])
def test_a_step_reads_what_is_stored(file: Path, codec: str) -> None:
    layers = told(file, 80)
    sequence = filled(codec.format(file), layers)
    assert layout_of(sequence) is None, "no kernel takes it for something else"
    expected = [read_attention(sequence, i, *(x[:, 77:78] for x in qkv)) for i, qkv in enumerate(layers)]
    for found, wanted in zip(decode(sequence, layers, 77), expected, strict=True):
        torch.testing.assert_close(found, wanted, atol=2e-5, rtol=1e-4)


def test_codes_do_not_depend_on_what_is_sealed_with_them(file: Path) -> None:
    layers = told(file, 64)
    whole, parts = (new_sequence(f'aqua("{file}", roots=bf16)', SPEC) for _ in range(2))  # a mean key would differ
    prefill(whole, layers)
    for start in range(0, 64, 16):
        prefill(parts, part(layers, start, start + 16))
    for i in (1, 3):
        mine, theirs = (sequence.tail.layers[i] for sequence in (whole, parts))
        codes = [pages.gather([torch.arange(64)] * 3) for pages in (mine, theirs)]
        assert all(codes[0][name].equal(codes[1][name]) for name in ("k.code", "v.code", "k.scale", "v.zero"))


def test_a_file_gives_the_same_slots(file: Path) -> None:
    layers = told(file, 80)
    sequence = filled(f'aqua("{file}")', layers)
    again = new_sequence(str(sequence.policy), SPEC)
    restore(again, dump(sequence))
    assert errors(again, layers) == errors(sequence, layers)


def test_bytes_are_those_of_the_codes(file: Path) -> None:
    """Lifts belong to the model; a step reads the roots twice, which are not kept exact as int8."""
    sequence = new_sequence(f'aqua("{file}", int8, roots=int8)', SPEC)
    prefill(sequence, told(file, 50))
    exact, coded = 4 * 2 * 16 * 4, 50 * (2 * (16 + 4) + 4)
    assert measure(sequence).bytes_per_step == 3 * (2 * exact + (4 + 2) * coded)
    alone = new_sequence("int8", SPEC)
    assert sequence.page_class(1).code_bytes == alone.page_class(1).code_bytes
    assert not any(sequence.tail.layers[1].state.values()), "nothing is learnt of what is told"
