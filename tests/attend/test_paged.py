"""Reading a mixed sequence (two shared segments, tail, open block, unequal heads) under every codec of the registry."""

from __future__ import annotations

import pytest
import torch

from kvfold.core import ModelSpec
from kvfold.pages.read import stored_slots
from kvfold.pages.sequence import SequenceCache
from kvfold.passes.decode import DecodePass
from kvfold.passes.prefill import PrefillPass
from kvfold.policy.registry import terms
from tests.attend.reference import Layers, part, read_attention, seal_some
from tests.pages.tiny import decode, new_sequence, prefill, random_layers, tiny_spec

CODECS = [
    *(term.name for term in terms("codec") if not (term.variant.needs_below or term.variant.needs_basis)),
    "codec(k=int8, v=int2)",
    "int4(layers=1:)",
    "codec(k=kivi4, v=bf16)",
]
WORST = {"native": 0.0, "bf16": 0.01, "fp8": 0.05, "int8": 0.02, "int4": 0.2, "int2": 0.7, "kivi4": 0.2, "kivi2": 0.7}


def mixed(codec: str, spec: ModelSpec, layers: Layers, position: str = "keep") -> SequenceCache:
    """Two segments and a tail of unequal heads, then two decode steps: 93 tokens in all."""
    sequence = new_sequence(f"full + {position} + {codec}", spec)
    for start, end, share in ((0, 40, 0.7), (40, 70, 0.3), (70, 91, 0.9)):
        seal_some(sequence, part(layers, start, end), share, seed=start)
        if end < 91:
            sequence.fork()  # not released: its segments stay shared
    for at in (91, 92):
        decode(sequence, layers, at)
    assert len(sequence.segments) == 2 and sequence.open.fill == 2
    return sequence


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(("head_dim", "group"), [(48, 1), (64, 4)])
def test_reading_equals_attention_over_restored_slots(codec: str, head_dim: int, group: int) -> None:
    spec = tiny_spec(num_heads=3, group=group, head_dim=head_dim)
    layers = random_layers(spec, 100)
    sequence = mixed(codec, spec, layers)
    assert all(len(set(sequence.stored_lens(i))) > 1 for i in range(2))
    step = DecodePass.begin([sequence], 2)
    for i, (q, k, v) in enumerate(layers):
        new = q[:, 93:95], k[:, 93:95], v[:, 93:95]
        expected = read_attention(sequence, i, *new)
        torch.testing.assert_close(step.attend(i, 0, *new), expected, atol=2e-5, rtol=1e-4)
    step.finish()
    sequence.open.commit(2)
    current = PrefillPass.begin([sequence], [5])
    for i, qkv in enumerate(part(layers, 95, 100)):
        expected = read_attention(sequence, i, *qkv)
        torch.testing.assert_close(current.attend(i, 0, *qkv), expected, atol=2e-5, rtol=1e-4)
        current.finish_layer(i)
    current.finish()
    assert sequence.sealed_len == 100


@pytest.mark.parametrize("codec", sorted(WORST))
def test_restored_slots_are_those_that_were_sealed(codec: str) -> None:
    spec = tiny_spec(num_heads=3, head_dim=64)
    layers = random_layers(spec, 100)
    sequence = mixed(codec, spec, layers)
    for i, (_, k, v) in enumerate(layers):
        stored = stored_slots(sequence, i, torch.float32)
        for head in range(3):
            for found, exact in ((stored.k, k), (stored.v, v)):
                wanted = exact[head, stored.position[head]]
                assert float((found[head] - wanted).norm() / wanted.norm()) <= WORST[codec]


def test_unused_slots_are_never_read() -> None:
    """Pages hold whatever was in memory before: NaN there must not reach any output."""
    spec = tiny_spec(num_heads=3)
    layers = random_layers(spec, 100)
    outs = []
    for garbage in (0, 255):  # a float of all ones is NaN
        sequence = new_sequence("h2o + ada + 40tok + protect(sinks=1, recent=2)", spec, page_size=16)
        sequence.arena.memory.fill_(garbage)
        found = prefill(sequence, part(layers, 0, 70))
        outs.append(torch.cat([*found, *(x for at in range(70, 100) for x in decode(sequence, layers, at))], dim=1))
    assert outs[0].isfinite().all() and torch.equal(outs[0], outs[1])


def test_a_batch_reads_as_its_sequences_alone() -> None:
    spec = tiny_spec(num_heads=3)
    layers = random_layers(spec, 100)
    lengths = (5, 40, 23)

    def read(index: int) -> SequenceCache:
        sequence = new_sequence("knorm + ada + 20tok + protect(sinks=1, recent=2) + int8", spec)
        prefill(sequence, part(layers, 0, lengths[index]))
        return sequence

    alone = [decode(read(index), layers, 99) for index in range(3)]
    batch = [read(index) for index in range(3)]
    step = DecodePass.begin(batch)
    for i, (q, k, v) in enumerate(layers):
        for index in range(3):
            assert torch.equal(step.attend(i, index, q[:, 99:], k[:, 99:], v[:, 99:]), alone[index][i])


def test_a_shared_pass_fills_followers_as_if_each_read_alone() -> None:
    """Attention once, compression once per policy; what they observed is not shared afterwards."""
    spec = tiny_spec(num_heads=3)
    layers = random_layers(spec, 100)
    policies = [f"{score} + 30tok + protect(sinks=1, recent=2)" for score in ("knorm", "expected", "expected", "h2o")]
    alone = [new_sequence(policy, spec) for policy in policies]
    for sequence in alone:
        prefill(sequence, part(layers, 0, 60))
    first, *followers = [new_sequence(policy, spec) for policy in policies]
    current = PrefillPass.begin([first], [60], followers=followers)
    for i, qkv in enumerate(part(layers, 0, 60)):
        current.attend(i, 0, *qkv)
        current.finish_layer(i)
    current.finish()
    for at in range(60, 90):  # each goes on by itself, with its own statistics
        for mine, other in zip((first, *followers), alone, strict=True):
            for found, expected in zip(decode(mine, layers, at), decode(other, layers, at), strict=True):
                assert torch.equal(found, expected)
