"""A slot is encoded once: whatever is evicted around it, its bytes stay those of its sealing.

H KV heads   N slots   D head dim
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvfold.compression.seal import seal
from kvfold.errors import PolicyError
from kvfold.pages.read import stored_slots
from kvfold.pages.sequence import SequenceCache
from tests.pages.tiny import decode, new_sequence, prefill, random_layers, tiny_spec

PROMPT, STEPS, OPEN_LEN = 40, 160, 4  # 40 rounds
MOVABLE = ["native", "bf16", "fp8", "int8", "int4", "int2", "codec(k=int8, v=int2)"]
Key = tuple[int, int, int]  # layer, head, position


def codes(sequence: SequenceCache) -> dict[Key, bytes]:
    """All bytes of every sealed slot."""
    found: dict[Key, bytes] = {}
    for i in range(sequence.spec.num_layers):
        for pages in sequence.layer_parts(i):
            fields = pages.gather([torch.arange(length) for length in pages.lens])
            rows = torch.cat([rows.view(torch.uint8).flatten(1) for rows in fields.values()], dim=1).tolist()
            heads = [head for head, length in enumerate(pages.lens) for _ in range(length)]
            positions = fields["position"].flatten().tolist()
            found |= {(i, head, p): bytes(row) for head, p, row in zip(heads, positions, rows, strict=True)}
    return found


def restored(sequence: SequenceCache, layer: int, head: int) -> dict[int, Tensor]:
    stored = stored_slots(sequence, layer, torch.float32)
    return dict(zip(stored.position[head].tolist(), stored.k[head], strict=True))


@pytest.mark.parametrize(("codec", "forked"), [*((codec, False) for codec in MOVABLE), ("int4", True)])
def test_codes_never_change(codec: str, forked: bool) -> None:
    spec = tiny_spec()
    layers = random_layers(spec, PROMPT + STEPS)
    sequence = new_sequence(f"random + ada + 24tok + protect(sinks=2, recent=4) + {codec}", spec, open_len=OPEN_LEN)
    sequence.pinned = [(5, 8)]
    prefill(sequence, [(q[:, :PROMPT], k[:, :PROMPT], v[:, :PROMPT]) for q, k, v in layers])
    known = codes(sequence)
    first_read = [restored(sequence, i, h) for i in (0, 1) for h in (0, 1)]
    other = sequence.fork() if forked else None
    num_rounds = 0
    for at in range(PROMPT, PROMPT + STEPS):
        before = sequence.sealed_len
        decode(sequence, layers, at)
        if sequence.sealed_len > before:
            num_rounds += 1
            now = codes(sequence)
            assert all(known.setdefault(key, code) == code for key, code in now.items())
    assert num_rounds >= 39
    last_read = [restored(sequence, i, h) for i in (0, 1) for h in (0, 1)]
    for before_read, after_read in zip(first_read, last_read, strict=True):
        survivors = before_read.keys() & after_read.keys()
        assert {0, 1, 5, 6, 7} <= survivors and len(after_read) < 40
        assert all(torch.equal(before_read[token], after_read[token]) for token in survivors)
    if other is not None:
        assert codes(other).items() <= known.items() and other.stored_lens(0) == [len(x) for x in first_read[:2]]


@pytest.mark.parametrize("codec", ["int8", "int4", "int2"])
def test_forty_rounds_cost_no_more_than_one(codec: str) -> None:
    """The error of reading a slot is that of its one encoding."""
    spec = tiny_spec(head_dim=64)
    layers = random_layers(spec, PROMPT + STEPS)
    sequence = new_sequence(f"random + 40tok + protect(sinks=16, recent=4) + {codec}", spec, open_len=OPEN_LEN)
    prefill(sequence, [(q[:, :PROMPT], k[:, :PROMPT], v[:, :PROMPT]) for q, k, v in layers])
    exact = layers[1][1][0, :16]

    def error() -> float:
        found = restored(sequence, 1, 0)
        return float((torch.stack([found[token] for token in range(16)]) - exact).norm())

    after_one = error()
    for at in range(PROMPT, PROMPT + STEPS):
        decode(sequence, layers, at)
    assert 0 < error() == after_one


@pytest.mark.parametrize("codec", ["kivi4", "kivi2"])
def test_grouped_codes_cannot_move(codec: str) -> None:
    """One compression after the prompt works; evicting stored slots is refused and changes nothing, in any layer."""
    spec = tiny_spec(num_layers=3, head_dim=32)
    layers = random_layers(spec, 120)
    policy = f"knorm + 2x + protect(sinks=2, recent=4) + {codec}(layers=1:)"
    sequence = new_sequence(policy, spec)
    prefill(sequence, [(q[:, :60], k[:, :60], v[:, :60]) for q, k, v in layers])
    before = [sequence.stored_lens(i) for i in range(3)], sequence.resident_bytes
    assert before[0][0][0] <= 30
    with pytest.raises(PolicyError, match="compress once after the first prompt"):
        prefill(sequence, [(q[:, 60:], k[:, 60:], v[:, 60:]) for q, k, v in layers])
    assert before == ([sequence.stored_lens(i) for i in range(3)], sequence.resident_bytes)


def test_grouped_codes_beside_a_sliding_window_can_be_forked() -> None:
    """What a window leaves behind in a shared segment is masked, not moved."""
    spec = tiny_spec(num_layers=3, head_dim=32, sliding={1: 8})
    layers = random_layers(spec, 80)
    sequence = new_sequence("full + kivi4", spec)
    prefill(sequence, [(q[:, :50], k[:, :50], v[:, :50]) for q, k, v in layers])
    branch = sequence.fork()
    shared = branch.segments[0]
    for at in range(50, 80):
        decode(branch, layers, at)
    assert branch.segments == [shared] and branch.sealed_len == 78
    assert branch.tail.layers[1].lens == [7, 7]


def test_what_codecs_learnt_stays_with_the_first_slots() -> None:
    spec = tiny_spec()
    layers = random_layers(spec, 60)
    sequence = new_sequence("full + int4", spec)
    prefill(sequence, [(q[:, :20], k[:, :20], v[:, :20]) for q, k, v in layers])
    mean = sequence.tail.layers[0].state["k"]["mean"].clone()
    assert torch.allclose(mean, layers[0][1][:, :20].mean(1), atol=1e-6)
    branch = sequence.fork()
    for at in range(20, 60):
        decode(branch, layers, at)
    seal(branch)
    assert torch.equal(branch.tail.layers[0].state["k"]["mean"], mean)
