"""The second reading of a prompt, against attention maps of the unmodified model, family by family.

H KV heads   G query heads per KV head   Q query heads   T queries   S keys
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from kvfold.engine.forward import Forward
from kvfold.engine.replay import ReplayRunner
from kvfold.errors import ModelError, OutOfPages, PolicyError
from kvfold.models.cache import Cache
from kvfold.models.check import check_policy
from kvfold.models.loader import Model
from kvfold.models.repeat_prompt import hidden_norms, repeat_request
from kvfold.pages.sequence import SequenceCache
from kvfold.passes.replay import ReplayPass
from kvfold.policy import Policy
from kvfold.score import KVzip, KVzipPlus, View
from tests.engine.runs import Shared, kept, make_runner, make_sequence, prefill_and_generate
from tests.tiny import FAMILIES, build, prompt, ready

LENGTH, CHUNK, SINKS = 150, 64, 3
COMPRESSIBLE = sorted(set(FAMILIES) - {"mistral_sliding"})  # a model that only has sliding windows evicts nothing
POLICY = f"kvzip(chunk={CHUNK}, sinks={SINKS}) + global + 2x"


@dataclass
class Seen:
    """What scorers were shown, by layer."""

    views: dict[int, View] = field(default_factory=dict)

    def maxima(self, layer: int) -> Tensor:
        found = self.views[layer].replay_RGS
        assert found is not None
        return found


@contextmanager
def watched(scorer: type[KVzip] | type[KVzipPlus]) -> Iterator[Seen]:
    seen, score = Seen(), scorer.score

    def watching(self: Any, view: View) -> Tensor:
        seen.views[view.layer] = view
        return score(self, view)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scorer, "score", watching)
        yield seen


@torch.inference_mode()
def naive(
    model: Model, ids: Sequence[int], *, num_stored: int = 0, by_hidden: bool = False, surprise: float = 0.0
) -> dict[int, Tensor]:
    """[H, G, S] by layer, from whole maps of the unmodified model; `num_stored` tokens were read, and kept, before."""
    hf, request = build(model.name), repeat_request(model.hf)
    hf.set_attn_implementation("eager")
    found: dict[int, list[Tensor]] = {layer: [] for layer in model.spec.compressible_layers}
    logprob_TV = hf(torch.tensor([list(ids)])).logits[0].log_softmax(-1)
    for begin in range(num_stored, len(ids), CHUNK):
        chunk = slice(begin, begin + CHUNK)
        again = [*request.before(ids[num_stored:begin]), *ids[chunk]]
        maps, norms = _maps(hf, list(ids), again)
        about = torch.zeros(len(ids) + len(again), dtype=torch.bool)
        for part in (
            slice(0, max(num_stored, SINKS)),
            slice(begin, min(begin + CHUNK, len(ids))),
            slice(len(ids), None),
        ):
            about[part] = True
        counts = torch.ones(len(again), 1)  # of queries: the one at i stands before again[i + 1]
        for token in range(max(begin, num_stored + 1), min(begin + CHUNK + 1, len(ids))) if surprise else ():
            place = token - begin + len(again) - len(ids[chunk]) - 1
            counts[place] = min(1.0, -logprob_TV[token - 1, ids[token]].item() / surprise) if place >= 0 else 1.0
        for layer, largest in found.items():
            by = norms[layer] if by_hidden else 1.0 / counts
            largest.append(_largest(maps[layer], about, by)[:, : len(ids)])
    shape = model.spec.layers[0].num_kv_heads, model.spec.layers[0].group
    return {layer: torch.stack(largest).amax(0).unflatten(0, shape) for layer, largest in found.items()}


def _maps(hf: Any, ids: list[int], again: list[int]) -> tuple[list[Tensor], list[Tensor]]:
    """Attention [Q, T, S] of the repetition over everything, and norms [T, 1] of what attention was given."""
    norms: list[Tensor] = []
    cache = DynamicCache(config=hf.config)
    hf(torch.tensor([ids]), past_key_values=cache)
    with hidden_norms(hf, norms.append):
        out = hf(torch.tensor([again]), past_key_values=cache, output_attentions=True)
    return [attention[0] for attention in out.attentions], [norm.unsqueeze(-1) for norm in norms]


def _largest(map_QTS: Tensor, about: Tensor, by_T1: Tensor) -> Tensor:
    """A softmax over some keys is the one over all, divided by their share of it."""
    some_QTS = map_QTS.masked_fill(~about, 0.0)
    return (some_QTS / some_QTS.sum(-1, keepdim=True) / by_T1).amax(1)


def close(found: Tensor, expected: Tensor) -> None:
    """Sinks always stay: what later chunks give them is not observed."""
    torch.testing.assert_close(found[..., SINKS:], expected[..., SINKS:], atol=2e-4, rtol=2e-3)


def read(model: Model, policy: str, ids: list[int], *, chunk_len: int = 40) -> SequenceCache:
    runner = make_runner(model, chunk_len)
    sequence = make_sequence(runner, policy)
    runner.prefill([sequence], [ids])
    return sequence


@pytest.mark.parametrize("family", COMPRESSIBLE)
def test_maxima_are_those_of_whole_maps(shared: Shared, family: str) -> None:
    model, ids = shared(family), prompt(LENGTH)
    with watched(KVzip) as seen:
        read(model, POLICY, ids).release()
    expected = naive(model, ids)
    assert sorted(seen.views) == sorted(expected) == list(model.spec.compressible_layers)
    for layer in seen.views:
        close(seen.maxima(layer), expected[layer])


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_neox"])
def test_weights_are_divided_by_hidden_norms(shared: Shared, family: str) -> None:
    model, ids = shared(family), prompt(LENGTH)
    with watched(KVzipPlus) as seen:
        read(model, f"kvzip_plus(chunk={CHUNK}, sinks={SINKS}) + 2x", ids).release()
    expected = naive(model, ids, by_hidden=True)
    for layer, view in seen.views.items():
        close(seen.maxima(layer), expected[layer])
        weight_MX = model.hf.get_submodule(_output_name(family, layer)).weight
        torch.testing.assert_close(view.wo_HGDM, weight_MX.t().reshape(view.spec.num_kv_heads, -1, 16, 64))


@pytest.mark.parametrize(("family", "num_stored"), [("llama", 0), ("gemma3", 0), ("gpt_neox", 40)])
def test_queries_count_by_the_surprise_of_what_they_repeat(shared: Shared, family: str, num_stored: int) -> None:
    """Of the token after them, as the first reading saw it; what was stored before tells nothing of the first one."""
    model, ids, surprise = shared(family), prompt(LENGTH), 4.0
    runner = make_runner(model, chunk_len=40)
    sequence = make_sequence(runner, f"kvzip(chunk={CHUNK}, sinks={SINKS}, surprise={surprise}) + global + 2x")
    if num_stored:
        runner.prefill([sequence], [ids[:num_stored]], compress=False)
    with watched(KVzip) as seen:
        logits_V = runner.prefill([sequence], [ids[num_stored:]])[0]
    torch.testing.assert_close(logits_V, last_logits(model, ids), atol=2e-4, rtol=2e-3)
    expected, plain = (naive(model, ids, num_stored=num_stored, surprise=s) for s in (surprise, 0.0))
    for layer in seen.views:
        close(seen.maxima(layer), expected[layer])
        assert (seen.maxima(layer) < 0.9 * plain[layer]).any()
    sequence.release()


@torch.inference_mode()
def last_logits(model: Model, ids: list[int]) -> Tensor:
    logits_V: Tensor = build(model.name)(torch.tensor([ids])).logits[0, -1]
    return logits_V


def test_logits_that_are_changed_after_the_head_tell_no_surprise(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model.hf.config, "logits_scaling", 2.0, raising=False)
    runner = make_runner(model)
    sequence = make_sequence(runner, "kvzip(surprise=2) + 2x")
    with pytest.raises(ModelError, match="applies logits_scaling to its logits"):
        runner.prefill([sequence], [prompt(LENGTH)])
    assert sequence.logical_len == 0
    sequence.release()


def _output_name(family: str, layer: int) -> str:
    return (
        f"gpt_neox.layers.{layer}.attention.dense" if family == "gpt_neox" else f"model.layers.{layer}.self_attn.o_proj"
    )


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_second_extend_repeats_what_is_new_over_all_that_is_stored(shared: Shared, family: str) -> None:
    """Slots that were stored before take part in the softmax and are scored by what the repetition gives them."""
    model, ids, num_stored = shared(family), prompt(LENGTH + 40), 60
    runner = make_runner(model, chunk_len=40)
    sequence = make_sequence(runner, POLICY)
    with watched(KVzip) as seen:
        runner.prefill([sequence], [ids[:num_stored]], compress=False)
        assert not seen.views
        runner.prefill([sequence], [ids[num_stored:]])
    expected = naive(model, ids, num_stored=num_stored)
    for layer in seen.views:
        close(seen.maxima(layer), expected[layer])
    assert sequence.sealed_len == len(ids)
    sequence.release()


@pytest.mark.parametrize("policy", [f"{POLICY} + int4", f"{POLICY} + slot", f"{POLICY} + kivi4"])
def test_many_extends_hold_the_size(model: Model, policy: str) -> None:
    """Evicted heads, codecs and moved positions below what is new: rows of unequal length get their own maxima."""
    runner = make_runner(model, chunk_len=40)
    sequence = make_sequence(runner, policy)
    calls = 1 if "kivi4" in policy else 3  # its slots cannot be evicted one by one later
    for call in range(calls):
        runner.prefill([sequence], [prompt(LENGTH, seed=call)])
        lens = [length for layer in range(3) for length in sequence.stored_lens(layer)]
        assert sum(lens) == 6 * (LENGTH * (call + 1) // 2 - 8)
        assert len(set(lens)) > 1
    sequence.release()


def test_replay_leaves_no_trace(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the prompt is read again, no byte of what is stored or held changes, and nothing more is lent."""
    runner = make_runner(model)
    sequence = make_sequence(runner, POLICY)
    runner.prefill([sequence], [prompt(100)])
    run, checked = ReplayRunner._replay, []

    def compared(self: ReplayRunner, *args: Any) -> Any:
        before, lent, sealed = model.arena.memory.clone(), model.arena.used_bytes, sequence.sealed_len
        found = run(self, *args)
        checked.append(torch.equal(model.arena.memory, before) and model.arena.used_bytes == lent)
        assert sequence.sealed_len == sealed == 100 and sequence.open.fill == 0
        return found

    monkeypatch.setattr(ReplayRunner, "_replay", compared)
    runner.prefill([sequence], [prompt(LENGTH)])
    assert checked == [True]
    sequence.release()


