"""The same request has the same reply, whatever the cache held: hit, cold and unmarked, under every kind of policy."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvfold.engine.runner import Runner
from kvfold.engine.scheduling.jobs import Job
from kvfold.engine.scheduling.task import Task
from kvfold.models.loader import Model
from kvfold.policy.policy import Policy
from kvfold.serve.api.request import Block, ChatRequest
from kvfold.serve.cache.breakpoints import (
    Boundary,
    CachePlan,
    CacheWrite,
    anthropic_plan,
    boundaries_of,
    compression_points,
    openai_plan,
)
from kvfold.serve.cache.source import CachedSource, PlainSource, PromptCache
from kvfold.serve.prompt import PromptRenderer
from kvfold.store import DeviceTier, DiskTier, HostTier, PrefixStore
from kvfold.store.markers import CacheMarkers
from kvfold.store.tiers.base import ByteTier
from tests.serve.running import running, tool_model

SYSTEM = "You keep the log of a lighthouse. Answer in one line, and name the day. " * 2
TURNS = [
    "Day one: the lamp was cleaned, the glass of the east window is cracked, and oil came by boat in the morning.",
    "Day two: fog until noon; the horn sounded every two minutes; a trawler answered twice and went on to the north.",
    "Which window is cracked, and since when? Look again at what I told you about the first day, and at the glass too.",
    "Then write to the harbour office: glass for the east window, two panes, before the autumn storms begin, please.",
]
ANSWERS = ["Day one is noted: lamp, window, oil.", "Noted: fog, horn, one trawler.", "The east one, since day one."]
POINT_TOKENS, CHUNK, TTL_S = 64, 64, 300.0
POLICIES = [
    "keydiff + 2x",
    "kvzip + global + 2x + int4",
    "full + int4",
    "full + int8 + quest(tokens=48)",
    "expected + ada + 2x",
    "streaming + 80tok",
    "h2o + 2x",
    "keydiff + pyramid + 90tok + int8",
    "keydiff + 2x + between_chunks(chunk=64)",
    "knorm + 2x + merge",
    "kvzip + 2x + fit",
    "knorm + 2x + kivi4",
    "keydiff + 80tok + slot",
    "keydiff + 2x + recall(tokens=32)",
    "keydiff + 2x + quest(tokens=48)",
    "keydiff + 2x + rocket(tokens=24)",
    "sentence(knorm) + 2x",
    "keydiff + min(2x, 100tok)",
    "decode(h2o + 100tok)",
]


class Replied(NamedTuple):
    num_read: int  # by the contract
    num_reused: int
    logits_V: Tensor
    tokens: list[int]


def now() -> float:
    return 1.0


class Bench:
    """What a server does with a conversation, without HTTP: tenants with a cache each."""

    def __init__(self, model: Model, policy: str, store: PrefixStore) -> None:
        self.model, self.policy, self.store = model, Policy.parse(policy), store
        self.runner = Runner(model.hf, model.spec, model.arena, chunk_len=CHUNK)
        self.renderer = PromptRenderer(model.tokenizer)
        self._prompt_caches: dict[str, PromptCache] = {}

    def reply(self, ask: ChatRequest, tenant: str, *, openai: bool = False, num_new: int = 5) -> Replied:
        prompt = self.renderer.prompt(ask)
        boundaries = boundaries_of(ask, prompt, ask.model)
        plan = openai_plan(boundaries, 32, TTL_S, is_implicit=True) if openai else anthropic_plan(boundaries, 32)
        points = compression_points(boundaries, POINT_TOKENS)
        source = self.source(tenant, prompt.tokens, plan, points)
        task = self.task(prompt.tokens, source)
        while task.is_prefilling:
            task.prefill(lambda: False)
        logits_V, tokens = task.output.request.logits_V, list[int]()
        out_V = logits_V
        for _ in range(num_new):
            tokens.append(int(out_V.argmax()))
            out_V = self.runner.decode([task.sequence], tokens[-1:])[0]
        task.end("cancelled")
        return Replied(source.usage.num_read, task.num_reused, logits_V, tokens)

    def task(self, tokens: list[int], source: PlainSource) -> Task:
        return Task(Job(tokens, source, lambda event: None), self.runner, self.model.tokenizer, in_chunks=False)

    def source(self, tenant: str, tokens: list[int], plan: CachePlan, points: list[int]) -> PlainSource:
        if not plan.writes:
            return PlainSource(lambda: self.runner.new_sequence(self.policy), len(tokens), points=points)
        if tenant not in self._prompt_caches:
            prefixes = self.store.prefixes(self.model, self.policy, prefill_len=CHUNK, tenant=tenant)
            self._prompt_caches[tenant] = PromptCache(prefixes, CacheMarkers(self.store, prefixes.binding))
        return CachedSource(self._prompt_caches[tenant], tokens, plan, 0.0, now, points)


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    yield tool_model()


def asked(turn: int, *, marks: str = "sl") -> ChatRequest:
    """The conversation up to a turn, with markers on the system text and on the last block."""
    blocks = [Block("system", "system", SYSTEM, ttl_s=TTL_S if "s" in marks else None)]
    for i in range(turn + 1):
        ttl_s = TTL_S if "l" in marks and i == turn else None
        blocks.append(Block("text", "user", TURNS[i], 2 * i, ttl_s=ttl_s))
        if i < turn:
            blocks.append(Block("text", "assistant", ANSWERS[i], 2 * i + 1))
    return ChatRequest("tiny", blocks, 8)


@contextmanager
def benching(model: Model, policy: str, *, with_device: bool = False, disk: Path | None = None) -> Iterator[Bench]:
    tiers: list[ByteTier] = [HostTier(1 << 26, clock=now)]
    tiers += [] if disk is None else [DiskTier(disk, 1 << 26, clock=now)]
    device = DeviceTier(1 << 24, clock=now) if with_device else None
    with PrefixStore(tiers, device=device, chunk_len=16, clock=now) as store:
        yield Bench(model, policy, store)
    assert model.arena.used_bytes == 0


def assert_same(one: Replied, *others: Replied) -> None:
    for other in others:
        assert torch.equal(one.logits_V, other.logits_V)
        assert one.tokens == other.tokens


@pytest.mark.parametrize("policy", POLICIES)
def test_a_conversation_with_a_moving_marker_hits_and_replies_as_cold(model: Model, policy: str) -> None:
    with benching(model, policy) as bench:
        for turn in range(3):
            hit = bench.reply(asked(turn), "one")
            assert bench.store.flush()
            cold, plain = bench.reply(asked(turn), f"cold {turn}"), bench.reply(asked(turn, marks=""), "")
            assert (hit.num_read > 0, hit.num_reused > 0) == (turn > 0, turn > 0)
            assert cold.num_read == cold.num_reused == plain.num_reused == 0
            assert_same(hit, cold, plain)


@pytest.mark.parametrize("policy", ["keydiff + 2x", "kvzip + global + 2x + int4", "streaming + 80tok"])
def test_so_it_does_from_the_device_after_it_gave_way_and_after_a_restart(
    model: Model, policy: str, tmp_path: Path
) -> None:
    found = []
    with benching(model, policy, with_device=True, disk=tmp_path) as bench:
        for turn in range(3):
            found.append(bench.reply(asked(turn, marks="l"), "one"))
            assert bench.store.flush() and bench.store.device is not None
            while turn == 1 and bench.store.device.shrink():
                pass
        tails = [bench.reply(asked(2, marks=marks), "one") for marks in ("sl", "l", "")]
        assert [tail.num_reused > 0 for tail in tails] == [True, True, False]
    with benching(model, policy, with_device=True, disk=tmp_path) as bench:
        again = bench.reply(asked(2), "one")
        assert again.num_read > 0 and again.num_reused > 0
        assert_same(again, bench.reply(asked(2), "other"), *tails, found[2])


def test_prompts_that_openai_caches_unasked_and_tools_reply_as_cold(model: Model) -> None:
    tool = Block("tool", "system", data={"name": "look", "description": "Look at a day " * 6, "parameters": {}})
    call = [
        Block("tool_use", "assistant", message=5, data={"id": str(i), "name": "look", "arguments": {}}) for i in "ab"
    ]
    result = [Block("tool_result", "tool", f"day {i}: calm sea " * 3, 6, {"id": str(i)}) for i in "ab"]
    plain, ended = asked(1, marks="").blocks, asked(2, marks="").blocks
    talks = [[tool, *plain], [tool, *ended], [tool, *ended, *call, *result]]
    with benching(model, "keydiff + 2x") as bench:
        for number, blocks in enumerate(talks):
            ask = ChatRequest("tiny", blocks, 8)
            hit = bench.reply(ask, "one", openai=True)
            assert bench.store.flush()
            assert (hit.num_read > 0, hit.num_reused > 0) == (number > 0, number > 0)
            assert_same(hit, bench.reply(ask, f"cold {number}", openai=True), bench.reply(ask, ""))


def test_a_marker_behind_a_point_is_served_from_the_point_and_counts_up_to_it(model: Model) -> None:
    with benching(model, "keydiff + 2x") as bench:
        first = asked(0)
        short = ChatRequest(
            "tiny", [*first.blocks, Block("text", "assistant", "ok", 1), Block("text", "user", "go", 2, ttl_s=TTL_S)], 8
        )
        bench.reply(first, "one")
        bench.reply(short, "one")
        assert bench.store.flush()
        ends = bench.renderer.prompt(short).ends
        assert ends is not None
        again = bench.reply(short, "one")
        assert (again.num_read, again.num_reused) == (ends[1], ends[1])
        assert_same(again, bench.reply(short, "other"))


def test_other_blocks_of_the_same_tokens_are_another_prompt(model: Model) -> None:
    """One is compressed where the other is not; neither takes what the other stored."""
    with benching(model, "keydiff + 70tok") as bench:
        tokens, boundaries = (
            [i % 90 for i in range(300)],
            [Boundary(end, bytes([end % 251]) * 32, "messages") for end in (80, 150, 280)],
        )
        plan = CachePlan(boundaries, boundaries[-1:], [CacheWrite(boundaries[-1], TTL_S)])
        for points, expected in (([80, 150, 280], 0), ([150, 280], 0), ([80, 150, 280], 280), ([150, 280], 280)):
            source = bench.source("one", tokens, plan, points)
            begun = source.begin()
            assert begun.num_read == expected
            for point in points if not expected else ():
                bench.runner.prefill([begun.sequence], [tokens[begun.sequence.committed_len : point]])
                source.reached(begun.sequence, point)
            begun.sequence.release()
            assert bench.store.flush()


def test_a_bound_holds_in_a_long_conversation(model: Model) -> None:
    """At each point; what follows the last one is shorter than the distance of two, and the template's own."""
    blocks = [Block("text", "user" if i % 2 == 0 else "assistant", TURNS[i % 4], i) for i in range(7)]
    with benching(model, "keydiff + 80tok") as bench:
        prompt = bench.renderer.prompt(ChatRequest("tiny", blocks, 8))
        points = compression_points(boundaries_of(ChatRequest("tiny", blocks, 8), prompt, ""), POINT_TOKENS)
        task = bench.task(prompt.tokens, bench.source("", prompt.tokens, CachePlan(), points))
        assert len(points) > 4
        while task.is_prefilling:
            task.prefill(lambda: False)
            most = max(max(task.sequence.stored_lens(layer)) for layer in range(model.spec.num_layers))
            assert most <= 80 + (0 if task.sequence.committed_len in points else POINT_TOKENS + 16)
        task.end("cancelled")


