"""The order of work never shows: layer-major chunks, batches, shared prefills and prefix hits give the same result."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from kvfold.budget.select import ranks
from kvfold.engine.generate import generate
from kvfold.engine.output_processor import Request
from kvfold.engine.runner import Runner
from kvfold.errors import InputError
from kvfold.models.loader import Model
from kvfold.pages.compaction import PageRewrite
from kvfold.pages.sequence import SequenceCache
from kvfold.policy.bind import missing_arguments
from kvfold.policy.policy import Policy
from kvfold.policy.registry import terms
from kvfold.score import SnapKV, View
from tests.engine.runs import Shared, kept, make_runner, make_sequence, prefill_and_generate, scorers
from tests.tiny import prompt

LENGTH = 203
CHUNK = 16


def budgets() -> list[str]:
    Policy.parse("full")  # loads the variants
    return [term.name for term in terms("budget") if not missing_arguments(term, ())]


def codecs() -> list[str]:
    Policy.parse("full")
    return [term.name for term in terms("codec") if not (term.variant.needs_below or term.variant.needs_basis)]


@pytest.mark.parametrize("score", scorers())
def test_layer_major_is_one_shot(model: Model, score: str) -> None:
    policy = f"{score} + 3x"
    whole = prefill_and_generate(model, [policy], [prompt(LENGTH)], num_new=4)
    assert prefill_and_generate(model, [policy], [prompt(LENGTH)], chunk_len=33, num_new=4) == whole
    positions = whole[0][1]
    assert 0 < len(positions[0][0]) < LENGTH


@pytest.mark.parametrize("budget", budgets())
def test_layer_major_is_one_shot_for_every_budget(shared: Shared, budget: str) -> None:
    policies, prompts = [f"snapkv(window=8) + {budget} + 3x"], [prompt(LENGTH)]
    for model in (shared("llama"), shared("gemma3")):
        whole = prefill_and_generate(model, policies, prompts, num_new=4)
        assert prefill_and_generate(model, policies, prompts, chunk_len=40, num_new=4) == whole


def test_ragged_batch_of_policies_is_single_runs(model: Model) -> None:
    sizes = ["3x", "70tok", "4x"]
    policies = [f"prefill({score} + {sizes[i % 3]})" for i, score in enumerate(scorers())]
    prompts = [prompt(LENGTH + 7 * i, seed=i) for i in range(len(policies))]
    alone = [prefill_and_generate(model, [policy], [ids])[0] for policy, ids in zip(policies, prompts, strict=True)]
    assert prefill_and_generate(model, policies, prompts, chunk_len=64) == alone


def test_decode_triggers_fire_alike_in_batch_and_alone(model: Model) -> None:
    policies = ["h2o + 60tok", "prefill(knorm + 2x) + decode(tova + 60tok)", "streaming + 60tok + slot", "full"]
    prompts = [prompt(100 + i, seed=i) for i in range(4)]
    alone = [
        prefill_and_generate(model, [policy], [ids], num_new=24)[0]
        for policy, ids in zip(policies, prompts, strict=True)
    ]
    assert prefill_and_generate(model, policies, prompts, num_new=24) == alone


def test_prefill_many_is_single_prefills(model: Model) -> None:
    policies = [*(f"{score} + 3x" for score in scorers()), "full + int8", "knorm + 64tok + between_chunks(chunk=32)"]
    runner, ids = make_runner(model, chunk_len=32), prompt(LENGTH)
    together = [make_sequence(runner, policy) for policy in policies]
    alone = [make_sequence(runner, policy) for policy in policies]
    try:
        logits = runner.prefill_many(together, ids)
        single = torch.cat([runner.prefill([sequence], [ids]) for sequence in alone])
        torch.testing.assert_close(logits, single, atol=1e-4, rtol=1e-4)
        assert [kept(sequence) for sequence in together] == [kept(sequence) for sequence in alone]
        assert [s.observed.num_bytes for s in together] == [s.observed.num_bytes for s in alone]
        assert _continue(model, runner, together, logits) == _continue(model, runner, alone, single)
    finally:
        for sequence in (*together, *alone):
            sequence.release()


def test_prefill_many_scores_once_for_all_sizes(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    score, calls = SnapKV.score, []

    def counted(self: SnapKV, view: View) -> torch.Tensor:
        calls.append(view.layer)
        return score(self, view)

    monkeypatch.setattr(SnapKV, "score", counted)
    sizes = ["2x", "ada + 4x + int4", "global + 4x", "3x + protect(sinks=9)", "4x + merge"]
    policies = [f"{score} + {size}" for score in ("snapkv", "chunk(snapkv, reuse=2)", "tree") for size in sizes]
    runner, ids = make_runner(model, chunk_len=32), prompt(LENGTH)
    together, alone = ([make_sequence(runner, policy) for policy in policies] for _ in range(2))
    runner.prefill_many(together, ids)
    layers = range(model.spec.num_layers)
    assert calls == [layer for layer in layers for _ in range(1 if layer % 2 else 2)]
    for sequence in alone:
        runner.prefill([sequence], [ids])
    assert [kept(sequence) for sequence in together] == [kept(sequence) for sequence in alone]
    for sequence in (*together, *alone):
        sequence.release()


def test_prefill_many_ranks_once_for_all_sizes(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes and budgets share the order of scores; another protection has an order of its own."""
    calls = []

    def counted(score_HS: torch.Tensor) -> torch.Tensor:
        calls.append(score_HS)
        return ranks(score_HS)

    monkeypatch.setattr("kvfold.budget.base.ranks", counted)
    sizes = ["2x", "ada + 3x + int4", "ada(floor=0.5) + 4x", "global + 4x", "3x + protect(sinks=9)"]
    runner = make_runner(model)
    sequences = [make_sequence(runner, f"keydiff + {size}") for size in sizes]
    runner.prefill_many(sequences, prompt(LENGTH))
    assert len(calls) == 2 * model.spec.num_layers
    for sequence in sequences:
        sequence.release()


