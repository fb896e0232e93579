"""The first slots of coarse codes: read as they came, by forks and restored caches too, and counted."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvfold.pages.page_config import num_fp_sinks
from kvfold.pages.read import stored_slots
from kvfold.pages.sequence import SequenceCache
from kvfold.pages.serialize import dump, restore
from kvfold.policy.policy import Policy
from tests.attend.reference import part
from tests.pages.tiny import new_sequence, prefill, random_layers, tiny_spec


@pytest.mark.parametrize(
    ("policy", "count"),
    (
        ("full", 0),
        ("int8", 0),
        ("int4", 4),
        ("int2", 4),
        ("codec(k=int8, v=int2)", 4),
        ("keydiff + 2x + int4", 4),
        ("keydiff + 2x + int4 + protect(sinks=2)", 2),
        ("keydiff + 2x + int4 + protect(none)", 0),
        ("prefill(keydiff + 64tok) + decode(tova + 64tok + protect(sinks=3)) + int4", 3),
        ("keydiff + 64tok + int4 + slot", 0),
        ("keydiff + 2x + int4 + fit(prompt)", 0),
        ("int4 + quest", 4),
        ("h2o + 64tok + int4", 0),
    ),
)
def test_how_many(policy: str, count: int) -> None:
    assert num_fp_sinks(Policy.parse(policy), tiny_spec()) == count


def _sequence(policy: str, num_tokens: int = 60) -> tuple[SequenceCache, Tensor, Tensor]:
    """A sequence, and the keys and values of its layer 1."""
    spec = tiny_spec()
    sequence, layers = new_sequence(policy, spec), random_layers(spec, num_tokens)
    prefill(sequence, layers)
    return sequence, layers[1][1], layers[1][2]


def _is_exact(sequence: SequenceCache, k_HTD: Tensor, v_HTD: Tensor, layer: int = 1) -> list[bool]:
    """Whether the first slots of the layer come back as they were, in every head."""
    stored = stored_slots(sequence, layer, torch.float32)
    k_HSD, v_HSD = (torch.stack([x_SD[:5] for x_SD in side]) for side in (stored.k, stored.v))
    same_HS = (k_HSD == k_HTD[:, :5]).all(-1) & (v_HSD == v_HTD[:, :5]).all(-1)
    return [bool(same) for same in same_HS.all(0)]


@pytest.mark.parametrize("policy", ("int4", "int2", "keydiff + 2x + int4 + protect(recent=4)"))
def test_the_first_four_slots_come_back(policy: str) -> None:
    sequence, k_HTD, v_HTD = _sequence(policy)
    assert _is_exact(sequence, k_HTD, v_HTD)[:4] == [True] * 4
    assert not torch.equal(stored_slots(sequence, 1, torch.float32).k[0][4], k_HTD[0, 4])


def test_layers_of_other_codecs_read_their_codes() -> None:
    sequence, k_HTD, v_HTD = _sequence("int4(layers=:1)")
    assert sequence.fp_sinks is not None and sequence.fp_sinks.fill == 4
    assert _is_exact(sequence, k_HTD, v_HTD) == [True] * 5  # native


def test_a_prompt_of_fewer_tokens_has_none_yet() -> None:
    sequence, k_HTD, _ = _sequence("int4", 3)
    assert sequence.fp_sinks is not None and sequence.fp_sinks.fill == 0
    assert not torch.equal(stored_slots(sequence, 1, torch.float32).k[0][0], k_HTD[0, 0])


@pytest.mark.parametrize("policy", ("int4", "keydiff + 2x + int4 + protect(recent=4)"))
@pytest.mark.parametrize("lens", ([2, 58], [1, 1, 1, 57], [3, 1, 56], [4, 56], [1, 59]))
def test_they_come_in_several_calls(policy: str, lens: list[int]) -> None:
    """Forked and saved in between."""
    spec = tiny_spec()
    sequence, layers = new_sequence(policy, spec), random_layers(spec, 60)
    begin = 0
    for length in lens:
        prefill(sequence, part(layers, begin, begin + length))
        begin += length
        other = new_sequence(policy, spec)
        restore(other, dump(sequence))
        sequence = other.fork()
    assert _is_exact(sequence, layers[1][1], layers[1][2])[:4] == [True] * 4


def test_forks_and_restored_sequences_have_them() -> None:
    sequence, k_HTD, v_HTD = _sequence("int4")
    assert _is_exact(sequence.fork(), k_HTD, v_HTD)[:4] == [True] * 4
    other = new_sequence("int4")
    restore(other, dump(sequence))
    assert _is_exact(other, k_HTD, v_HTD)[:4] == [True] * 4


def test_bytes_are_counted_and_given_back() -> None:
    sequence, *_ = _sequence("int4")
    assert sequence.fp_sinks is not None and sequence.fp_sinks.num_bytes > 0
    assert sequence.resident_bytes == sequence.arena.capacity_bytes - sequence.arena.free_bytes + _beside(sequence)
    sequence.release()
    assert sequence.arena.free_bytes == sequence.arena.capacity_bytes


def _beside(sequence: SequenceCache) -> int:
    """What is not in the arena: tables and mean keys."""
    return sequence.tail.table_bytes + sequence.tail.state_bytes