@given(st.lists(st.integers(0, 90), max_size=30), st.integers(1, 80), st.integers(0, 30))
def test_a_longer_prompt_has_the_points_of_a_shorter_one(lens: list[int], least: int, num_first: int) -> None:
    boundaries = [Boundary(end, b"", "messages") for end in accumulate(lens)]
    whole, first = compression_points(boundaries, least), compression_points(boundaries[:num_first], least)
    assert whole[: len(first)] == first
    assert all(after - before >= least for before, after in pairwise([0, *whole]))
    assert sum(lens) - (whole[-1] if whole else 0) < least


def test_a_server_replies_alike_to_marked_unmarked_and_warmed_requests(model: Model) -> None:
    """Through the official client, several tails at once."""
    text, mark = SYSTEM * 2, {"type": "ephemeral"}

    def request(question: str, marked: bool, **more: Any) -> Any:
        system = [{"type": "text", "text": text, **({"cache_control": mark} if marked else {})}]
        turns = [{"role": "user", "content": question}]
        return {"model": "tiny", "max_tokens": 8, "system": system, "messages": turns, **more}

    with running(model, "keydiff + 2x") as server:
        create, questions = server.anthropic.messages.create, ["who?", "which window?", "when, and why so late?"]
        plain = [create(**request(question, False)).content for question in questions]
        warm = create(**request("x", True, max_tokens=0))
        with ThreadPoolExecutor(3) as pool:
            hits = list(pool.map(lambda question: create(**request(question, True)), questions))
        written = warm.usage.cache_creation_input_tokens
        assert [hit.usage.cache_read_input_tokens for hit in hits] == [written] * 3
        assert [hit.content for hit in hits] == plain
        (reused,) = re.findall(r"^kvfold_reused_tokens_total (\d+)", server.service.metrics.text(), re.MULTILINE)
        assert int(reused) == 3 * written > 0


def test_a_server_replies_alike_to_seeded_requests(model: Model) -> None:
    asked: Any = {"model": "tiny", "max_tokens": 8, "temperature": 1.0, "seed": 7}
    turns: Any = [{"role": "system", "content": SYSTEM * 2}, {"role": "user", "content": "who?"}]
    with running(model, "keydiff + 2x") as server:
        create = server.openai.chat.completions.create
        uncached = create(messages=turns, **asked, extra_body={"prompt_cache_options": {"mode": "explicit"}})
        cold, hit = (create(messages=turns, **asked) for _ in range(2))
        cached = [one.usage.prompt_tokens_details.cached_tokens for one in (uncached, cold, hit)]
        assert cached[:2] == [0, 0] and cached[2] > 0
        assert len({one.choices[0].message.content for one in (uncached, cold, hit)}) == 1