def test_prefill_many_followers_decode_apart(model: Model) -> None:
    """Policies that go on observing queries while they decode must not observe each other's."""
    policies = ["expected + 60tok", "expected + 90tok", "tova + 60tok", "h2o + 60tok"]
    runner, ids = make_runner(model), prompt(LENGTH)
    together = [make_sequence(runner, policy) for policy in policies]
    alone = [make_sequence(runner, policy) for policy in policies]
    try:
        logits = runner.prefill_many(together, ids)
        single = torch.cat([runner.prefill([sequence], [ids]) for sequence in alone])
        assert _continue(model, runner, together, logits, 24) == _continue(model, runner, alone, single, 24)
        assert [kept(sequence) for sequence in together] == [kept(sequence) for sequence in alone]
        assert [_num_queries(sequence) for sequence in together] == [_num_queries(sequence) for sequence in alone]
    finally:
        for sequence in (*together, *alone):
            sequence.release()


def _num_queries(sequence: SequenceCache) -> list[int]:
    """Queries whose moments were added up, by layer."""
    return [side.moments.count for side in sequence.observed.layers if side.moments is not None]


def _continue(
    model: Model, runner: Runner, sequences: list[SequenceCache], logits: torch.Tensor, num_new: int = 12
) -> list[list[int]]:
    requests = [Request(s, row, num_new) for s, row in zip(sequences, logits, strict=True)]
    for _ in generate(runner, requests, model.tokenizer):
        pass
    return [request.token_ids for request in requests]


def test_prefill_many_wants_empty_sequences(model: Model) -> None:
    runner = make_runner(model)
    sequence = make_sequence(runner, "full")
    runner.prefill([sequence], [prompt(5)])
    for wrong in ([sequence], []):
        with pytest.raises(InputError, match="one or more empty sequences"):
            runner.prefill_many(wrong, prompt(5))
    sequence.release()


