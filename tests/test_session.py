"""Sessions: conversations, questions that change nothing, streams, interruptions, pins, and what they report."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import kvfold
from kvfold.errors import InputError, OutOfPages, PolicyError, SizeError
from kvfold.models.loader import Model, wrap
from kvfold.policy.size import parse_bytes
from kvfold.session import Session
from tests.engine.runs import NUM_NEW, Shared, kept, reference
from tests.tiny import build, prompt, ready, tokenizer

LENGTH = 61
TEXT = "A line of text about a thing. Then another line, and one more that ends here."


def plain(model: Model, policy: str = "full", **options: Any) -> Session:
    return Session(model, policy, template=None, page_size=4, open_len=8, **options)


def snapshot(session: Session) -> tuple[Any, ...]:
    logits = None if session._logits_V is None else session._logits_V.tolist()
    return session.stats(), session.token_ids, kept(session.cache), logits, session.model.arena.used_bytes


# Asking and forking


@pytest.mark.parametrize(
    ("policy", "template"),
    [("full", None), *((p, "auto") for p in ("full", "snapkv(window=8) + 2x + int4", "h2o + 60tok", "tova + 60tok"))],
)
def test_ask_leaves_the_session_unchanged(model: Model, policy: str, template: Any) -> None:
    options: dict[str, Any] = {"template": template, "page_size": 4, "open_len": 8}
    with Session(model, policy, **options) as session, Session(model, policy, **options) as untouched:
        for one in (session, untouched):
            one.extend(TEXT * 2)
        before = snapshot(session)
        first = session.ask("What?", max_new_tokens=12)
        assert session.ask("What?", max_new_tokens=12).token_ids == first.token_ids
        after = snapshot(session)
        assert after[1:] == before[1:] and after[0].slots == before[0].slots
        assert after[0].resident_bytes == before[0].resident_bytes
        assert session.generate(max_new_tokens=12).token_ids == untouched.generate(max_new_tokens=12).token_ids
        assert kept(session.cache) == kept(untouched.cache)


@pytest.mark.parametrize("policy", ["full", "full + int4", "full + kivi4", "knorm + 60tok + int8", "h2o + 60tok"])
def test_asking_between_extends_leaves_one_piece(model: Model, policy: str) -> None:
    """A branch that is gone shares nothing: the session goes on in the pages it had."""
    with plain(model, policy) as session, plain(model, policy) as untouched:
        for seed in range(4):
            for one in (session, untouched):
                one.extend(prompt(33, seed=seed))
            session.ask("What?", max_new_tokens=3)
        assert len(session.cache.segments) <= 1
        for one in (session, untouched):
            one.extend(prompt(33, seed=9)).generate(max_new_tokens=20)
        assert session.token_ids == untouched.token_ids and kept(session.cache) == kept(untouched.cache)
        assert session.stats().resident_bytes == untouched.stats().resident_bytes


def test_ask_reads_the_question_whole(model: Model) -> None:
    """Tokens are those of a session that read text and question; the policy does not cut the question."""
    with Session(model) as session, Session(model) as expected:
        session.extend(TEXT)
        expected.extend(TEXT + "\n\nWhat?")
        assert session.ask("What?", max_new_tokens=9).token_ids == expected.generate(max_new_tokens=9).token_ids


def test_ask_after_a_reply_opens_a_turn(model: Model) -> None:
    with Session(model) as session, Session(model) as expected:
        for one in (session, expected):
            one.extend("first").generate(max_new_tokens=4)
        expected.extend("second")
        assert session.ask("second", max_new_tokens=9).token_ids == expected.generate(max_new_tokens=9).token_ids


@pytest.mark.parametrize("policy", ["full", "knorm + 60tok + int8", "h2o + 60tok"])
def test_forks_are_independent(model: Model, policy: str) -> None:
    with plain(model, policy) as session, plain(model, policy) as alone, plain(model, policy) as other_alone:
        for one in (session, alone, other_alone):
            one.extend(prompt(100)).generate(max_new_tokens=5)
        branch = session.fork()
        branch.extend(prompt(70, seed=5)).generate(max_new_tokens=30)
        session.extend(prompt(70, seed=6)).generate(max_new_tokens=30)
        branch.generate(max_new_tokens=20)
        alone.extend(prompt(70, seed=6)).generate(max_new_tokens=30)
        other_alone.extend(prompt(70, seed=5)).generate(max_new_tokens=30)
        other_alone.generate(max_new_tokens=20)
        assert session.token_ids == alone.token_ids and kept(session.cache) == kept(alone.cache)
        assert branch.token_ids == other_alone.token_ids and kept(branch.cache) == kept(other_alone.cache)
        branch.close()
        assert len(session.generate(max_new_tokens=5).token_ids) == 5


# Generating


@pytest.mark.parametrize("options", [{}, {"temperature": 0.9, "seed": 4}, {"stop": ["d"]}])
def test_stream_is_the_reply_in_pieces(model: Model, options: dict[str, Any]) -> None:
    with plain(model) as session, plain(model) as streamed:
        for one in (session, streamed):
            one.extend(prompt(LENGTH))
        reply = session.generate(max_new_tokens=NUM_NEW, **options)
        pieces = list(streamed.generate(stream=True, max_new_tokens=NUM_NEW, **options))
        assert "".join(pieces) == reply.text and len(pieces) > 3
        assert streamed.token_ids == session.token_ids
        assert streamed.generate(max_new_tokens=5).token_ids == session.generate(max_new_tokens=5).token_ids


def test_seeds_reproduce(model: Model) -> None:
    def sampled(seed: int) -> list[int]:
        with plain(model).extend(prompt(LENGTH)) as session:
            return list(session.generate(max_new_tokens=NUM_NEW, temperature=1.0, seed=seed).token_ids)

    assert sampled(1) == sampled(1) != sampled(2)


def test_sampling_cut_to_one_is_greedy(model: Model) -> None:
    for cut in ({"top_k": 1}, {"top_p": 1e-6}):
        with plain(model).extend(prompt(LENGTH)) as session:
            reply = session.generate(max_new_tokens=NUM_NEW, temperature=2.0, **cut)
        assert reply.token_ids == reference("llama", LENGTH)


def test_reply_tells_why_it_ended_and_what_it_cost(model: Model) -> None:
    with plain(model).extend(prompt(LENGTH)) as session:
        reply = session.generate(max_new_tokens=NUM_NEW)
        assert reply.reason == "length" and reply.text == tokenizer().decode(reply.token_ids, skip_special_tokens=True)
        assert reply.decode_ms > 0 and reply.stats.decode_ms == reply.decode_ms
        assert reply.stats.logical_len == LENGTH + NUM_NEW - 1  # the last token has not run yet
        assert session.prefill_s > 0


def test_interrupted_stream_can_go_on(model: Model) -> None:
    """However the consumer leaves: what was generated is part of the session."""
    for leave in (_close, _raise):
        with plain(model).extend(prompt(LENGTH)) as session:
            leave(session.generate(stream=True, max_new_tokens=NUM_NEW, stop=["\x00"]))
            done = len(session.token_ids) - LENGTH
            assert 0 < done < NUM_NEW
            rest = session.generate(max_new_tokens=NUM_NEW - done).token_ids
            assert session.token_ids[LENGTH:] == reference("llama", LENGTH) and len(rest) == NUM_NEW - done


def _close(stream: Iterator[str]) -> None:
    next(stream)
    next(stream)
    stream.close()  # type: ignore[attr-defined]


def _raise(stream: Iterator[str]) -> None:
    with pytest.raises(KeyboardInterrupt):
        for i, _ in enumerate(stream):
            if i == 4:
                stream.throw(KeyboardInterrupt)  # type: ignore[attr-defined]


def test_a_stream_that_is_never_read_generates_nothing(model: Model) -> None:
    with plain(model).extend(prompt(LENGTH)) as session:
        session.generate(stream=True, max_new_tokens=5)
        assert session.generate(max_new_tokens=NUM_NEW).token_ids == reference("llama", LENGTH)


# Interruptions while reading


@pytest.mark.parametrize("policy", ["full", "snapkv(window=8) + 60tok", "h2o + 60tok", "expected + 60tok"])
@pytest.mark.parametrize("after", [1, 129])
def test_interrupted_extend_leaves_the_session_unchanged(model: Model, policy: str, after: int) -> None:
    done = 0

    def stop(num_tokens: int) -> None:
        nonlocal done
        done += num_tokens
        if done >= after:
            raise KeyboardInterrupt

    with plain(model, policy, chunk_len=16) as session, plain(model, policy, chunk_len=16) as untouched:
        for one in (session, untouched):
            one.extend(prompt(90)).generate(max_new_tokens=4)
        with pytest.raises(KeyboardInterrupt):
            session.extend(prompt(130, seed=2), pin=True, progress=stop)
        assert session.token_ids == untouched.token_ids and session.cache.pinned == []
        for one in (session, untouched):
            one.extend(prompt(130, seed=3)).generate(max_new_tokens=10)
        assert session.token_ids == untouched.token_ids and kept(session.cache) == kept(untouched.cache)


@pytest.mark.parametrize("pin", [False, True])
def test_interrupted_between_chunks_keeps_what_was_read(model: Model, pin: bool) -> None:
    policy, ids = "knorm + 60tok + between_chunks(chunk=32)", prompt(150)
    done = 0

    def stop(num_tokens: int) -> None:
        nonlocal done
        done += num_tokens
        if done > 80:
            raise KeyboardInterrupt

    with plain(model, policy) as session, plain(model, policy) as whole:
        whole.extend(ids, pin=pin)
        with pytest.raises(KeyboardInterrupt):
            session.extend(ids, progress=stop, pin=pin)
        assert session.token_ids == ids[:64] and session.cache.committed_len == 64
        assert session.cache.pinned == ([(0, 64)] if pin else [])
        with pytest.raises(InputError, match="extend with the rest"):
            session.generate()
        session.extend(ids[64:], pin=pin)
        assert kept(session.cache) == kept(whole.cache)
        assert session.generate(max_new_tokens=9).token_ids == whole.generate(max_new_tokens=9).token_ids


# Compressing


def test_pinned_spans_survive(model: Model) -> None:
    with plain(model, "knorm + 60tok") as session:
        session.extend(prompt(30)).extend(prompt(10, seed=2), pin=True)
        session.extend(prompt(100, seed=3)).generate(max_new_tokens=80)
        for layer in range(3):
            for head in range(2):
                assert set(range(30, 40)) <= set(session.kept(layer, head))
                assert len(session.kept(layer, head)) <= 60
        with session.fork() as branch:
            branch.extend(prompt(100, seed=4))
            assert set(range(30, 40)) <= set(branch.kept(0, 0))


def test_compress_false_keeps_all_that_is_new(model: Model) -> None:
    with plain(model, "knorm + 2x") as session:
        session.extend(prompt(120))
        before = session.kept(0, 0)
        session.extend(prompt(20, seed=2), compress=False)
        assert session.kept(0, 0) == before + list(range(120, 140))
        assert len(before) == 60 - 8


def test_kept_and_stats_add_up(model: Model) -> None:
    with plain(model, "snapkv(window=8) + ada + 2x + int4") as session:
        session.extend(prompt(150)).generate(max_new_tokens=13)
        stats, spec = session.stats(), model.spec
        assert stats.logical_len == 150 + 12
        assert stats.slots == [[len(session.kept(i, h)) for h in range(2)] for i in range(3)]
        assert session.kept(-1, -1) == session.kept(2, 1)
        assert stats.mean_slots == sum(map(sum, stats.slots)) / 6
        assert stats.full_bytes == 162 * 3 * 2 * 16 * 2 * 2 == spec.full_bytes(162)
        assert stats.ratio == stats.full_bytes / stats.resident_bytes
        sealed = [session.cache.stored_lens(i) for i in range(3)]
        per_slot = session.cache.page_class(0).bytes_per_slot
        float_bytes = (session.cache.open.fill + 4) * 3 * 2 * 16 * 2 * 4  # open block and exact sinks
        assert stats.bytes_per_step == int(sum(map(sum, sealed)) * per_slot + float_bytes)
        for layer, head in ((3, 0), (-4, 0), (0, 2), (0, -3)):
            with pytest.raises(InputError, match="does not exist"):
                session.kept(layer, head)


def test_generate_takes_no_text(model: Model) -> None:
    with plain(model) as session, pytest.raises(TypeError, match=r"extend\(text\) first, or ask\(question\)"):
        session.extend(prompt(9)).generate("And then?")  # type: ignore[call-overload]


def test_a_size_too_small_says_the_smallest(model: Model) -> None:
    with plain(model, "knorm + 13tok") as session:
        with pytest.raises(SizeError, match="the smallest possible is 44tok"):
            session.extend(prompt(100))
        assert session.token_ids == [] and session.cache.logical_len == 0


# Life


def test_empty_and_wrong_inputs(model: Model) -> None:
    with Session(model) as session:
        for call, message in (
            (lambda: session.extend(), "either text"),
            (lambda: session.extend("x", messages=[]), "either text"),
            (lambda: session.extend(""), "the text is empty"),
            (lambda: session.extend([]), "the input is empty"),
            (lambda: session.extend([5, 109]), "token id 109 is outside the vocabulary"),
            (lambda: session.extend([-3]), "token id -3"),
            (lambda: session.generate(), "the session is empty; extend it"),
            (lambda: session.ask(""), "the text is empty"),
        ):
            with pytest.raises(InputError, match=message):
                call()
        with pytest.raises(InputError, match="temperature"):
            session.extend("x").generate(temperature=-1)
        assert session.token_ids[-1] == tokenizer()("x")["input_ids"][0]


def test_a_closed_session_is_closed(model: Model) -> None:
    session = plain(model).extend(prompt(20))
    session.close()
    session.close()
    assert model.arena.used_bytes == 0
    for call in (lambda: session.extend("x"), lambda: session.generate(), session.fork, lambda: session.ask("x")):
        with pytest.raises(InputError, match="the session is closed"):
            call()


def test_memory_returns_with_the_last_reference(model: Model) -> None:
    session = plain(model).extend(prompt(20))
    branch = session.fork()
    del session
    assert model.arena.used_bytes > 0
    assert len(branch.generate(max_new_tokens=3).token_ids) == 3
    del branch
    assert model.arena.used_bytes == 0


def test_policies_a_model_cannot_run(shared: Shared) -> None:
    with pytest.raises(PolicyError, match="sliding window"):
        Session(shared("mistral_sliding"), "knorm + 8x")
    with pytest.raises(PolicyError, match="use keep"):
        Session(shared("dynamic_rope"), "streaming + 60tok + slot")


# Batches and memory


def test_batch_is_single_sessions(model: Model) -> None:
    prompts = ["one", "a second, longer prompt", TEXT]
    replies = kvfold.generate(model, prompts, "full", max_new_tokens=12)
    for text, reply in zip(prompts, replies, strict=True):
        with Session(model) as session:
            assert session.extend(text).generate(max_new_tokens=12).token_ids == reply.token_ids
    sampled = kvfold.generate(model, prompts, max_new_tokens=12, temperature=1.0, seed=7)
    with Session(model) as session:  # every row draws from a seed of its own
        session.extend(prompts[1])
        assert session.generate(max_new_tokens=12, temperature=1.0, seed=8).token_ids == sampled[1].token_ids
    empty: list[str] = []
    for wrong in ("text", empty):
        with pytest.raises(InputError, match="non-empty list"):
            kvfold.generate(model, wrong)


def test_a_batch_that_does_not_fit_gives_everything_back() -> None:
    model = ready(capacity=16 * 4096)
    with pytest.raises(OutOfPages):
        kvfold.generate(model, [TEXT] * 20)
    assert model.arena.used_bytes == 0


def test_memory_is_bounded_and_given_once() -> None:
    model = wrap(build(), tokenizer(), memory="1MiB")
    assert model.arena.capacity_bytes == 2**20
    assert wrap(model.hf, tokenizer(), memory=2**20).arena is model.arena
    with pytest.raises(InputError, match="already"):
        _ = wrap(model.hf, tokenizer(), memory="2MiB").arena
    assert (parse_bytes("1.5KB"), parse_bytes(" 2 MiB "), parse_bytes("7"), parse_bytes(9)) == (1500, 2**21, 7, 9)
    for wrong in ("lots", "5 parsecs", "-3GB", ""):
        with pytest.raises(InputError, match="no amount of memory"):
            parse_bytes(wrong)


def test_weights_digest_tells_models_apart() -> None:
    digests = {wrap(build(family, seed=seed), None).weights_digest for family in ("llama", "qwen3") for seed in (0, 1)}
    assert len(digests) == 4
    same = wrap(build(), None)
    with torch.no_grad():
        same.hf.lm_head.weight[3, 5] += 1e-3
    assert same.weights_digest not in digests
