"""The decode loop: stop strings roll back to where they began, interruptions leave no trace, batches end one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvfold.engine.generate import generate
from kvfold.engine.output_processor import Request
from kvfold.errors import InputError
from kvfold.models.loader import Model
from kvfold.pages.sequence import SequenceCache
from kvfold.session import Session
from tests.engine.runs import NUM_NEW, kept, make_runner, make_sequence, reference
from tests.tiny import prompt

LENGTH = 61
OBSERVING = ("full", "h2o + 80tok", "tova + 80tok", "expected + 80tok", "full + int4")


def make_session(model: Model, policy: str = "full", open_len: int = 32) -> Session:
    return Session(model, policy, template=None, open_len=open_len, chunk_len=16).extend(prompt(LENGTH))


def plain_text(model: Model) -> str:
    with make_session(model) as session:
        return str(session.generate(max_new_tokens=NUM_NEW).text)


@pytest.mark.parametrize(("policy", "length"), [("full", 1), ("full", 5), *((policy, 2) for policy in OBSERVING)])
def test_stop_text_was_never_generated(model: Model, policy: str, length: int) -> None:
    """The session goes on exactly as one that generated only what stands before the stop string."""
    with make_session(model, policy) as session, make_session(model, policy) as fresh:
        text = fresh.fork().generate(max_new_tokens=NUM_NEW).text
        stop = text[9 : 9 + length]
        reply = session.generate(max_new_tokens=NUM_NEW, stop=[stop])
        assert reply.reason == "stop" and reply.text == text[: text.index(stop)]
        assert reply.text == model.tokenizer.decode(reply.token_ids, skip_special_tokens=True)
        if reply.token_ids:
            fresh.generate(max_new_tokens=len(reply.token_ids))
        assert session.token_ids == fresh.token_ids
        follow = session.generate(max_new_tokens=NUM_NEW).token_ids
        assert follow == fresh.generate(max_new_tokens=NUM_NEW).token_ids
        assert kept(session.cache) == kept(fresh.cache)
        torch.testing.assert_close(observed(session.cache), observed(fresh.cache))


def observed(sequence: SequenceCache) -> list[torch.Tensor]:
    return [tensor for layer in sequence.observed.layers for tensor in layer.tensors()]


def test_what_only_began_a_stop_string_stays(model: Model) -> None:
    text = plain_text(model)
    almost = [text[i : i + 2] + "\x00" for i in range(len(text) - 1)]
    with make_session(model) as session:
        reply = session.generate(max_new_tokens=NUM_NEW, stop=almost)
        assert (reply.text, reply.reason) == (text, "length")
        assert reply.token_ids == reference("llama", LENGTH)


def test_the_first_of_overlapping_beginnings_is_kept(model: Model) -> None:
    """With stop "aab" in "aaab" only the first a is text, though each of them could have begun the stop string."""
    runner, tokens = make_runner(model), model.tokenizer("aaab!")["input_ids"]
    sequence = make_sequence(runner, "full", open_len=32)
    request = Request(sequence, runner.prefill([sequence], [prompt(5)])[0], 20, stop=["aab"])
    force(runner, request, tokens)
    pieces = [piece for _, piece in generate(runner, [request], model.tokenizer)]
    assert pieces == ["a"] and request.text == "a" and request.reason == "stop"
    assert request.token_ids == tokens[:1]
    assert sequence.logical_len == sequence.committed_len == 6
    sequence.release()


def test_a_character_of_several_tokens_can_stop(model: Model) -> None:
    runner, tokens = make_runner(model), model.tokenizer("a€b")["input_ids"]
    sequence = make_sequence(runner, "full", open_len=32)
    request = Request(sequence, runner.prefill([sequence], [prompt(5)])[0], 20, stop=["€"])
    force(runner, request, tokens)
    assert "".join(piece for _, piece in generate(runner, [request], model.tokenizer)) == "a"
    assert request.token_ids == tokens[:1] and sequence.logical_len == 6
    sequence.release()


def test_a_token_with_text_and_stop_goes_with_the_stop(model: Model) -> None:
    runner, tokens = make_runner(model), model.tokenizer("xthe!")["input_ids"]
    assert [model.tokenizer.decode(token) for token in tokens] == ["x", "th", "e", "!"]
    sequence = make_sequence(runner, "full", open_len=32)
    request = Request(sequence, runner.prefill([sequence], [prompt(5)])[0], 20, stop=["he"])
    force(runner, request, tokens)
    for _ in generate(runner, [request], model.tokenizer):
        pass
    assert (request.text, request.token_ids) == ("xt", tokens[:1])
    assert sequence.logical_len == 6
    sequence.release()


def force(runner: Any, request: Request, tokens: list[int]) -> None:
    """Make the model choose these tokens: real steps, with logits replaced."""
    run: Callable[..., torch.Tensor] = runner.decode
    wanted = iter(tokens)

    def logits() -> torch.Tensor:
        chosen = torch.zeros(runner.spec.vocab_size)
        chosen[next(wanted)] = 1.0
        return chosen

    def decode(*args: Any, **kwargs: Any) -> torch.Tensor:
        run(*args, **kwargs)
        return logits().unsqueeze(0)

    request.logits_V = logits()
    runner.decode = decode


def test_a_block_of_nothing_but_beginnings_is_committed(model: Model) -> None:
    """A stop string longer than the open block cannot be rolled back whole; the result still matches the cache."""
    text = plain_text(model)
    with make_session(model, open_len=2) as session:
        reply = session.generate(max_new_tokens=NUM_NEW, stop=[text[3:12]])
        assert (reply.text, reply.reason) == (text[:3], "stop")
        assert reply.token_ids == reference("llama", LENGTH)[: len(reply.token_ids)]
        rest = session.generate(max_new_tokens=5).token_ids
        assert reply.token_ids + rest == reference("llama", LENGTH)[: len(reply.token_ids) + 5]


def test_batch_rows_end_one_by_one(model: Model) -> None:
    runner = make_runner(model)
    sequences = [make_sequence(runner, "full") for _ in range(3)]
    logits = runner.prefill(sequences, [prompt(LENGTH)] * 3)
    text = plain_text(model)
    requests = [
        Request(sequences[0], logits[0], 3),
        Request(sequences[1], logits[1], NUM_NEW),
        Request(sequences[2], logits[2], NUM_NEW, stop=[text[5:7]]),
    ]
    pieces: dict[int, str] = {}
    for request, piece in generate(runner, requests, model.tokenizer):
        pieces[id(request)] = pieces.get(id(request), "") + piece
    assert [pieces[id(request)] for request in requests] == [request.text for request in requests]
    assert [request.reason for request in requests] == ["length", "length", "stop"]
    assert requests[0].token_ids == reference("llama", LENGTH)[:3]
    assert requests[1].token_ids == reference("llama", LENGTH)
    assert requests[2].text == text[: text.index(text[5:7])]
    for sequence in sequences:
        assert sequence.open.fill == sequence.open.committed
        sequence.release()


def test_end_token_ends(model: Model) -> None:
    tokens = reference("llama", LENGTH)
    end = next(token for i, token in enumerate(tokens) if i >= 4 and tokens.index(token) == i)
    runner = make_runner(model)
    object.__setattr__(runner.spec, "eos_token_ids", frozenset({end}))
    try:
        sequence = make_sequence(runner, "full")
        request = Request(sequence, runner.prefill([sequence], [prompt(LENGTH)])[0], NUM_NEW)
        list(generate(runner, [request], model.tokenizer))
    finally:
        object.__setattr__(runner.spec, "eos_token_ids", frozenset())
    assert request.reason == "eos" and request.token_ids == tokens[: tokens.index(end) + 1]
    assert request.text == model.tokenizer.decode(request.token_ids[:-1])
    sequence.release()


@pytest.mark.parametrize("policy", OBSERVING)
def test_an_interrupted_step_or_prompt_leaves_no_trace(model: Model, policy: str) -> None:
    runner = make_runner(model, chunk_len=16)
    sequences = [make_sequence(runner, policy) for _ in range(2)]
    for sequence in sequences:
        runner.prefill([sequence], [prompt(LENGTH)])
    hook = model.hf.base_model.layers[1].mlp.register_forward_hook(_interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            runner.decode([sequences[0]], [3])
        with pytest.raises(KeyboardInterrupt):
            runner.prefill([sequences[0]], [prompt(30, seed=9)])
    finally:
        hook.remove()
    assert not any("forward" in layer.__dict__ for layer in model.hf.base_model.layers)
    first, second = (
        torch.cat([runner.decode([s], [3]), runner.prefill([s], [prompt(90, seed=4)]), runner.decode([s], [5])])
        for s in sequences
    )
    assert torch.equal(first, second)
    assert kept(sequences[0]) == kept(sequences[1])
    for sequence in sequences:
        sequence.release()


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def test_drafts_roll_back_before_a_prompt(model: Model) -> None:
    runner = make_runner(model)
    sequences = [make_sequence(runner, "h2o + 100tok") for _ in range(2)]
    for sequence in sequences:
        runner.prefill([sequence], [prompt(LENGTH)])
    runner.decode([sequences[0]], [7], commit=[False])
    assert sequences[0].logical_len == sequences[0].committed_len + 1
    first, second = (runner.prefill([s], [prompt(9, seed=3)]) for s in sequences)
    assert torch.equal(first, second) and sequences[0].logical_len == LENGTH + 9
    for sequence in sequences:
        sequence.release()


def test_a_slot_does_not_inherit_the_mass_of_a_draft(model: Model) -> None:
    runner = make_runner(model)
    sequences = [make_sequence(runner, "h2o + 100tok") for _ in range(2)]
    for sequence in sequences:
        runner.prefill([sequence], [prompt(LENGTH)])
    runner.decode([sequences[0]], [7], commit=[False])
    sequences[0].open.rollback()
    for sequence in sequences:
        runner.decode([sequence], [3])
    for first, second in zip(*(sequence.observed.layers for sequence in sequences), strict=True):
        assert first.open_mass_HR is not None and second.open_mass_HR is not None
        assert torch.equal(first.open_mass_HR, second.open_mass_HR)
    for sequence in sequences:
        sequence.release()


def test_options_out_of_range(model: Model) -> None:
    with make_session(model) as session:
        for options, message in (
            ({"max_new_tokens": 0}, "max_new_tokens is 0"),
            ({"stop": "text"}, "stop is a list"),
            ({"stop": [""]}, "stop is a list"),
        ):
            with pytest.raises(InputError, match=message):
                session.generate(**options)
