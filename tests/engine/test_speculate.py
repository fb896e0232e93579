"""With and without drafts: the same tokens, the same cache, the same observations, wherever a draft is cut.

Random models do not repeat themselves, so drafts come from an earlier output with wrong tokens in it: some are
accepted, some rejected, some cut in the middle.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import kvfold
from kvfold.engine.generate import generate
from kvfold.engine.output_processor import Request
from kvfold.engine.runner import Runner
from kvfold.engine.sampling import Sampling
from kvfold.engine.speculate import Drafter
from kvfold.errors import InputError
from kvfold.models.loader import Model
from kvfold.pages.serialize import dump
from kvfold.reply import Reply
from kvfold.session import Session
from tests.engine.runs import Shared, kept, make_runner, make_sequence
from tests.tiny import VOCAB_SIZE, prompt

LENGTH, NUM_NEW = 61, 28
POLICIES = (
    "full", "full + int4", "full + kivi4", "snapkv(window=4) + 4x + protect(recent=4)", "streaming + 64tok",
    "streaming + 64tok + slot", "h2o + 64tok", "h2o + ada + 64tok + int4", "tova + 64tok", "expected + 64tok",
)  # fmt: skip


def make_session(model: Model, policy: str = "full", open_len: int = 8) -> Session:
    return Session(model, policy, template=None, open_len=open_len, chunk_len=16).extend(prompt(LENGTH))


def plainly(model: Model, policy: str = "full", **options: Any) -> Reply:
    with make_session(model, policy) as session:
        reply: Reply = session.generate(**({"max_new_tokens": NUM_NEW} | options))
        return reply


def partly_wrong(tokens: list[int]) -> list[int]:
    """Every seventh token is another one."""
    return [(token + 1) % VOCAB_SIZE if at % 7 == 6 else token for at, token in enumerate(tokens)]


def assert_same_state(one: Session, other: Session) -> None:
    assert one.token_ids == other.token_ids
    assert kept(one.cache) == kept(other.cache)
    assert (one.cache.open.fill, one.cache.open.committed) == (other.cache.open.fill, other.cache.open.committed)
    torch.testing.assert_close(observed(one), observed(other), rtol=1e-4, atol=1e-4)


def observed(session: Session) -> list[Tensor]:
    return [tensor for layer in session.cache.observed.layers for tensor in layer.tensors()]


@pytest.mark.parametrize("policy", POLICIES)
def test_greedy_is_the_same_function(model: Model, policy: str) -> None:
    with make_session(model, policy) as plain, make_session(model, policy) as fast:
        expected = plain.generate(max_new_tokens=NUM_NEW)
        reply = fast.generate(max_new_tokens=NUM_NEW, speculate=5, draft_from=[partly_wrong(expected.token_ids)])
        assert reply.token_ids == expected.token_ids and reply.text == expected.text
        assert 0 < reply.stats.accepted < reply.stats.drafted
        assert_same_state(plain, fast)
        assert plain.generate(max_new_tokens=9).token_ids == fast.generate(max_new_tokens=9).token_ids


@pytest.mark.parametrize("family", ["mistral_sliding", "gemma3", "qwen3", "gpt_neox"])
def test_every_kind_of_attention(shared: Shared, family: str) -> None:
    model = shared(family)
    expected = plainly(model)
    reply = plainly(model, speculate=True, draft_from=[partly_wrong(expected.token_ids)])
    assert reply.token_ids == expected.token_ids and 0 < reply.stats.accepted < reply.stats.drafted


def test_five_tokens_of_one_pass(model: Model) -> None:
    """Four are drafted and accepted, the fifth comes with them."""
    expected = plainly(model, max_new_tokens=7)
    drafts = [[*prompt(LENGTH)[-4:], *expected.token_ids[:2]], expected.token_ids]
    reply = plainly(model, max_new_tokens=7, speculate=4, draft_from=drafts)
    assert reply.token_ids == expected.token_ids
    drafted, accepted = reply.stats.drafted, reply.stats.accepted
    assert reply.stats.tokens_per_pass == pytest.approx(1 + accepted / (6 - accepted))
    with make_session(model, open_len=32) as session:
        first = session.generate(max_new_tokens=1).token_ids[0]
        (verified,) = session.runner.verify([session.cache], [[first, *expected.token_ids[1:5]]])
        assert verified.logits_TV.argmax(-1).tolist() == expected.token_ids[1:6]
    assert 0 < accepted <= drafted and expected.stats.tokens_per_pass == 1


@pytest.mark.parametrize("num_new", (1, 2, 3, 4, 7, 8, 9, 10, 13))
def test_a_limit_inside_a_draft(model: Model, num_new: int) -> None:
    expected = plainly(model).token_ids
    with make_session(model) as plain, make_session(model) as fast:
        plain.generate(max_new_tokens=num_new)
        reply = fast.generate(max_new_tokens=num_new, speculate=True, draft_from=[expected])
        assert (reply.token_ids, reply.reason) == (expected[:num_new], "length")
        assert_same_state(plain, fast)


@pytest.mark.parametrize("at", (3, 5, 8, 11))
def test_an_end_token_inside_a_draft(model: Model, at: int) -> None:
    """Drafts leave end tokens out; one that is drafted all the same ends the text as ever."""
    tokens = plainly(model).token_ids
    end = frozenset({tokens[at]})
    runner = make_runner(model)
    object.__setattr__(runner.spec, "eos_token_ids", end)
    try:
        drafters = [Drafter(prompt(LENGTH), earlier=[tokens], never=never) for never in (end, frozenset[int]())]
        found = [run(runner, model, drafter) for drafter in drafters]
    finally:
        object.__setattr__(runner.spec, "eos_token_ids", frozenset())
    for request in found:
        assert (request.token_ids, request.reason) == (tokens[: tokens.index(tokens[at]) + 1], "eos")
        assert request.text == model.tokenizer.decode(request.token_ids[:-1], skip_special_tokens=True)
        assert request.num_steps == len(request.token_ids) - 1  # the end token itself never enters the cache


def run(runner: Runner, model: Model, drafter: Drafter) -> Request:
    sequence = make_sequence(runner, "full", open_len=32)
    request = Request(sequence, runner.prefill([sequence], [prompt(LENGTH)])[0], NUM_NEW, drafter=drafter)
    list(generate(runner, [request], model.tokenizer))
    assert sequence.logical_len == sequence.committed_len == LENGTH + request.num_steps
    sequence.release()
    return request


@pytest.mark.parametrize("length", [1, 4])
@pytest.mark.parametrize("policy", ["full", "h2o + 64tok", "tova + 64tok", "full + int4"])
def test_a_stop_string_inside_a_draft(model: Model, policy: str, length: int) -> None:
    reply = plainly(model, policy)
    tokens, text = reply.token_ids, reply.text
    for at in (5, 7):
        options: dict[str, Any] = {"max_new_tokens": NUM_NEW, "stop": [text[at : at + length]]}
        with make_session(model, policy) as plain, make_session(model, policy) as fast:
            expected = plain.generate(**options)
            found = fast.generate(**options, speculate=True, draft_from=[tokens])
            assert (found.text, found.reason, found.token_ids) == (expected.text, expected.reason, expected.token_ids)
            assert expected.reason == "stop" and found.stats.accepted > 0
            assert_same_state(plain, fast)
            assert plain.generate(max_new_tokens=9).token_ids == fast.generate(max_new_tokens=9).token_ids


def test_what_might_have_been_a_stop_string(model: Model) -> None:
    """Tokens that wait for the rest of a stop string are committed in the end, and seal when they would have."""
    text = plainly(model, "h2o + 64tok").text
    stops = [text[at : at + 3] + "\x00" for at in range(len(text) - 3)]
    with make_session(model, "h2o + 64tok") as plain, make_session(model, "h2o + 64tok") as fast:
        expected = plain.generate(max_new_tokens=NUM_NEW, stop=stops)
        reply = fast.generate(
            max_new_tokens=NUM_NEW, stop=stops, speculate=6, draft_from=[partly_wrong(expected.token_ids)]
        )
        assert (reply.text, reply.reason) == (expected.text, "length") and reply.stats.accepted > 0
        assert_same_state(plain, fast)


def test_a_ragged_batch_of_drafts_and_none(model: Model) -> None:
    policies = ("full", "h2o + 64tok", "full + int4", "streaming + 64tok")
    lengths = (61, 70, 33, 64)
    alone, together = (batch(model, policies, lengths, drafts=drafts) for drafts in (False, True))
    assert [request.token_ids for request in together] == [request.token_ids for request in alone]
    accepted = [request.num_accepted for request in together]
    assert accepted[0] > 0 and accepted[1] > 0 and accepted[3] > 0
    assert accepted[2] == together[2].num_drafted == 0


def batch(model: Model, policies: tuple[str, ...], lengths: tuple[int, ...], *, drafts: bool) -> list[Request]:
    """Sequences in one batch; the third has no drafter."""
    runner = make_runner(model)
    sequences = [make_sequence(runner, policy) for policy in policies]
    prompts = [prompt(length, seed=length) for length in lengths]
    logits = runner.prefill(sequences, prompts)
    requests = [Request(*pair, NUM_NEW - 5 * i) for i, pair in enumerate(zip(sequences, logits, strict=True))]
    if drafts:
        known = [partly_wrong(request.token_ids) for request in batch(model, policies, lengths, drafts=False)]
        for i in (0, 1, 3):
            requests[i].drafter = Drafter(prompts[i], 3 + i, earlier=[known[i]])
    list(generate(runner, requests, model.tokenizer))
    for sequence in sequences:
        sequence.release()
    return requests


@pytest.mark.parametrize("policy", ["full", "h2o + 64tok + int4", "tova + 64tok", "expected + 64tok"])
def test_a_rejected_draft_leaves_nothing(model: Model, policy: str) -> None:
    runner = make_runner(model)
    sequences = [make_sequence(runner, policy) for _ in range(2)]
    for sequence in sequences:
        runner.prefill([sequence], [prompt(LENGTH)])
        for token in (3, 4, 5):
            runner.decode([sequence], [token])
    before = dump(sequences[0])
    (verified,) = runner.verify([sequences[0]], [[7, 8, 9]])
    verified.observe()
    after = dump(sequences[0])
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert sequences[0].logical_len == sequences[1].logical_len == LENGTH + 3
    first, second = (torch.cat([runner.decode([s], [t]) for t in range(20)]) for s in sequences)
    assert torch.equal(first, second)
    for sequence in sequences:
        sequence.release()


def test_rows_are_the_logits_after_each_token(model: Model) -> None:
    runner = make_runner(model)
    sequences = [make_sequence(runner, "h2o + 64tok") for _ in range(4)]
    runner.prefill(sequences, [prompt(LENGTH), prompt(40, seed=3)] * 2)
    tokens = [[7, 8, 9, 10], [11, 12]]
    found = runner.verify(sequences[:2], tokens)
    for verified, sequence, ids in zip(found, sequences[2:], tokens, strict=True):
        one_by_one = torch.cat([runner.decode([sequence], [token]) for token in ids])
        torch.testing.assert_close(verified.logits_TV, one_by_one)
    with pytest.raises(InputError, match="9 tokens to verify; 8 fit before the block seals"):
        runner.verify(sequences[:1], [[1] * 9])
    for sequence in sequences:
        sequence.release()


def test_sampling_is_unbiased(model: Model) -> None:
    """Chi-square of three sampled tokens against their exact probabilities; most drafts are rejected somewhere."""
    num_draws, width, heat = 700, 3, 2.0
    runner, root = make_runner(model), make_sequence(make_runner(model), "full")
    tree = Tree(runner, root, runner.prefill([root], [prompt(LENGTH)])[0], width, heat)
    drafts = [[prompt(LENGTH)[-1], *tree.likely[0, b, c]] for b, c in ((1, 0), (2, 2))]
    drafts += [[prompt(LENGTH)[-1], *tree.likely[1, 0, 1]]]
    forks = [root.fork() for _ in range(num_draws)]
    requests = [
        Request(fork, tree.logits_V, 3, Sampling(heat, width, seed=i), drafter=Drafter(prompt(LENGTH), earlier=drafts))
        for i, fork in enumerate(forks)
    ]
    list(generate(runner, requests, model.tokenizer))
    assert 0 < sum(request.num_accepted for request in requests) < sum(request.num_drafted for request in requests)
    counts = {tuple(path): 0 for path in tree.likely.values()}
    for request in requests:
        counts[tuple(request.token_ids)] += 1
    misses = [(counts[tuple(path)] - num_draws * p) ** 2 / (num_draws * p) for path, p in tree.paths()]
    assert sum(misses) < 54.1  # 26 degrees of freedom: exceeded once in a thousand
    for sequence in (root, *forks):
        sequence.release()


class Tree:
    """The paths of three tokens that top-k sampling can take, and their probabilities, from plain steps."""

    def __init__(self, runner: Runner, root: Any, logits_V: Tensor, width: int, heat: float) -> None:
        self.runner, self.width, self.heat, self.logits_V = runner, width, heat, logits_V
        self.likely: dict[tuple[int, ...], list[int]] = {}
        self.chance: dict[tuple[int, ...], float] = {}
        self._grow(root, logits_V, (), [], 1.0)

    def _grow(self, sequence: Any, logits_V: Tensor, key: tuple[int, ...], path: list[int], chance: float) -> None:
        if len(key) == 3:
            self.likely[key], self.chance[key] = path, chance
            return
        values, tokens = logits_V.topk(self.width)
        share = torch.softmax(values / self.heat, -1).tolist()
        for i, token in enumerate(tokens.tolist()):
            branch = sequence.fork()
            after_V = self.runner.decode([branch], [token])[0]
            self._grow(branch, after_V, (*key, i), [*path, token], chance * share[i])
            branch.release()

    def paths(self) -> list[tuple[list[int], float]]:
        return [(self.likely[key], self.chance[key]) for key in product(range(self.width), repeat=3)]


def test_a_seed_gives_the_same_tokens(model: Model) -> None:
    for seed in range(2):
        options: dict[str, Any] = {"temperature": 2.0, "top_p": 0.9, "seed": seed}
        expected = plainly(model, **options)
        reply = plainly(model, **options, speculate=True, draft_from=[partly_wrong(expected.token_ids)])
        assert reply.token_ids == expected.token_ids and reply.stats.accepted > 0


@pytest.mark.parametrize("policy", ["full", "h2o + 64tok"])
@pytest.mark.parametrize("num_calls", [1, 4, 9])
def test_ctrl_c_leaves_the_session_usable(model: Model, policy: str, num_calls: int) -> None:
    expected = plainly(model, policy).token_ids
    with make_session(model, policy) as session:
        hook = model.hf.base_model.layers[1].mlp.register_forward_hook(interrupt_at(num_calls))
        try:
            with pytest.raises(KeyboardInterrupt):
                session.generate(max_new_tokens=NUM_NEW, speculate=True, draft_from=[partly_wrong(expected)])
        finally:
            hook.remove()
        done = len(session.token_ids) - LENGTH
        assert num_calls <= done < NUM_NEW
        rest = session.generate(max_new_tokens=NUM_NEW - done, speculate=True, draft_from=[expected]).token_ids
        assert session.token_ids[LENGTH:] == expected and rest == expected[done:]


def interrupt_at(call: int) -> Callable[..., None]:
    left = iter(range(call - 1, -1, -1))

    def hook(*_: Any) -> None:
        if next(left) == 0:
            raise KeyboardInterrupt

    return hook


def test_whoever_stops_reading_keeps_what_was_written(model: Model) -> None:
    expected = plainly(model)
    with make_session(model) as session:
        pieces = session.generate(stream=True, max_new_tokens=NUM_NEW, speculate=True, draft_from=[expected.token_ids])
        text = "".join(next(pieces) for _ in range(3))
        del pieces
        assert expected.text.startswith(text)
        done = len(session.token_ids) - LENGTH
        rest = session.generate(max_new_tokens=NUM_NEW - done).token_ids
        assert session.token_ids[LENGTH:] == expected.token_ids == expected.token_ids[:done] + rest


def test_a_session_drafts_from_all_its_text(model: Model, tmp_path: Path) -> None:
    """Also from what the cache has dropped, and from what was saved."""
    with make_session(model, "streaming + 64tok") as session:
        session.extend(prompt(150, seed=8) + prompt(LENGTH)[30:40])
        assert 45 not in session.kept(0, 0)
        session.save(tmp_path / "talk.kvfold")
        with Session.load(model, tmp_path / "talk.kvfold") as loaded, session.fork() as branch:
            for one in (session, loaded, branch):
                drafter = one._request(speculate=True).drafter
                assert drafter is not None and drafter.draft(100) == prompt(LENGTH)[40:50]
            assert session._request().drafter is None


def test_batches_of_prompts(model: Model) -> None:
    prompts = ["a sea, a sea, a sea, a", "one two one two one", "the the the the"]
    plain = kvfold.generate(model, prompts, "h2o + 64tok", max_new_tokens=20)
    fast = kvfold.generate(model, prompts, "h2o + 64tok", max_new_tokens=20, speculate=4)
    assert [reply.token_ids for reply in fast] == [reply.token_ids for reply in plain]
    assert all(reply.stats.drafted == 0 for reply in plain)
    with pytest.raises(InputError, match="speculate is 0"):
        kvfold.generate(model, prompts, speculate=0)
