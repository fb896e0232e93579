"""Steps queued ahead of the host change nothing but the order of work: tokens, caches and errors are those of plain
steps."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvfold.engine.cuda_graphs import CudaGraphs
from kvfold.engine.generate import generate
from kvfold.engine.output_processor import Request
from kvfold.engine.runner import Runner
from kvfold.engine.speculate import Drafter
from kvfold.errors import OutOfPages
from kvfold.models.loader import Model
from kvfold.pages.sequence import SequenceCache
from tests.engine.runs import kept, make_runner, make_sequence
from tests.tiny import prompt, ready

LENGTHS = (50, 93, 71)
NUM_NEW = (30, 9, 30)  # blocks of 8 seal several times; one request ends before the others


class Noted(CudaGraphs):
    """Captured steps, whether the host knew the tokens of each, and how many they were."""

    def __init__(self) -> None:
        super().__init__()
        self.on_device: list[bool] = []
        self.lengths: list[int] = []  # of the longest input of each

    def decode(self, hf: Any, sequences: Sequence[SequenceCache], tokens: Any, **options: Any) -> Tensor | None:
        self.on_device.append(isinstance(tokens, Tensor))
        self.lengths.append(1 if isinstance(tokens, Tensor) else max(map(len, tokens)))
        return super().decode(hf, sequences, tokens, **options)


@pytest.fixture(scope="module")
def model() -> Model:
    return ready("llama")


def requests(runner: Runner, policy: str) -> list[Request]:
    sequences = [make_sequence(runner, policy, page_size=16, open_len=8) for _ in LENGTHS]
    logits = runner.prefill(sequences, [prompt(length, seed=1) for length in LENGTHS])
    return [Request(s, row, count) for s, row, count in zip(sequences, logits, NUM_NEW, strict=True)]


def both(model: Model, policy: str) -> tuple[tuple[Runner, list[Request]], tuple[Runner, list[Request]]]:
    plain, fast = make_runner(model), make_runner(model)
    fast.graphs = Noted()
    return (plain, requests(plain, policy)), (fast, requests(fast, policy))


def same_state(mine: Request, theirs: Request) -> None:
    assert (mine.token_ids, mine.text, mine.reason) == (theirs.token_ids, theirs.text, theirs.reason)
    a, b = mine.sequence, theirs.sequence
    assert (a.sealed_len, a.open.fill, a.open.committed) == (b.sealed_len, b.open.fill, b.open.committed)
    assert kept(a) == kept(b)
    torch.testing.assert_close(mine.logits_V, theirs.logits_V, atol=2e-3, rtol=1e-3)


def release(*groups: Sequence[Request]) -> None:
    for request in (request for group in groups for request in group):
        request.sequence.release()


@pytest.mark.parametrize("policy", ["full", "keydiff + 3x + protect(none)", "decode(keydiff + 48tok)"])
def test_requests_end_as_they_do_without(model: Model, policy: str) -> None:
    (plain, expected), (fast, found) = both(model, policy)
    list(generate(plain, expected, model.tokenizer))
    list(generate(fast, found, model.tokenizer))
    assert isinstance(fast.graphs, Noted) and sum(fast.graphs.on_device) >= 24
    for mine, theirs in zip(found, expected, strict=True):
        same_state(mine, theirs)
    release(expected, found)


def test_a_token_that_ends_its_request_leaves_nothing_behind(model: Model) -> None:
    (plain, expected), (fast, found) = both(model, "full")
    list(generate(plain, expected, model.tokenizer))
    last = expected[2].token_ids[12]  # 71 + 12: in the middle of a block
    release(expected)
    plain.spec = fast.spec = replace(model.spec, eos_token_ids=frozenset((last,)))
    expected = requests(plain, "full")
    list(generate(plain, expected, model.tokenizer))
    list(generate(fast, found, model.tokenizer))
    assert "eos" in {request.reason for request in found}
    for mine, theirs in zip(found, expected, strict=True):
        same_state(mine, theirs)
    release(expected, found)


def test_nothing_is_evicted_for_a_token_that_ends_its_request(model: Model) -> None:
    policy = "decode(keydiff + 48tok)"
    (plain, expected), (fast, found) = both(model, policy)
    list(generate(plain, expected, model.tokenizer))
    at = next(i for i, request in enumerate(expected) if request.token_ids[8] not in request.token_ids[:8])
    last = expected[at].token_ids[8]  # sampled when the block of 8 is full
    release(expected)
    plain.spec = fast.spec = replace(model.spec, eos_token_ids=frozenset((last,)))
    expected = requests(plain, policy)
    list(generate(plain, expected, model.tokenizer))
    list(generate(fast, found, model.tokenizer))
    assert found[at].reason == "eos" and found[at].sequence.open.room == 0
    same_state(found[at], expected[at])
    release(expected, found)


def test_who_stops_listening_finds_the_cache_where_the_text_ends(model: Model) -> None:
    (plain, expected), (fast, found) = both(model, "full")
    for runner, group in ((plain, expected), (fast, found)):
        pieces = generate(runner, group, model.tokenizer)
        while len(group[0].token_ids) < 11:
            next(pieces)
        del pieces
    for mine, theirs in zip(found, expected, strict=True):
        same_state(mine, theirs)
        assert mine.sequence.logical_len == mine.sequence.committed_len
    release(expected, found)


def test_a_full_arena_is_told_after_the_text(model: Model) -> None:
    (plain, expected), (fast, found) = both(model, "full")
    page_class = found[0].sequence.tail.layers[0].page_class
    blocker = model.arena.allocate(page_class, model.arena.free_bytes // page_class.bytes_per_page)
    for runner, group in ((plain, expected), (fast, found)):
        with pytest.raises(OutOfPages):
            list(generate(runner, group, model.tokenizer))
    for span in blocker:
        model.arena.free(span)
    for mine, theirs in zip(found, expected, strict=True):
        same_state(mine, theirs)
    release(expected, found)


@pytest.mark.parametrize("policy", ["h2o + 80tok", "tova + 80tok"])
def test_scorers_that_watch_are_not_run_ahead(model: Model, policy: str) -> None:
    runner = make_runner(model)
    runner.graphs = Noted()
    found = requests(runner, policy)
    list(generate(runner, found, model.tokenizer))
    assert isinstance(runner.graphs, Noted) and not any(runner.graphs.on_device)
    release(found)


@pytest.mark.parametrize(("policy", "most"), [("full", 4), ("h2o + 64tok", 1), ("quest(tokens=64)", sys.maxsize)])
def test_drafts_are_no_longer_than_a_captured_step_takes(
    model: Model, policy: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """fp32, two queries a KV head, nine at a time: four tokens. A scorer that watches: no draft; the plain way: any."""
    monkeypatch.setattr("kvfold.engine.cuda_graphs._MOST_FP32_QUERIES", 9)
    (plain, expected), (fast, found) = both(model, policy)
    list(generate(plain, expected, model.tokenizer))
    assert fast.most_verified(found[0].sequence) == most
    for request, known in zip(found, expected, strict=True):
        request.drafter = Drafter(known.token_ids[:1], earlier=[known.token_ids])
    list(generate(fast, found, model.tokenizer))
    assert isinstance(fast.graphs, Noted) and max(fast.graphs.lengths) == min(most, 8)  # blocks have 8 slots
    for mine, theirs in zip(found, expected, strict=True):
        same_state(mine, theirs)
    release(expected, found)
