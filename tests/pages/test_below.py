"""A codec that needs the layer below, through pages: sealed, read, forked, saved; refused where slots may differ.

The codec is the trial of the contract in tests/codec/test_below.py: int8 of the difference to the layer below.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kvfold.errors import PolicyError
from kvfold.models.check import check_policy
from kvfold.pages.read import stored_slots
from kvfold.pages.sequence import SequenceCache
from kvfold.pages.serialize import dump, restore
from kvfold.policy import Policy, registry
from kvfold.policy.registry import load_variants, register
from kvfold.stats import measure
from tests.attend.reference import Layers, part, read_attention
from tests.codec.test_below import Residual
from tests.pages.tiny import decode, new_sequence, prefill, random_layers, tiny_spec

SPEC = tiny_spec(num_layers=4, num_heads=3, head_dim=16)
CHAINS = [
    "residual(layers=1:)",
    "residual(layers=1::2)",
    "codec(v=residual, layers=1:)",
    "codec(k=residual, layers=2:)",
]


@pytest.fixture(autouse=True)
def residual(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The word `residual`, for the time of a test."""
    load_variants()
    monkeypatch.setattr(registry, "_terms", dict(registry._terms))
    register("codec", "residual")(Residual)
    yield


def stacked(num_tokens: int) -> Layers:
    """Keys and values of each layer are those of the layer below and a little more."""
    layers, found = random_layers(SPEC, num_tokens), []
    k, v = layers[0][1], layers[0][2]
    for q, more_k, more_v in layers:
        k, v = k + 0.05 * more_k, v + 0.05 * more_v
        found.append((q, k, v))
    return found


def filled(codec: str, layers: Layers, page_size: int = 4) -> SequenceCache:
    """A prompt, a shared segment, and decoded tokens in the tail."""
    sequence = new_sequence(f"full + {codec}", SPEC, page_size=page_size)
    prefill(sequence, part(layers, 0, 50))
    sequence.fork()  # not released: its segment stays shared
    for at in range(50, 77):
        decode(sequence, layers, at)
    assert sequence.segments and sequence.open.fill
    return sequence


def worst(sequence: SequenceCache, layers: Layers, side: int) -> float:
    found = []
    for i, layer in enumerate(layers):
        stored = stored_slots(sequence, i, torch.float32)
        exact = layer[side][:, : sequence.sealed_len]
        found.append(float((torch.stack((stored.k, stored.v)[side - 1]) - exact).abs().max()))
    return max(found)


@pytest.mark.parametrize("codec", CHAINS)
def test_slots_come_back_however_long_the_chain(codec: str) -> None:
    """Errors do not add up: each layer is coded against what a reader will have of the one below."""
    layers = stacked(80)
    sequence = filled(codec, layers)
    assert worst(sequence, layers, 1) < 0.003 and worst(sequence, layers, 2) < 0.003


@pytest.mark.parametrize("codec", CHAINS)
def test_a_step_reads_what_is_stored(codec: str) -> None:
    layers = stacked(80)
    sequence = filled(codec, layers)
    expected = [read_attention(sequence, i, *(x[:, 77:78] for x in qkv)) for i, qkv in enumerate(layers)]
    for found, wanted in zip(decode(sequence, layers, 77), expected, strict=True):
        torch.testing.assert_close(found, wanted, atol=2e-5, rtol=1e-4)


def test_it_is_finer_than_the_same_bytes_without_the_layer_below() -> None:
    layers = stacked(80)
    alone, above = filled("int8", layers), filled("codec(v=residual, layers=1:)", layers)
    errors = []
    for sequence in (alone, above):
        v = torch.stack(stored_slots(sequence, 3, torch.float32).v)
        errors.append(float((v - layers[3][2][:, : sequence.sealed_len]).norm()))
    assert errors[1] < errors[0] / 3


def test_a_file_gives_the_same_slots() -> None:
    layers = stacked(80)
    sequence = filled("residual(layers=1:)", layers)
    again = new_sequence(str(sequence.policy), SPEC)
    restore(again, dump(sequence))
    for i in range(SPEC.num_layers):
        for mine, theirs in zip(
            stored_slots(again, i, torch.float32).k, stored_slots(sequence, i, torch.float32).k, strict=True
        ):
            assert torch.equal(mine, theirs)


def test_a_chain_is_read_again_by_every_layer_above() -> None:
    """Layers 1 and 3 read the native ones below them once more; in a whole chain layer 3 reads all four."""
    layers = stacked(50)

    def read(codec: str) -> float:
        sequence = new_sequence(f"full + {codec}", SPEC)
        prefill(sequence, layers)
        return measure(sequence).bytes_per_step / (3 * 50)

    native, coded = 2 * 16 * 4 + 4, 2 * (16 + 4) + 4
    assert read("residual(layers=1::2)") == 4 * native + 2 * coded
    assert read("residual(layers=1:)") == 4 * native + (3 + 2 + 1) * coded


@pytest.mark.parametrize(
    ("policy", "reason"),
    [
        ("knorm + 2x + residual(layers=1:)", "may be evicted there"),
        ("full + quest + residual(layers=1:)", "reader quest cannot read some of its pages alone"),
    ],
)
def test_policies_that_cannot_serve_it_are_refused(policy: str, reason: str) -> None:
    with pytest.raises(PolicyError, match=reason):
        Policy.parse(policy)


def test_layers_that_cannot_serve_it_are_refused() -> None:
    with pytest.raises(PolicyError, match="layer 0 has no layer below; give this codec layers=1:"):
        check_policy(Policy.parse("full + residual"), SPEC)
    sliding = tiny_spec(num_layers=4, sliding={1: 8})
    with pytest.raises(PolicyError, match="layer 1 of tiny does not hold the slots of layer 2"):
        check_policy(Policy.parse("full + residual(layers=2:)"), sliding)
    check_policy(Policy.parse("full + residual(layers=3:)"), sliding)
