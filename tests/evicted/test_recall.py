"""Recall over whole runs: all pages recalled give the full cache's logits, and no committed token is ever lost."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvfold.errors import FileError, PolicyError
from kvfold.models.cache import Cache
from kvfold.models.loader import Model
from kvfold.pages.sequence import SequenceCache
from kvfold.policy.policy import Policy
from kvfold.session import Session
from kvfold.store.entry.snapshot import restore_snapshot, snapshot_blocks
from tests.engine.runs import make_runner, make_sequence, scorers
from tests.tiny import build, greedy, prompt, ready

SMALL = "protect(sinks=2, recent=8)"
EVERY = f"{SMALL} + recall(tokens=10000, page=4)"
BY_SENTENCE = f"h2o + lava + 48tok + {SMALL} + recall(page=8, unit=sentence)"
STEPS = ("read", "keep", "write", "draft", "fork")
STREAM = f"streaming(sinks=2) + 40tok + between_chunks(chunk=32) + {SMALL} + recall(tokens=12, page=4)"


def logits_of(model: Model, policy: str, *, num_new: int = 10) -> Tensor:
    """After a prompt, a second one, and each of some tokens."""
    runner = make_runner(model, chunk_len=32)
    sequence = make_sequence(runner, policy)
    try:
        found = [runner.prefill([sequence], [prompt(150)]), runner.prefill([sequence], [prompt(30, seed=2)])]
        found += [runner.decode([sequence], [token]) for token in prompt(num_new, seed=3)]
        return torch.cat(found)
    finally:
        sequence.release()


def assert_nothing_is_lost(sequence: SequenceCache) -> None:
    """Every token stands in every head once, on the device or on the host."""
    assert sequence.offloaded is not None
    for layer, offloaded in sequence.offloaded.layers.items():
        for head in range(sequence.spec.layers[layer].num_kv_heads):
            here, there = sequence.positions(layer, head).tolist(), offloaded.positions(head).tolist()
            assert sorted(here + there) == list(range(sequence.logical_len))


@pytest.mark.parametrize(
    "policy",
    [
        f"streaming(sinks=2) + 40tok + between_chunks(chunk=32) + {EVERY}",
        f"snapkv(window=8) + ada + 4x + {EVERY}",
        f"keydiff + global + 40tok + {EVERY}",
        f"h2o + 40tok + {EVERY}",
        f"streaming(sinks=2) + 40tok + {EVERY} + quest(tokens=10000)",
    ],
)
def test_all_pages_recalled_are_the_full_cache(model: Model, policy: str) -> None:
    torch.testing.assert_close(logits_of(model, policy), logits_of(model, "full"), rtol=1e-3, atol=1e-3)


def test_a_codec_is_seen_through(model: Model) -> None:
    """Slots that were coded before they went are recalled as they were read."""
    found = logits_of(model, f"streaming(sinks=2) + 40tok + int8 + between_chunks(chunk=32) + {EVERY}")
    dropped = logits_of(model, f"streaming(sinks=2) + 40tok + int8 + between_chunks(chunk=32) + {SMALL}")
    full = logits_of(model, "full")
    assert (found - full).abs().mean() < 0.05 * (dropped - full).abs().mean()


def test_sliding_windows_stay_what_they_are() -> None:
    found = ready("gemma3")
    torch.testing.assert_close(
        logits_of(found, f"streaming(sinks=2) + 40tok + {EVERY}"), logits_of(found, "full"), rtol=1e-3, atol=1e-3
    )


def test_few_pages_are_better_than_none(model: Model) -> None:
    full, none = logits_of(model, "full"), logits_of(model, STREAM.replace("recall(tokens=12, page=4)", "drop"))
    some = logits_of(model, STREAM.replace("tokens=12", "tokens=64"))
    assert (some - full).abs().mean() < 0.7 * (none - full).abs().mean()


@pytest.mark.parametrize("score", scorers())
def test_no_score_loses_a_token(model: Model, score: str) -> None:
    runner = make_runner(model)
    unit = "unit=sentence, page=8" if score == "sentence" else "page=4"
    sequence = make_sequence(runner, f"prefill({score} + ada + 3x + recall({unit})) + {SMALL}")
    try:
        runner.prefill([sequence], [prompt(150)])
        assert max(sequence.stored_lens(0)) < 150
        assert_nothing_is_lost(sequence)
    finally:
        sequence.release()


@settings(max_examples=6, deadline=None)
@given(
    steps=st.lists(st.tuples(st.sampled_from(STEPS), st.integers(1, 60)), max_size=4),
    policy=st.sampled_from([STREAM, STREAM + " + slot", BY_SENTENCE]),
)
def test_nothing_is_lost_however_a_sequence_grows(steps: list[tuple[str, int]], policy: str) -> None:
    """Forks go on beside their origin."""
    runner = make_runner(_model())
    sequences = [make_sequence(runner, policy)]
    try:
        runner.prefill(sequences, [prompt(90)])
        for seed, (step, count) in enumerate(steps):
            sequence, ids = sequences[-1], prompt(count, seed=seed)
            if step == "fork":
                sequences.append(sequence.fork())
                runner.prefill([sequence], [ids])
            elif step in ("read", "keep"):
                runner.prefill([sequence], [ids], compress=step == "read")
            else:
                for token in ids[:12]:
                    runner.decode([sequence], [token], commit=[step == "write"])
                sequence.open.rollback()
            for each in sequences:
                assert_nothing_is_lost(each)
    finally:
        for sequence in sequences:
            sequence.release()


def _model(found: list[Model] = []) -> Model:  # noqa: B006 - built once
    found += [] if found else [ready()]
    return found[0]


def test_a_draft_sees_what_single_tokens_see(model: Model) -> None:
    runner, draft = make_runner(model), prompt(4, seed=7)
    rows = []
    for together in (True, False):
        sequence = make_sequence(runner, STREAM)
        try:
            runner.prefill([sequence], [prompt(150)])
            if together:
                rows.append(runner.verify([sequence], [draft])[0].logits_TV)
            else:
                rows.append(torch.cat([runner.decode([sequence], [token]) for token in draft]))
        finally:
            sequence.release()
    torch.testing.assert_close(*rows, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("more", ["", " + slot"])
def test_forks_and_files_go_on_alike(model: Model, tmp_path: Path, more: str) -> None:
    with Session(model, STREAM + more, template=None, page_size=4, open_len=8) as session:
        session.extend(prompt(130))
        session.save(tmp_path / "s")
        with session.fork() as branch, Session.load(model, tmp_path / "s") as loaded:
            assert loaded.stats().slots == session.stats().slots
            replies = [each.generate(max_new_tokens=12).token_ids for each in (branch, session, loaded)]
            assert replies[0] == replies[1] == replies[2]
            for each in (branch, session, loaded):
                assert_nothing_is_lost(each.cache)


def test_a_file_whose_pages_do_not_fit_is_refused(model: Model, tmp_path: Path) -> None:
    with Session(model, STREAM, template=None, page_size=4, open_len=8) as session:
        session.extend(prompt(130))
        assert session.cache.offloaded is not None
        with torch.inference_mode():
            session.cache.offloaded.layers[0].pages.tensors["used"][:, 0] -= 1
        session.save(tmp_path / "s")
        with pytest.raises(FileError, match="does not fit its own header"):
            Session.load(model, tmp_path / "s")


def test_a_sequence_set_aside_comes_back(model: Model) -> None:
    runner = make_runner(model)
    sequence, other = make_sequence(runner, STREAM), make_sequence(runner, STREAM)
    try:
        runner.prefill([sequence], [prompt(130)])
        restore_snapshot(other, 130, snapshot_blocks(sequence).items())
        assert_nothing_is_lost(other)
        torch.testing.assert_close(runner.decode([other], [5]), runner.decode([sequence], [5]), rtol=0, atol=0)
    finally:
        sequence.release()
        other.release()


def test_a_drop_in_cache_recalls(model: Model) -> None:
    ids = prompt(120)
    cache = Cache(model.hf, f"streaming(sinks=2) + 40tok + {EVERY}", page_size=4, open_len=8)
    inputs = torch.tensor([ids])
    found = model.hf.generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        past_key_values=cache,
        do_sample=False,
        max_new_tokens=20,
        pad_token_id=0,
    )
    try:
        assert_nothing_is_lost(cache.sequences[0])
    finally:
        cache.reset()
    assert found[0, len(ids) :].tolist() == greedy(build(), ids, 20)


def test_bytes_are_told_apart(model: Model) -> None:
    """Summaries and the staging area are on the device, what may be recalled is not."""
    plain = STREAM.replace("recall(tokens=12, page=4)", "drop")
    dropped = Session(model, plain, template=None, page_size=4, open_len=8)
    with dropped, Session(model, STREAM, template=None, page_size=4, open_len=8) as session:
        for each in (dropped, session):
            each.extend(prompt(200))
        offloaded = session.cache.offloaded
        assert offloaded is not None
        held = sum(layer.pages.num_bytes for layer in offloaded.layers.values())
        spec = model.spec.layers[0]
        staging = spec.num_kv_heads * 12 * 2 * spec.head_dim * model.spec.kv_dtype.itemsize
        stats, without = session.stats(), dropped.stats()
        assert stats.resident_bytes == without.resident_bytes + held + staging
        assert stats.bytes_per_step == without.bytes_per_step + held + model.spec.num_layers * staging
        assert stats.host_bytes >= sum(sum(layer.slots.lens) for layer in offloaded.layers.values()) * 2 * spec.head_dim
        assert without.host_bytes == 0


@pytest.mark.parametrize(
    ("policy", "reason"),
    [
        ("full + recall", "recall has no effect, since everything is kept"),
        ("streaming + 64tok + recall(tokens=0)", "use drop to recall nothing"),
        ("streaming + 64tok + recall(page=0)", "page is a number from 1 to 1024, not 0"),
        ("streaming + min(64tok, 1MB) + recall", "so min(64tok, 1MB) cannot hold; give a number of slots"),
        ("prefill(h2o + 4x + recall) + decode(h2o + 64tok + recall(page=8))", "recall in two ways from one host store"),
    ],
)
def test_what_cannot_work_is_refused(policy: str, reason: str) -> None:
    with pytest.raises(PolicyError) as caught:
        Policy.parse(policy)
    assert reason in str(caught.value)


def test_one_phase_may_recall_alone(model: Model) -> None:
    runner = make_runner(model)
    sequence = make_sequence(runner, f"prefill(h2o + 4x + recall) + decode(streaming + 20tok) + {SMALL}")
    try:
        runner.prefill([sequence], [prompt(120)])
        assert_nothing_is_lost(sequence)
        on_host = sequence.offloaded.layers[0].slots.lens if sequence.offloaded else []
        for token in prompt(24, seed=3):
            runner.decode([sequence], [token])
        assert sequence.offloaded is not None
        assert sequence.offloaded.layers[0].slots.lens == on_host
    finally:
        sequence.release()


def test_sentence_units_need_token_ids(model: Model) -> None:
    with pytest.raises(PolicyError, match="needs token ids to find sentences"):
        Cache(model.hf, "streaming + 64tok + recall(unit=sentence)")
