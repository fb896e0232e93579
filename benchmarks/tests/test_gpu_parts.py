"""What GPU benchmarks compute on the host: lengths that are drawn, floors, arenas, filled caches."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.gpu import decode
from benchmarks.gpu.common import floor_ms, kv_bytes, llama, random_tokens, weight_bytes
from benchmarks.gpu.fill import arena_bytes, copied, describe, fill, filled, head_lengths, open_bytes, slot_bytes
from benchmarks.gpu.prefill import prompt_flops
from kvfold.engine.cuda_graphs import cuda_graphs_of
from kvfold.engine.runner import Runner
from kvfold.models.attach import attach
from kvfold.pages.arena import Arena
from kvfold.pages.sequence import SequenceCache
from kvfold.policy.policy import Policy

SMALL = {
    "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "intermediate_size": 64, "vocab_size": 50,
}  # fmt: skip


@settings(deadline=None)
@given(layers=st.integers(1, 32), heads=st.integers(1, 16), mean=st.integers(1, 4096), seed=st.integers(0, 99))
def test_lengths_have_the_mean_asked_for(layers: int, heads: int, mean: int, seed: int) -> None:
    lengths = head_lengths(layers, heads, mean, 8 * mean, seed)
    flat = [length for layer in lengths for length in layer]
    assert len(lengths) == layers and all(len(layer) == heads for layer in lengths)
    assert sum(flat) == mean * layers * heads and min(flat) >= 1 and max(flat) <= 8 * mean
    if layers * heads >= 8 and mean > 1:
        assert max(flat) >= 4 * mean


def test_a_seed_fixes_the_draw() -> None:
    assert head_lengths(4, 8, 100, 800, 1) == head_lengths(4, 8, 100, 800, 1) != head_lengths(4, 8, 100, 800, 2)
    assert describe([[1, 7], [2, 2]]) == "2 layers x 2 heads, mean 3, min 1, max 7, max/mean 2.33"
    with pytest.raises(ValueError, match="mean length of 9"):
        head_lengths(2, 2, 9, 8)


@pytest.mark.parametrize("text", ["snapkv + ada + 8x", "snapkv + ada + 8x + int4"])
def test_a_filled_cache_has_these_lengths_and_fits_its_arena(text: str) -> None:
    policy = Policy.parse(text)
    with attach(llama("cpu", torch.float32, **SMALL)) as attached:
        arena = Arena(arena_bytes(attached.spec, policy, 75, sequences=2))
        lengths = head_lengths(2, 2, 75, 600)
        sequences = [SequenceCache(arena, attached.spec, policy) for _ in range(2)]
        for sequence in sequences:
            fill(sequence, lengths, 600)
    assert [sequences[1].stored_lens(layer) for layer in range(2)] == lengths
    positions = sequences[1].positions(0, 1)
    assert sequences[1].sealed_len == 600 and positions.max() < 600 and (positions.diff() > 0).all()


def test_the_memory_of_a_case_is_free_before_the_next_one_asks_for_its_own() -> None:
    model = llama("cpu", torch.float32, **SMALL)
    case = decode.Case("unequal", "bf16", ())
    with attach(model) as attached, decode.batch_of(model, attached.spec, case, 16, 64, 2) as (runner, sequences):
        assert len(sequences) == 2 and runner.arena.used_bytes > 0
    assert runner.arena.memory.untyped_storage().nbytes() == 0  # although it is still held here


@pytest.mark.parametrize("text", ["bf16", "int4"])
def test_a_copy_says_the_same_from_pages_of_its_own(text: str) -> None:
    model, policy = llama("cpu", torch.float32, **SMALL), Policy.parse(text)
    lengths = head_lengths(2, 2, 75, 600)
    with attach(model) as attached:
        runner = Runner(model, attached.spec, Arena(arena_bytes(attached.spec, policy, 75, sequences=2)))
        source = filled(runner, policy, lengths, 600)
        copy = copied(source)
        assert copy is not None and slot_bytes([copy]) == slot_bytes([source]) > 0
        assert copy.resident_bytes == source.resident_bytes and open_bytes([copy]) == copy.open.num_bytes / 2
        assert runner.arena.used_bytes == source.resident_bytes + copy.resident_bytes - _outside_the_arena(source) * 2
        assert [copy.positions(1, head).tolist() for head in range(2)] == [
            source.positions(1, head).tolist() for head in range(2)
        ]
        expected = runner.decode([source], [7])
        source.release()
        runner.arena.memory[: copy.open.spans[0].start * runner.arena.superblock_bytes] = 255  # what the source held
        assert torch.equal(runner.decode([copy], [7]), expected)


def _outside_the_arena(sequence: SequenceCache) -> int:
    """Host tables and what codecs learnt."""
    return sequence.tail.table_bytes + sequence.tail.state_bytes


def test_there_is_no_copy_where_there_is_no_room() -> None:
    model, policy = llama("cpu", torch.float32, **SMALL), Policy.parse("int4")
    with attach(model) as attached:
        runner = Runner(model, attached.spec, Arena(1 << 20))
        source = filled(runner, policy, head_lengths(2, 2, 2000, 16000), 16000)
        free = runner.arena.free_bytes
        copies = []
        while (copy := copied(source)) is not None:
            copies.append(copy)
        lent = free - runner.arena.free_bytes
        assert copies and free < (len(copies) + 1) * lent / len(copies) and lent % len(copies) == 0


@pytest.mark.parametrize(("mode", "num_tokens"), [("eager", 8), ("captured", 6), (decode.WITHOUT, 6)])
def test_timed_steps_write_a_token_each(mode: str, num_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "WARM_UP", 2)
    model, policy = llama("cpu", torch.float32, **SMALL), Policy.parse("bf16")
    with attach(model) as attached:
        runner = Runner(model, attached.spec, Arena(arena_bytes(attached.spec, policy, 200, sequences=2)))
        runner.graphs = cuda_graphs_of(model)
        sequences = [filled(runner, policy, head_lengths(2, 2, 40, 320, seed), 320, seed) for seed in range(2)]
        times = decode.mode_ms(runner, sequences, mode, steps=3)
    assert len(times) == (5 if mode == "eager" else 3) and min(times) > 0
    assert [sequence.committed_len for sequence in sequences] == [320 + num_tokens] * 2


def test_floors_by_hand() -> None:
    model = llama("cpu", torch.float32, **SMALL)
    attention = 32 * 32 + 2 * 32 * 16 + 32 * 32
    layer = attention + 3 * 32 * 64 + 2 * 32
    assert weight_bytes(model) == 4 * (2 * layer + 32 + 50 * 32)  # final norm and head, no input embedding
    assert kv_bytes(10, model.config) == 10 * 2 * 2 * 2 * 8 * 2
    assert floor_ms(4.3e9, 4.3e12) == pytest.approx(1.0)
    # Two operations a weight and token; q.k and weight.v over half of the map, for 4 heads of 8 dims in 2 layers.
    matrices = 2 * (attention + 3 * 32 * 64)
    assert prompt_flops(model.config, 100) == 2 * 100 * matrices + 2 * (4 * 4 * 8 * 100 * 100) / 2


def test_the_random_model_runs() -> None:
    model = llama("cpu", torch.float32, **SMALL)
    logits = model(input_ids=torch.tensor([random_tokens(20, 50)])).logits
    assert logits.isfinite().all() and logits.std() > 0
    assert all(parameter.std() > 0 for parameter in model.parameters() if parameter.ndim > 1)
    frequencies = model.model.rotary_emb.inv_freq
    assert frequencies[0] == 1 and (frequencies.diff() < 0).all()