def test_logits_are_those_of_one_reading(model: Model) -> None:
    runner = make_runner(model)
    once, twice = make_sequence(runner, "knorm + 2x"), make_sequence(runner, POLICY)
    torch.testing.assert_close(runner.prefill([twice], [prompt(LENGTH)]), runner.prefill([once], [prompt(LENGTH)]))
    once.release()
    twice.release()


def test_one_replay_serves_all_policies(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    read_again, readings = ReplayRunner._replay, []

    def counted(self: ReplayRunner, again: ReplayPass, tokens: Any) -> None:
        readings.append(len(again.kinds))
        read_again(self, again, tokens)

    monkeypatch.setattr(ReplayRunner, "_replay", counted)
    scores = ("kvzip", "kvzip(surprise=3)", "kvzip_plus", "tova")
    policies = [f"{score} + {rest}" for score in scores for rest in ("2x", "global + 3x + int4")]
    runner, ids = make_runner(model, chunk_len=40), prompt(LENGTH)
    together = [make_sequence(runner, policy) for policy in policies]
    alone = [make_sequence(runner, policy) for policy in policies]
    runner.prefill_many(together, ids)
    assert readings == [3]
    for sequence in alone:
        runner.prefill([sequence], [ids])
    assert [kept(sequence) for sequence in together] == [kept(sequence) for sequence in alone]
    assert readings == [3, *[1] * 6]
    for sequence in (*together, *alone):
        sequence.release()


def test_a_ragged_batch_is_single_runs(model: Model) -> None:
    policies = [POLICY, "kvzip(surprise=3) + ada + 2x + int4", "full", "prefill(kvzip + 60tok) + decode(h2o + 60tok)"]
    prompts = [prompt(120 + 9 * i, seed=i) for i in range(4)]
    alone = [prefill_and_generate(model, [policy], [ids])[0] for policy, ids in zip(policies, prompts, strict=True)]
    assert prefill_and_generate(model, policies, prompts, chunk_len=48) == alone


def test_a_prompt_that_fits_is_read_once(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ReplayRunner, "run", _fail)
    sequence = read(model, "prefill(kvzip + 64tok)", prompt(50))
    assert sequence.stored_lens(0) == [50, 50]
    sequence.release()


def _fail(*_: Any) -> None:
    raise AssertionError("nothing is evicted, so nothing needs a second reading")


def test_the_arena_must_hold_the_whole_cache() -> None:
    """The peak is the open block and the whole cache; one superblock less is refused before the model runs."""
    model, ids = ready(), prompt(LENGTH)
    read(model, POLICY, ids).release()
    peak = model.arena.peak_bytes
    assert peak >= model.spec.full_bytes(LENGTH) * 2  # the tiny model caches in fp32, twice bf16
    read(ready(capacity=peak), POLICY, ids).release()
    small = ready(capacity=peak - 4096)
    runner = make_runner(small)
    sequence = make_sequence(runner, POLICY)
    lent = small.arena.used_bytes
    with pytest.raises(OutOfPages, match="150 tokens are held uncompressed"):
        runner.prefill([sequence], [ids])
    assert (small.arena.used_bytes, sequence.logical_len) == (lent, 0)
    runner.prefill([sequence], [ids[:100]])
    sequence.release()


def test_an_interrupted_replay_changes_nothing(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make_runner(model)
    sequence = make_sequence(runner, "prefill(kvzip + 60tok) + decode(tova + 60tok)")
    runner.prefill([sequence], [prompt(100)])
    lent, noted, call = model.arena.used_bytes, sequence.observed.num_bytes, Forward.call

    def interrupted(self: Forward, *args: Any, hidden: bool = False) -> Any:
        if hidden:
            raise KeyboardInterrupt
        return call(self, *args)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Forward, "call", interrupted)
        runner.prefill([sequence], [prompt(LENGTH)])
    assert (model.arena.used_bytes, sequence.sealed_len, sequence.observed.num_bytes) == (lent, 100, noted)
    runner.prefill([sequence], [prompt(LENGTH)])
    assert sequence.sealed_len == 100 + LENGTH
    sequence.release()


def test_frequencies_that_follow_the_length_are_put_back(shared: Shared) -> None:
    """A repetition reaches past the trained length; what is decoded afterwards must not feel it."""
    model = shared("dynamic_rope")
    rotary, ids = model.hf.base_model.rotary_emb, prompt(1000)
    sequence = read(model, POLICY, ids, chunk_len=512)
    assert rotary.max_seq_len_cached == model.hf.config.max_position_embeddings
    torch.testing.assert_close(rotary.inv_freq, rotary.original_inv_freq)
    sequence.release()


def test_a_drop_in_cache_cannot_read_twice(model: Model) -> None:
    with pytest.raises(PolicyError, match=r"replays the prompt, and a transformers Cache does not run the model"):
        Cache(model.hf, "kvzip + 8x")


def test_a_projection_that_is_not_found_is_told(model: Model) -> None:
    bare = replace(model.spec, layers=tuple(replace(layer, wo_MX=None) for layer in model.spec.layers))
    check_policy(Policy.parse("kvzip + 8x"), bare)
    for policy in ("kvzip_plus + 8x", "critical + 8x", "defensive + 8x"):
        check_policy(Policy.parse(policy), model.spec)
        with pytest.raises(PolicyError, match="needs the output projection of attention"):
            check_policy(Policy.parse(policy), bare)
