"""Likelihoods over compressed caches, against the unmodified model and against each other."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from kvfold.bench.likelihood import GenerateUntil, Likelihood, PolicyLM
from kvfold.errors import InputError
from tests.tiny import build, greedy, prompt, ready, tokenizer

CONTEXT = prompt(200)
OPTIONS = [prompt(5, seed=2), prompt(1, seed=3), prompt(9, seed=4)]


def reference(context: Sequence[int], option: Sequence[int]) -> Likelihood:
    """One forward of the model as transformers runs it."""
    with torch.inference_mode():
        logits_TV = build()(torch.tensor([[*context, *option]])).logits[0].log_softmax(-1)
    rows_TV = logits_TV[len(context) - 1 : -1]
    wanted_T = torch.tensor(list(option))
    found = rows_TV.gather(-1, wanted_T.unsqueeze(-1)).double().sum().item()
    return Likelihood(found, bool((rows_TV.argmax(-1) == wanted_T).all()))


def test_full_gives_the_likelihoods_of_the_model() -> None:
    found = PolicyLM(ready(), "full").continuations(CONTEXT, OPTIONS)
    assert [each.logprob for each in found] == pytest.approx(
        [reference(CONTEXT, option).logprob for option in OPTIONS], abs=1e-4
    )
    assert not any(each.is_greedy for each in found)


def test_what_greedy_decoding_writes_is_greedy() -> None:
    written = greedy(build(), CONTEXT, 4)
    other = [*written[:3], (written[3] + 1) % 90]
    found = PolicyLM(ready(), "full").continuations(CONTEXT, [written, other])
    assert [each.is_greedy for each in found] == [True, False]


def test_a_context_of_one_token() -> None:
    (found,) = PolicyLM(ready(), "full").continuations(CONTEXT[:1], OPTIONS[:1])
    assert found.logprob == pytest.approx(reference(CONTEXT[:1], OPTIONS[0]).logprob, abs=1e-4)


def test_the_context_is_compressed_and_options_do_not_see_each_other() -> None:
    judge = PolicyLM(ready(), "streaming + 4x + protect(sinks=1, recent=1)")
    together = judge.continuations(CONTEXT, OPTIONS)
    alone = [judge.continuations(CONTEXT, [option])[0] for option in OPTIONS]
    assert [each.logprob for each in together] == pytest.approx([each.logprob for each in alone], abs=1e-4)
    full = PolicyLM(ready(), "full").continuations(CONTEXT, OPTIONS)
    assert all(abs(a.logprob - b.logprob) > 1e-2 for a, b in zip(together, full, strict=True))
    assert (judge.num_read, judge.num_whole) == (4, 0)


@pytest.mark.parametrize("length", [40, 120])  # all of it protected; more than that, but not four times as much
def test_a_context_too_short_for_the_size_is_kept_whole_and_counted(length: int) -> None:
    judge = PolicyLM(ready(), "keydiff + 4x")
    (found,) = judge.continuations(CONTEXT[:length], OPTIONS[:1])
    assert found.logprob == pytest.approx(reference(CONTEXT[:length], OPTIONS[0]).logprob, abs=1e-4)
    assert (judge.num_read, judge.num_whole) == (1, 1)


@pytest.mark.parametrize("block_len", [1, 64, 99, 199, 512])
def test_blocks_of_any_length_give_the_likelihood_of_a_text_under_full(block_len: int) -> None:
    judge = PolicyLM(ready(), "full", block_len=block_len)
    context, text = (CONTEXT[:3], CONTEXT[3:]) if block_len > 1 else (CONTEXT[:3], CONTEXT[3:12])
    assert judge.text(context, text) == pytest.approx(reference(context, text).logprob, abs=1e-3)


def test_the_first_block_of_a_text_is_exact_and_later_ones_see_the_compressed_past() -> None:
    judge = PolicyLM(ready(), "streaming + 4x + protect(sinks=1, recent=1)", block_len=160)
    assert judge.text(CONTEXT[:1], CONTEXT[1:160]) == pytest.approx(
        reference(CONTEXT[:1], CONTEXT[1:160]).logprob, abs=1e-3
    )
    assert abs(judge.text(CONTEXT[:1], CONTEXT[1:]) - reference(CONTEXT[:1], CONTEXT[1:]).logprob) > 1e-2


def test_replies_are_those_of_the_model_and_end_at_stop_strings() -> None:
    judge = PolicyLM(ready(), "full")
    contexts = [CONTEXT, CONTEXT[:77]]
    texts = [tokenizer().decode(greedy(build(), ids, 12), skip_special_tokens=True) for ids in contexts]
    assert judge.replies([GenerateUntil(ids, 12) for ids in contexts]) == texts
    stop = texts[0][3:5]
    assert judge.replies([GenerateUntil(contexts[0], 12, (stop,))]) == [texts[0].split(stop)[0]]


def test_nothing_is_held_afterwards() -> None:
    model = ready()
    free = model.arena.free_bytes
    judge = PolicyLM(model, "keydiff + 2x")
    judge.continuations(CONTEXT, OPTIONS)
    judge.text(CONTEXT[:1], CONTEXT[1:])
    judge.replies([GenerateUntil(CONTEXT, 3)])
    assert model.arena.free_bytes == free


def test_bad_input_is_refused() -> None:
    judge = PolicyLM(ready(), "full")
    with pytest.raises(InputError, match="one token or more"):
        judge.continuations([], OPTIONS)
    with pytest.raises(InputError, match="one token or more"):
        judge.continuations(CONTEXT, [[]])
    with pytest.raises(InputError, match="one token or more"):
        judge.text(CONTEXT, [])
    with pytest.raises(InputError, match="block_len is 0"):
        PolicyLM(ready(), "full", block_len=0)
