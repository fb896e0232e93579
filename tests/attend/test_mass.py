"""Attention mass of a slot: the column sum of the full map, over prompts in chunks, decode steps and evictions.

The map is formed here, one head and one query at a time, over what the head really held at that moment.
"""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch

from kvfold.compression.seal import seal
from kvfold.pages.read import stored_slots
from kvfold.pages.sequence import SequenceCache
from kvfold.passes.decode import DecodePass
from tests.attend.reference import Layers, causal, part, weights
from tests.pages.tiny import decode, new_sequence, prefill, random_layers, tiny_spec

Mass = dict[tuple[int, int], dict[int, float]]  # (layer, head) -> token -> mass
SPEC = tiny_spec(num_heads=3, group=2)
SMALL = "protect(sinks=1, recent=2)"


def add_map(mass: Mass, sequence: SequenceCache, layers: Layers) -> None:
    """Add what the next tokens give to stored slots, open block and themselves."""
    fill, end = sequence.open.fill, sequence.logical_len
    for i, (q, k, _) in enumerate(layers):
        stored = stored_slots(sequence, i, torch.float32)
        for head in range(len(k)):
            tokens = [*stored.position[head].tolist(), *range(sequence.sealed_len, end + k.shape[1])]
            k_SD = torch.cat((stored.k[head], sequence.open.k[i][head, :fill], k[head]))
            mask = causal(k.shape[1], len(k_SD) - k.shape[1])
            for q_TD in q[2 * head : 2 * head + 2]:
                columns = weights(q_TD, k_SD, sequence.spec.layers[i].scale, mask).sum(0)
                for token, value in zip(tokens, columns.tolist(), strict=True):
                    mass[i, head][token] += value


def held_mass(sequence: SequenceCache) -> Mass:
    """What the sequence says, for the slots it holds."""
    found: Mass = defaultdict(dict)
    for i, side in enumerate(sequence.observed.layers):
        for head, length in enumerate(sequence.stored_lens(i)):
            tokens = sequence.positions(i, head).tolist()
            values = side.mass_HS[head, :length].tolist() if side.mass_HS is not None else []
            if side.open_mass_HR is not None:
                values += side.open_mass_HR[head, : sequence.open.fill].tolist()
            found[i, head] = dict(zip(tokens, values, strict=True))
            if side.mass_HS is not None:
                assert (side.mass_HS[head, length:] == 0).all()
    return found


def assert_same(sequence: SequenceCache, expected: Mass) -> None:
    for key, tokens in held_mass(sequence).items():
        assert tokens == pytest.approx({token: expected[key][token] for token in tokens}, rel=1e-3, abs=1e-4)


def zero() -> Mass:
    return defaultdict(lambda: defaultdict(float))


def follow(sequence: SequenceCache, layers: Layers, at: int, expected: Mass) -> None:
    """One committed decode step, compared before and after."""
    step = DecodePass.begin([sequence])  # seals what does not fit: only then is it known what the step will see
    assert_same(sequence, expected)
    add_map(expected, sequence, part(layers, at, at + 1))
    for i, qkv in enumerate(part(layers, at, at + 1)):
        step.attend(i, 0, *qkv)
    step.finish()
    sequence.open.commit(1)
    assert_same(sequence, expected)


@pytest.mark.parametrize("codec", ["native", "int8", "int2"])
@pytest.mark.parametrize("budget", ["uniform", "ada", "global"])
def test_mass_is_the_column_sum(budget: str, codec: str) -> None:
    """A prompt, decode steps with seals and evictions, another prompt; heads of unequal length."""
    layers = random_layers(SPEC, 130)
    sequence = new_sequence(f"h2o + {budget} + 24tok + {SMALL} + {codec}", SPEC)
    expected = zero()
    add_map(expected, sequence, part(layers, 0, 60))
    prefill(sequence, part(layers, 0, 60), [50, 3, 7])
    for at in range(60, 90):
        follow(sequence, layers, at, expected)
    assert any(len(set(sequence.stored_lens(i))) > 1 for i in range(2)) == (budget != "uniform")
    seal(sequence, compress=False)
    add_map(expected, sequence, part(layers, 90, 130))
    prefill(sequence, part(layers, 90, 130), [11, 29])
    assert_same(sequence, expected)


def test_equal_runs_behind_unequal_ones() -> None:
    """After a shared segment of unequal heads, a tail that all heads share in shape starts elsewhere in each row."""
    layers = random_layers(SPEC, 90)
    sequence = new_sequence(f"h2o + ada + 3x + {SMALL}", SPEC)
    expected = zero()
    add_map(expected, sequence, part(layers, 0, 60))
    prefill(sequence, part(layers, 0, 60))
    sequence.fork()  # not released: its segment stays shared
    for at in range(60, 90):
        follow(sequence, layers, at, expected)
    assert any(len(set(layer.lens)) > 1 for layer in sequence.segments[0].layers)
    assert all(run.is_uniform for layer in sequence.tail.layers for run in layer.runs())


def test_nothing_evicted_nothing_lost() -> None:
    """Every query gives one in all, for each query head: a head's mass sums to queries x group."""
    layers = random_layers(SPEC, 400)
    sequence = new_sequence(f"h2o + 1000tok + {SMALL} + int4", SPEC)
    prefill(sequence, part(layers, 0, 300), [300])
    for at in range(300, 330):
        decode(sequence, layers, at)
    prefill(sequence, part(layers, 330, 400))
    for tokens in held_mass(sequence).values():
        assert len(tokens) == 400
        assert sum(tokens.values()) == pytest.approx(400 * 2, rel=1e-4)


def test_a_slot_does_not_inherit_from_a_draft_that_rolled_back() -> None:
    layers = random_layers(SPEC, 60)
    found = []
    for num_drafted in (0, 3):
        sequence = new_sequence(f"h2o + 1000tok + {SMALL}", SPEC, open_len=8)
        prefill(sequence, part(layers, 0, 40))
        if num_drafted:
            draft = DecodePass.begin([sequence], num_drafted)
            for i, qkv in enumerate(part(layers, 40, 40 + num_drafted)):
                draft.attend(i, 0, *qkv)
            draft.finish()
            sequence.open.rollback()
        decode(sequence, layers, 40)
        found.append({key: tokens[40] for key, tokens in held_mass(sequence).items()})
    assert found[0] == pytest.approx(found[1])


def test_positions_that_close_up_are_counted_where_they_are_stored() -> None:
    """`slot` cuts runs where shifts change; the mass of a piece lands on its own slots."""
    layers = random_layers(SPEC, 60)
    sequence = new_sequence(f"h2o + slot + ada + 24tok + {SMALL}", SPEC)
    prefill(sequence, part(layers, 0, 50))
    before = {key: sum(tokens.values()) for key, tokens in held_mass(sequence).items()}
    decode(sequence, layers, 50)
    for key, tokens in held_mass(sequence).items():
        assert sum(tokens.values()) == pytest.approx(before[key] + 2, rel=1e-4)
