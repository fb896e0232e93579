"""`slot` positions: reading equals turning every kept key, one by one, to the place where it appears.

Stored slot i of n appears n - i before the first token that is not sealed; queries stay where they are.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvfold.core import Rope
from kvfold.pages import extent
from kvfold.pages.compaction import rewrite
from kvfold.pages.extent import Piece, find_pieces
from kvfold.pages.layer import LayerChange
from kvfold.pages.read import stored_slots
from kvfold.pages.sequence import SequenceCache
from kvfold.passes.decode import DecodePass
from kvfold.passes.prefill import PrefillPass
from tests.attend.reference import causal, part, rotated, weights
from tests.attend.test_paged import mixed
from tests.pages.tiny import decode, new_sequence, prefill, random_layers, rope, tiny_spec

ROPES = {
    "halves": rope(32),
    "interleaved": rope(32, interleaved=True),
    "partial": rope(32, rotary_dim=8),
    "partial, interleaved": rope(32, rotary_dim=12, interleaved=True),
}


def closed_up(sequence: SequenceCache, layer: int, rope: Rope, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[Q, T, D] over keys rotated to where they appear."""
    shape, fill = sequence.spec.layers[layer], sequence.open.fill
    stored = stored_slots(sequence, layer, torch.float32)
    outs = []
    for i, q_TD in enumerate(q):
        h = i // shape.group
        positions = stored.position[h].tolist()
        first = sequence.sealed_len - len(positions)
        by = [first + at - position for at, position in enumerate(positions)]
        assert all(shift >= 0 for shift in by)
        k_SD = torch.cat((rotated(rope, stored.k[h], by), sequence.open.k[layer][h, :fill], k[h]))
        v_SD = torch.cat((stored.v[h], sequence.open.v[layer][h, :fill], v[h]))
        mask = causal(len(q_TD), len(k_SD) - len(q_TD))
        outs.append(weights(q_TD, k_SD, shape.scale, mask) @ v_SD.double())
    return torch.stack(outs).float()


@pytest.mark.parametrize("codec", ["native", "int8", "kivi4"])
@pytest.mark.parametrize("kind", ROPES)
def test_random_gaps(kind: str, codec: str) -> None:
    """Unequal heads over two segments and a tail, so that equal runs stand at unequal places."""
    spec = tiny_spec(num_heads=3, group=2, head_dim=32, rotated=ROPES[kind])
    layers = random_layers(spec, 100)
    sequence = mixed(codec, spec, layers, position="slot")
    step = DecodePass.begin([sequence], 2)
    for i, qkv in enumerate(part(layers, 93, 95)):
        expected = closed_up(sequence, i, ROPES[kind], *qkv)
        torch.testing.assert_close(step.attend(i, 0, *qkv), expected, atol=3e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", ROPES)
def test_sinks_and_a_window(kind: str) -> None:
    """The pattern of streaming: one gap, which moves on while tokens are decoded; also for the next prompt."""
    spec = tiny_spec(head_dim=32, rotated=ROPES[kind])
    layers = random_layers(spec, 150)
    sequence = new_sequence("streaming(sinks=4) + slot + 24tok + protect(sinks=4, recent=4)", spec)
    prefill(sequence, part(layers, 0, 60))
    for at in range(60, 75):
        decode(sequence, layers, at)
    step = DecodePass.begin([sequence])
    for i, qkv in enumerate(part(layers, 75, 76)):
        expected = closed_up(sequence, i, ROPES[kind], *qkv)
        torch.testing.assert_close(step.attend(i, 0, *qkv), expected, atol=3e-5, rtol=1e-4)
    current = PrefillPass.begin([sequence], [10])
    for i, qkv in enumerate(part(layers, 75, 85)):
        expected = closed_up(sequence, i, ROPES[kind], *qkv)
        torch.testing.assert_close(current.attend(i, 0, *qkv), expected, atol=3e-5, rtol=1e-4)
        current.finish_layer(i)


def test_without_gaps_slot_is_keep() -> None:
    spec = tiny_spec(head_dim=32)
    layers = random_layers(spec, 40)
    outs = []
    for position in ("keep", "slot"):
        sequence = new_sequence(f"full + {position}", spec)
        prefill(sequence, part(layers, 0, 30))
        outs.append(torch.stack([torch.cat(decode(sequence, layers, at)) for at in range(30, 40)]))
    torch.testing.assert_close(outs[0], outs[1])


def test_a_uniform_run_may_stand_at_unequal_places() -> None:
    """Head 0 lost slots in the shared segment, head 1 in the tail: the segment's runs are equal, their shifts not."""
    spec = tiny_spec(num_layers=1, head_dim=32)
    layers = random_layers(spec, 60)
    sequence = new_sequence("full + slot", spec)
    _, k, v = layers[0]
    prefill(sequence, part(layers, 0, 20))
    branch = sequence.fork()  # as long as it lives, the segment is shared
    DecodePass.begin([sequence]).attend(0, 0, *part(layers, 20, 21)[0])  # its shifts are 0 then, and no longer
    seal_heads(sequence, k[:, 20:40], v[:, 20:40], ([0, 1, 19], list(range(8, 20))))
    assert branch.segments == sequence.segments and sequence.segments[0].layers[0].runs()[0].is_uniform
    assert sequence.stored_lens(0) == [23, 32]
    step = DecodePass.begin([sequence])
    qkv = part(layers, 40, 41)[0]
    expected = closed_up(sequence, 0, rope(32), *qkv)
    torch.testing.assert_close(step.attend(0, 0, *qkv), expected, atol=3e-5, rtol=1e-4)


def test_shifts_are_found_once_until_slots_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by a branch, which shares runs but goes on by itself: what it finds is its own."""
    found: list[Tensor] = []

    def counted(shift_hS: Tensor) -> list[Piece] | None:
        found.append(shift_hS)
        return find_pieces(shift_hS)

    monkeypatch.setattr(extent, "find_pieces", counted)
    spec = tiny_spec(head_dim=32)
    layers = random_layers(spec, 150)
    sequence = new_sequence("streaming(sinks=4) + slot + 24tok + protect(sinks=4, recent=4)", spec)
    prefill(sequence, part(layers, 0, 60))
    branch = sequence.fork()
    seen = []
    for at in range(60, 73):
        for one in (sequence, branch):
            step = DecodePass.begin([one])
            for i, qkv in enumerate(part(layers, at + (one is branch), at + 1 + (one is branch))):
                expected = closed_up(one, i, rope(32), *qkv)
                torch.testing.assert_close(step.attend(i, 0, *qkv), expected, atol=3e-5, rtol=1e-4)
            step.finish()
            one.open.commit(1)
        seen.append(len(found))
    assert [after - before for before, after in zip([0, *seen], seen, strict=False)] == [4, 0, 0, 0] * 3 + [4]
    assert sequence.shifts.num_bytes > 0


def seal_heads(sequence: SequenceCache, k: Tensor, v: Tensor, stay: tuple[list[int], list[int]]) -> None:
    """Seal the next tokens of a one-layer model, head by head those at `stay`."""
    position = torch.tensor([sequence.sealed_len + at for head in stay for at in head])
    k_ND, v_ND = (torch.cat([x[head, index] for head, index in enumerate(stay)]) for x in (k, v))
    rewrite(sequence, [LayerChange(k_ND, v_ND, position, [len(head) for head in stay])], k.shape[1])