@pytest.mark.parametrize("score", scorers(at_any_time=True))
def test_between_chunks_holds_its_bound(model: Model, score: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    write = PageRewrite.write

    def watched(self: PageRewrite, num_tokens: int) -> None:
        write(self, num_tokens)
        sizes.append(max(max(self.sequence.stored_lens(i)) for i in range(self.sequence.spec.num_layers)))

    monkeypatch.setattr(PageRewrite, "write", watched)
    runner = make_runner(model)
    sequence = make_sequence(runner, f"{score} + 56tok + between_chunks(chunk={CHUNK})", open_len=8)
    runner.prefill([sequence], [prompt(LENGTH)])
    sequence.release()
    assert len(sizes) == -(-LENGTH // CHUNK)
    assert max(sizes) <= 56 - 8
    assert all(after >= before for before, after in pairwise(sizes))


def _hit_and_miss(model: Model, num_stored: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits after four chunks: in one go, and over a prefix that was stored before."""
    runner, ids = make_runner(model, chunk_len=CHUNK), prompt(4 * CHUNK)
    cold, hit = make_sequence(runner, "full"), make_sequence(runner, "full")
    miss = runner.prefill([cold], [ids])
    runner.prefill([hit], [ids[:num_stored]])
    found = runner.prefill([hit], [ids[num_stored:]])
    cold.release()
    hit.release()
    return found, miss


@pytest.mark.parametrize("num_stored", [CHUNK, 2 * CHUNK, 3 * CHUNK])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt_neox", "yarn"])
def test_prefix_hit_is_bitwise_the_cold_run(shared: Shared, family: str, num_stored: int) -> None:
    """Chunks over a stored prefix that ends at a chunk's border run the shapes of the cold run."""
    found, miss = _hit_and_miss(shared(family), num_stored)
    assert torch.equal(found, miss)


@pytest.mark.parametrize("num_stored", [5, CHUNK, 3 * CHUNK, 4 * CHUNK - 1])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_any_prefix_hit_is_the_cold_run(shared: Shared, family: str, num_stored: int) -> None:
    found, miss = _hit_and_miss(shared(family), num_stored)
    torch.testing.assert_close(found, miss, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("codec", codecs())
def test_every_codec_runs_and_seals_once(model: Model, codec: str) -> None:
    """Slots that stay are byte for byte what they were, so a fork that evicts more reads the same codes."""
    runner = make_runner(model)
    sequence = make_sequence(runner, f"full + {codec}", open_len=8)
    logits = runner.prefill([sequence], [prompt(LENGTH)])
    before = model.arena.memory.clone()
    lent = model.arena.used_bytes
    branch = sequence.fork()
    _continue(model, runner, [branch], logits, 20)
    branch.release()
    assert model.arena.used_bytes == lent
    spans = [span for spans in sequence.segments[0].spans.values() for span in spans]
    for span in spans:
        mine = slice(span.start * 4096, (span.start + span.num_superblocks) * 4096)
        assert torch.equal(model.arena.memory[mine], before[mine])
    sequence.release()


def test_logprobs_are_those_of_the_model(shared: Shared) -> None:
    for family in ("llama", "gemma3", "gpt_neox"):
        model, ids = shared(family), prompt(70)
        runner = make_runner(model, chunk_len=CHUNK)
        sequence = make_sequence(runner, "full")
        found = torch.cat((runner.logprobs(sequence, ids[:30]), runner.logprobs(sequence, ids[30:])))
        sequence.release()
        with torch.inference_mode():
            rows = torch.log_softmax(model.hf(torch.tensor([ids]), use_cache=False).logits[0], -1)
        expected = rows[:-1].gather(-1, torch.tensor(ids[1:]).unsqueeze(-1)).squeeze(-1)
        torch.testing.assert_close(found, torch.cat((expected[:29], expected[30:])), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("policy", ["full", "knorm + 60tok + between_chunks(chunk=16)"])
def test_progress_counts_every_token(model: Model, policy: str) -> None:
    runner = make_runner(model, chunk_len=7)
    sequence = make_sequence(runner, policy)
    done: list[int] = []
    runner.prefill([sequence], [prompt(LENGTH)], progress=done.append)
    sequence.release()
    assert sum(done) == LENGTH and min(done) > 0


def test_bad_inputs_are_named(model: Model) -> None:
    runner = make_runner(model)
    sequence = make_sequence(runner, "full")
    for tokens, message in (
        ([[]], "no tokens"),
        ([[1], [2]], "2 inputs for 1 sequences"),
        ([[1, 109]], "token id 109 is outside the vocabulary of 109"),
        ([[-1]], "token id -1"),
    ):
        with pytest.raises(InputError, match=message):
            runner.prefill([sequence], tokens)
    with pytest.raises(InputError, match="token id 500"):
        runner.decode([sequence], [500])
    with pytest.raises(InputError, match="chunk_len is 0"):
        make_runner(model, chunk_len=0)
    assert sequence.logical_len == 0
    sequence.release()
