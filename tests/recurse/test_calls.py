"""Batched calls behind one shared prefix: the same replies as one at a time, in any width and any memory."""

from __future__ import annotations

import pytest

import kvfold
from kvfold.errors import InputError, OutOfPages, PolicyError
from kvfold.models.loader import Model
from kvfold.recurse.calls import Calls, Prompt
from kvfold.recurse.size_behind import policy_behind
from kvfold.stats import kept_positions
from tests import tiny

PREFIX = "Read the text and answer.\n"
TEXTS = [f"Part {i}: " + "the cat saw a bird. " * i for i in (9, 3, 30, 5, 12)]
PROMPTS = [Prompt(text, max_new_tokens=6) for text in TEXTS]


def _alone(model: Model, policy: str, prompt: Prompt) -> list[int]:
    """A session of its own, not forked."""
    with kvfold.Session(model, policy) as session:
        session.extend(PREFIX, compress=False, pin=True)
        session.cache.policy = policy_behind(session.policy, len(session.token_ids), session.cache.config.open_len)
        conversation = session.conversation
        ids = conversation.text_ids(prompt.text, "user", session.token_ids) + conversation.reply_ids("user")
        session.extend(ids)
        session._turn = "reply"
        return session.generate(max_new_tokens=prompt.max_new_tokens).token_ids


@pytest.mark.parametrize("policy", ["full", "int8", "keydiff + 2x", "kvzip + global + 2x + int4"])
def test_a_batch_replies_as_each_call_would_alone(model: Model, policy: str) -> None:
    with Calls(model, policy, prefix=PREFIX) as calls:
        found = calls.ask_batch(PROMPTS)
    assert [reply.token_ids for reply in found] == [_alone(model, policy, prompt) for prompt in PROMPTS]


def test_the_prefix_is_read_once_and_every_token_is_counted(model: Model) -> None:
    with Calls(model, prefix=PREFIX, width=2) as calls:
        calls.ask_batch(PROMPTS)
        usage, lens = calls.usage, [calls.num_tokens(prompt) for prompt in PROMPTS]
    assert usage.tokens_read == usage.tokens_shared // len(PROMPTS) + sum(lens)
    assert (usage.calls, usage.batches) == (5, 3)
    assert usage.tokens_generated == 5 * 6
    assert usage.tokens == usage.tokens_read + 30


@pytest.mark.parametrize("policy", ["full", "keydiff + 2x"])
def test_a_prefix_that_is_not_shared_is_read_in_every_call_and_changes_no_reply(model: Model, policy: str) -> None:
    replies, read = [], []
    for shares in (True, False):
        with Calls(model, policy, prefix=PREFIX, width=1, shares=shares) as calls:
            replies.append([reply.token_ids for reply in calls.ask_batch(PROMPTS)])
            read.append(calls.usage.tokens_read)
            lens = [calls.num_tokens(prompt) for prompt in PROMPTS]
    assert replies[0] == replies[1]
    assert read == [calls.num_prefix + sum(lens), len(PROMPTS) * calls.num_prefix + sum(lens)]


def test_drafts_change_no_reply_and_are_counted(model: Model) -> None:
    with Calls(model, prefix=PREFIX) as calls, Calls(model, prefix=PREFIX, speculate=True) as drafting:
        prompts = [Prompt(text, max_new_tokens=24) for text in TEXTS]
        expected = [reply.token_ids for reply in calls.ask_batch(prompts)]
        assert [reply.token_ids for reply in drafting.ask_batch(prompts)] == expected
        assert drafting.usage.drafted >= drafting.usage.accepted and calls.usage.drafted == 0


def test_a_compressing_policy_holds_less_than_the_full_cache(model: Model) -> None:
    with Calls(model, "keydiff + 4x", prefix=PREFIX) as calls:
        calls.ask_batch([Prompt("the cat saw a bird. " * 40, max_new_tokens=2)])
        assert calls.usage.resident_bytes < calls.usage.full_bytes


