"""One round of compression: who stays, in a stream of layers, beside protected and pinned slots, and merged.

H KV heads   T tokens   D head dim   S slots
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvfold.compression.round import CompressionRound, check_size
from kvfold.compression.view import NewSlots
from kvfold.core import ModelSpec
from kvfold.errors import SizeError
from kvfold.evicted import Merge, Split
from kvfold.pages.read import stored_slots
from kvfold.pages.sequence import SequenceCache
from tests.pages.tiny import decode, fill, new_sequence, prefill, random_layers, step, stored_tokens, tiny_spec

SPEC = tiny_spec(num_layers=4, num_heads=3)
SMALL = "protect(sinks=2, recent=3)"
Layers = list[tuple[Tensor, Tensor, Tensor]]


def kept(sequence: SequenceCache) -> list[list[list[int]]]:
    spec = sequence.spec
    return [[stored_tokens(sequence, i, h) for h in range(x.num_kv_heads)] for i, x in enumerate(spec.layers)]


def uneven(spec: ModelSpec, num_tokens: int, seed: int) -> Layers:
    """Random layers whose key norms differ by layer and head, so that a global choice has something to choose."""
    generator = torch.Generator().manual_seed(seed)
    layers = random_layers(spec, num_tokens, seed)
    return [(q, k * (0.5 + torch.rand(k.shape[0], 1, 1, generator=generator)), v) for q, k, v in layers]


@settings(max_examples=15, deadline=None)
@given(num_tokens=st.integers(60, 120), ratio=st.sampled_from([1.5, 3, 5]), seed=st.integers(0, 1000))
def test_a_stream_of_layers_chooses_as_if_all_were_there(num_tokens: int, ratio: float, seed: int) -> None:
    """global: the K slots of smallest key norm over all layers and heads, in plain Python; protected ones first."""
    layers = uneven(SPEC, num_tokens, seed)
    sequence = new_sequence(f"knorm + global + {ratio}x + {SMALL}", SPEC)
    prefill(sequence, layers, [num_tokens - 7, 7])
    total = (-int(-num_tokens // ratio) - 4) * 12
    ranked = sorted(
        (not (token < 2 or token >= num_tokens - 3), float(k[head, token].norm()), i, head, token)
        for i, (_, k, _) in enumerate(layers)
        for head in range(3)
        for token in range(num_tokens)
    )[:total]
    expected = [
        [sorted(t for _, _, i, h, t in ranked if (i, h) == (layer, head)) for head in range(3)] for layer in range(4)
    ]
    assert kept(sequence) == expected


@pytest.mark.parametrize("budget", ["uniform", "ada", "global"])
@pytest.mark.parametrize("score", ["knorm", "keydiff", "snapkv(window=4)", "tova", "h2o", "expected", "random"])
def test_chunks_do_not_matter(score: str, budget: str) -> None:
    """A pass in several chunks keeps what a pass in one keeps: nothing is scored before its layer is through."""
    layers = uneven(SPEC, 80, seed=3)
    found = []
    for chunks in ([80], [3, 40, 1, 36]):
        sequence = new_sequence(f"{score} + {budget} + 3x + {SMALL}", SPEC)
        prefill(sequence, layers, chunks)
        found.append(kept(sequence))
    assert found[0] == found[1]
    assert sum(len(head) for layer in found[0] for head in layer) == 12 * (27 - 4)


@settings(max_examples=25, deadline=None)
@given(
    score=st.sampled_from(["knorm", "random", "h2o"]),
    budget=st.sampled_from(["uniform", "ada", "global"]),
    seed=st.integers(0, 1000),
    pin=st.integers(2, 60),
    num_steps=st.integers(0, 30),
)
def test_protected_and_pinned_slots_always_stay(score: str, budget: str, seed: int, pin: int, num_steps: int) -> None:
    layers = uneven(SPEC, 110, seed)
    sequence = new_sequence(f"{score} + {budget} + 24tok + {SMALL}", SPEC)
    sequence.pinned = [(pin, pin + 5)]
    prefill(sequence, [(q[:, :80], k[:, :80], v[:, :80]) for q, k, v in layers])
    for at in range(80, 80 + num_steps):
        decode(sequence, layers, at)
    must_stay = {0, 1, *range(pin, pin + 5), *range(sequence.sealed_len - 3, sequence.sealed_len)}
    assert all(must_stay <= set(head) for layer in kept(sequence) for head in layer)
    assert sum(len(head) for layer in kept(sequence) for head in layer) == 12 * 20


def test_streaming_keeps_sinks_and_the_latest() -> None:
    sequence = new_sequence("streaming(sinks=2) + 20tok + protect(sinks=2, recent=3)", SPEC)
    fill(sequence, 50, compress=True)
    assert kept(sequence) == [[[0, 1, *range(36, 50)]] * 3] * 4


def test_between_chunks_a_window_keeps_what_the_next_chunk_sees() -> None:
    """Sizes refer to the end of the call; a sliding window to the end of the chunk."""
    spec = tiny_spec(num_layers=2, sliding={1: 8})
    sequence = new_sequence("streaming(sinks=2) + 20tok + protect(sinks=2, recent=3)", spec)
    for _ in range(3):
        fill(sequence, 16, seen_len=48)
        end = sequence.sealed_len
        assert stored_tokens(sequence, 1, 0) == list(range(end - 7, end))
    assert stored_tokens(sequence, 0, 1) == [0, 1, *range(34, 48)]


def test_evicted_values_merge_into_what_stays() -> None:
    layers = random_layers(SPEC, 60)
    sequence = new_sequence(f"knorm + ada + 2x + {SMALL} + merge", SPEC)
    prefill(sequence, layers)
    for i, (_, k, v) in enumerate(layers):
        stored = stored_slots(sequence, i, torch.float32)
        for head in range(3):
            keep = torch.zeros(60, dtype=torch.bool)
            keep[stored.position[head]] = True
            k_ND, v_ND = Merge().fold(Split(k[head], v[head], torch.arange(60), keep))
            assert torch.equal(stored.k[head], k_ND) and torch.allclose(stored.v[head], v_ND)
            assert not torch.allclose(v_ND, v[head][keep])


def test_merging_leaves_sealed_slots_alone() -> None:
    """Codes never change: in a second round only new slots take something over."""
    layers = random_layers(SPEC, 100)
    sequence = new_sequence(f"knorm + 32tok + {SMALL} + merge", SPEC)
    prefill(sequence, [(q[:, :60], k[:, :60], v[:, :60]) for q, k, v in layers])
    before = stored_slots(sequence, 2, torch.float32)
    prefill(sequence, [(q[:, 60:], k[:, 60:], v[:, 60:]) for q, k, v in layers])
    after = stored_slots(sequence, 2, torch.float32)
    for head in range(3):
        old = {int(p): v for p, v in zip(before.position[head], before.v[head], strict=True)}
        survivors = [
            (old[int(p)], v) for p, v in zip(after.position[head], after.v[head], strict=True) if int(p) in old
        ]
        assert survivors and all(torch.equal(was, now) for was, now in survivors)


def test_an_input_within_its_size_is_kept_whole() -> None:
    sequence = new_sequence(f"knorm + 64tok + {SMALL}", SPEC)
    fill(sequence, 64)
    assert kept(sequence) == [[list(range(64))] * 3] * 4
    assert sequence.last_compressed_len == 0


def test_a_size_below_what_must_stay_is_refused_before_anything_is_read() -> None:
    sequence = new_sequence("knorm + 67tok + protect(sinks=4, recent=32)", SPEC, open_len=32)
    with pytest.raises(SizeError, match="below the 68 that must fit"):
        CompressionRound(sequence, sequence.policy.prefill, 100)


@pytest.mark.parametrize("size", ["8x", "2%mem", "min(2x, 8x)"])
@pytest.mark.parametrize("score", ["knorm + global", "snapkv(window=4)", "h2o + ada"])
def test_a_prompt_too_short_for_its_ratio_stays_whole(score: str, size: str) -> None:
    """8x of 70 tokens are 9 slots, and 9 must stay beside each other; of 60 tokens 8, so nothing is evicted."""
    sequence = new_sequence(f"{score} + {size} + {SMALL}", SPEC)
    fill(sequence, 60)
    assert kept(sequence) == [[list(range(60))] * 3] * 4 and sequence.last_compressed_len == 0
    with pytest.raises(SizeError, match=r"below the (9|10) that must fit"):
        check_size(sequence, 60)
    if size != "2%mem":
        fill(sequence, 30)  # what stayed whole competes with what comes
        assert max(sequence.stored_lens(0)) < 60 and sequence.last_compressed_len == 90
    sequence.release()


def test_a_generation_is_never_refused_in_its_middle() -> None:
    """8x of a short sequence is below what must stay (2 sinks, 3 recent, open block 4): that much is kept then."""
    sequence = new_sequence(f"prefill(full) + decode(knorm + 8x + every(4) + {SMALL})", SPEC)
    fill(sequence, 6)
    for _ in range(34):
        step(sequence)
    assert sequence.stored_lens(0) == [5, 5, 5]
    assert sequence.last_compressed_len == sequence.sealed_len == 38


def test_a_bound_too_small_for_decoding_is_refused_when_the_call_starts() -> None:
    sequence = new_sequence(f"prefill(full) + decode(knorm + 8tok + {SMALL})", SPEC)
    with pytest.raises(SizeError, match="size 8tok of 30 tokens is 8 slots per head, below the 9 that must fit"):
        fill(sequence, 30)
    assert sequence.sealed_len == 0


def test_the_decode_trigger_counts_the_mean_of_all_heads() -> None:
    """One long head among short ones is what `global` is for: it does not make the sequence overflow."""
    policy = f"knorm + global(floor=0) + {SMALL}"
    sequence = new_sequence(f"prefill({policy} + 4x) + decode({policy} + 50tok)", SPEC)
    layers = random_layers(SPEC, 130)
    layers[2][1][1] *= 0.01  # the smallest keys of all
    prefill(sequence, [(q[:, :100], k[:, :100], v[:, :100]) for q, k, v in layers])
    lens = [length for i in range(SPEC.num_layers) for length in sequence.stored_lens(i)]
    assert (max(lens), sum(lens)) == (100, 12 * (25 - 4))
    for at in range(100, 130):
        decode(sequence, layers, at)
        if sum(lens) / len(lens) + 4 + sequence.logical_len - 100 <= 50:
            assert sequence.last_compressed_len == 100
    assert sequence.last_compressed_len > 100


def test_without_a_stage_everything_stays() -> None:
    sequence = new_sequence(f"knorm + 10tok + {SMALL}", SPEC)
    compression = CompressionRound(sequence, None, 40)
    for i, (_, k, v) in enumerate(random_layers(SPEC, 40)):
        compression.add_layer(i, NewSlots(k, v, 0))
    compression.finish(40)
    assert kept(sequence) == [[list(range(40))] * 3] * 4