@pytest.mark.parametrize("policy", ["keydiff + 8x", "keydiff + 100tok", "keydiff + ada + 60%mem"])
def test_a_size_counts_what_stands_behind_the_prefix_which_stays_whole(model: Model, policy: str) -> None:
    prefix = "Read the text and answer. " * 12
    texts = ["a", "the cat saw a bird. " * 40]
    with Calls(model, policy, prefix=prefix) as calls:
        short, long = calls.ask_batch([Prompt(text, max_new_tokens=2) for text in texts])
        shared = calls.num_shared
        own = calls.num_tokens(Prompt(texts[1]))
        assert short.stats.mean_slots == short.stats.logical_len
        (running,) = calls._admit([(0, Prompt(texts[1]), calls._ids(Prompt(texts[1])))], [])
        calls._prefill([running], None)
        kept = kept_positions(running.cache, 1, 1)
        assert kept[:shared] == list(range(shared))
        assert running.cache.segments[0].refs > 1, "pages of the prefix are shared"
        running.cache.release()
    held = long.stats.mean_slots + calls._session.cache.config.open_len  # a size counts the open block
    assert shared + own / 8 <= held + 1 and held <= shared + max(own / 3, 100)


def test_a_policy_that_shortens_is_refused(model: Model) -> None:
    with pytest.raises(PolicyError, match=r"shortens texts, which then lose their places; shorten them beforehand"):
        Calls(model, "shorten(graph, 2x) + int8")


def test_little_memory_makes_batches_smaller_and_none_an_error() -> None:
    wide, narrow = tiny.ready(), tiny.ready(capacity=600_000)
    with Calls(wide, prefix=PREFIX) as calls:
        expected = [reply.token_ids for reply in calls.ask_batch(PROMPTS)]
        assert calls.usage.batches == 1
    with Calls(narrow, prefix=PREFIX) as calls:
        assert [reply.token_ids for reply in calls.ask_batch(PROMPTS)] == expected
        assert calls.usage.batches > 1
        with pytest.raises(OutOfPages):
            calls.ask_batch([Prompt("the cat saw a bird. " * 45)])
    assert narrow.arena.used_bytes == 0


def test_whoever_stops_reading_batches_leaves_nothing_behind(model: Model) -> None:
    with Calls(model, prefix=PREFIX, width=2) as calls:
        for batch in calls.batches(PROMPTS):
            assert [index for index, _ in batch] == [0, 1]
            break
        assert calls.usage.calls == 2


def test_an_interruption_in_a_prefill_or_between_tokens_leaves_nothing_behind(model: Model) -> None:
    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    with Calls(model, prefix=PREFIX) as calls:
        held = model.arena.used_bytes
        with pytest.raises(KeyboardInterrupt):
            calls.ask_batch(PROMPTS, progress=interrupt)
        assert model.arena.used_bytes == held
        assert len(calls.ask_batch(PROMPTS)) == 5


def test_a_reply_continues_its_prefix_and_ends_at_a_stop(model: Model) -> None:
    with Calls(model) as calls:
        (free,) = calls.ask_batch([Prompt("the cat", max_new_tokens=8)])
        (begun,) = calls.ask_batch([Prompt("the cat", answer_prefix="It is", max_new_tokens=4)])
        (ended,) = calls.ask_batch([Prompt("the cat", max_new_tokens=8, stop=(free.text[4],))])
    with kvfold.Session(model) as session:
        session.extend("the cat")
        session._begin_reply("It is")
        assert session.generate(max_new_tokens=4).token_ids == begun.token_ids != free.token_ids[:4]
    assert ended.text == free.text[: free.text.index(free.text[4])]
    assert ended.reason == "stop"


def test_an_unlikely_beginning_needs_half_of_the_probability(model: Model) -> None:
    def first(*unlikely: str) -> str:
        with Calls(model) as calls:
            return calls.ask_batch([Prompt("the cat", max_new_tokens=1, unlikely=unlikely)])[0].text

    expected = first()
    with Calls(model) as calls:
        (running,) = calls._admit([(0, Prompt("the cat"), calls._ids(Prompt("the cat")))], [])
        calls._prefill([running], None)
        assert running.request is not None
        p_V = running.request.logits_V.softmax(-1)
        likely = [model.tokenizer.decode([token]) for token in p_V.topk(90).indices.tolist()]
        running.cache.release()
    assert p_V.max() < 0.5 and likely[0] == expected
    assert first(expected) != expected
    assert first(*(text for text in likely if text.strip())) == expected, "together they have more than half"


def test_a_width_below_one_is_refused(model: Model) -> None:
    with pytest.raises(InputError, match="width is 0; at least one call"):
        Calls(model, width=0)
