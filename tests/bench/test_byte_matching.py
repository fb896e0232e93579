"""Policies of every kind brought to one budget of bytes on tiny models: never above it, and no page could be added."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvfold.bench.byte_matching import evicts_nothing, match_many, resident_bytes
from kvfold.bench.size_search import Matched, ratio_text
from kvfold.engine.runner import Runner
from kvfold.errors import InputError, OutOfPages, PolicyError, SizeError
from kvfold.models.loader import Model
from kvfold.pages.page_config import PageConfig
from kvfold.pages.sequence import SequenceCache
from kvfold.policy.policy import Policy
from kvfold.policy.size import SizeFacts
from kvfold.session import Session
from kvfold.stats import measure
from tests.tiny import prompt

TOKENS = prompt(500)
CONFIG = PageConfig(open_len=8)
SMALL = "protect(sinks=2, recent=4)"
POLICIES = {  # by the share of the bf16 cache that they are brought to; models of the tests store fp32 by default
    f"keydiff + {SMALL}": 0.5,
    f"keydiff + ada + {SMALL}": 0.5,
    f"snapkv(window=8) + ada + int8 + {SMALL}": 0.4,
    f"keydiff + int4 + {SMALL}": 0.25,
    f"knorm + global + int2 + {SMALL}": 0.2,
    f"keydiff + kivi4 + {SMALL}": 0.4,
    f"h2o + int4 + {SMALL}": 0.35,
    f"tova + codec(k=int8, v=int4) + {SMALL}": 0.3,
}


def _runner(model: Model) -> Runner:
    return Runner(model.hf, model.spec, model.arena)


def match(
    runner: Runner, policy: str, share: float, tokens: Sequence[int], *, config: PageConfig | None = None
) -> Matched:
    (found,) = match_many(runner, [(policy, share)], tokens, config=config)
    if isinstance(found, SizeError):
        raise found
    return found


def _step_bytes(runner: Runner, policy: str) -> int:
    """A page of every head, rounded up to superblocks: what one slot per head more may cost."""
    sequence = runner.new_sequence(Policy.parse(policy), CONFIG)
    layers = enumerate(runner.spec.layers)
    pages = sum(sequence.page_class(i).bytes_per_page * layer.num_kv_heads for i, layer in layers)
    sequence.release()
    return (1 + math.ceil(pages / runner.arena.superblock_bytes)) * runner.arena.superblock_bytes


@pytest.mark.parametrize(("policy", "share"), POLICIES.items())
def test_bytes_fit_the_budget_and_fill_it_but_for_a_page_per_head(model: Model, policy: str, share: float) -> None:
    runner = _runner(model)
    found = match(runner, policy, share, TOKENS, config=CONFIG)
    assert found.target_bytes == math.floor(share * found.full_bytes)
    assert found.target_bytes - _step_bytes(runner, found.policy) < found.achieved_bytes <= found.target_bytes
    assert 1 < _times(found) < len(TOKENS)


def _times(found: Matched) -> float:
    (text,) = re.findall(r" \+ ([\d.]+)x$", found.policy)
    return float(text)


@pytest.mark.parametrize(("family", "share"), [("qwen3", 0.3), ("gemma3", 0.6)])
def test_other_families_fit_too(shared: Callable[[str], Model], family: str, share: float) -> None:
    """Layers with a sliding window cannot shrink; they are part of what fits."""
    runner = _runner(shared(family))
    found = match(runner, f"keydiff + int4 + {SMALL}", share, TOKENS, config=CONFIG)
    assert found.target_bytes - _step_bytes(runner, found.policy) < found.achieved_bytes <= found.target_bytes


def test_one_slot_more_would_not_fit(model: Model) -> None:
    runner = _runner(model)
    found = match(runner, f"keydiff + int4 + {SMALL}", 0.25, TOKENS, config=CONFIG)
    slots = math.ceil(len(TOKENS) / _times(found))
    above = f"keydiff + int4 + {SMALL} + {ratio_text(slots + 1, len(TOKENS))}"
    assert resident_bytes(runner, [above], TOKENS, config=CONFIG)[0] > found.target_bytes


def test_achieved_is_what_a_session_holds(model: Model) -> None:
    found = match(_runner(model), f"snapkv(window=8) + ada + {SMALL}", 0.7, TOKENS)
    with Session(model, found.policy) as session:
        stats = measure(session.extend(TOKENS).cache)
    assert (found.achieved_bytes, found.full_bytes) == (stats.resident_bytes, stats.full_bytes)
    assert found.share == 1 / stats.ratio


def test_decoded_tokens_are_left_alone(model: Model) -> None:
    found = match(_runner(model), f"keydiff + {SMALL}", 0.5, TOKENS, config=CONFIG)
    assert str(Policy.parse(found.policy).decode.when) == str(Policy.parse("keydiff + 8x").decode.when)


def test_what_evicts_nothing_is_measured(model: Model) -> None:
    runner = _runner(model)
    found = match(runner, "int4", 0.9, TOKENS, config=CONFIG)
    assert found.policy == "int4"
    assert [found.achieved_bytes] == resident_bytes(runner, ["int4"], TOKENS, config=CONFIG)


@pytest.mark.parametrize("policy", ["int4", "snapkv + ada", f"keydiff + int2 + {SMALL}"])
def test_the_smallest_share_that_is_named_does_fit(model: Model, policy: str) -> None:
    """And nothing that is smaller by more than it was rounded."""
    runner = _runner(model)
    with pytest.raises(SizeError, match=r"bytes for 500 tokens, above the .* that it fits is [\d.]+$") as refused:
        match(runner, policy, 0.01, TOKENS)
    share = float(str(refused.value).rsplit(" ", 1)[1])
    assert match(runner, policy, share, TOKENS).achieved_bytes <= share * runner.spec.full_bytes(len(TOKENS))
    with pytest.raises(SizeError):
        match(runner, policy, share - 0.002, TOKENS)


def test_a_budget_that_holds_everything_evicts_nothing(model: Model) -> None:
    found = match(_runner(model), f"keydiff + int4 + {SMALL}", 1.0, TOKENS)
    assert found.policy.endswith(" + 1x")


def test_sizes_are_refused_where_one_is_looked_for(model: Model) -> None:
    with pytest.raises(PolicyError, match=r'"keydiff \+ 8x" has a size of its own'):
        match(_runner(model), "keydiff + 8x", 0.5, TOKENS)


@pytest.mark.parametrize("share", [0.0, -0.5, 1.5])
def test_budgets_are_shares(model: Model, share: float) -> None:
    with pytest.raises(InputError, match=f"the budget is {share} of the full cache"):
        match(_runner(model), "keydiff", share, TOKENS)


def test_many_find_what_each_finds_alone_in_fewer_forwards(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    runner, forwards = _runner(model), list[int]()
    prefill_many = runner.prefill_many

    def spy(sequences: Sequence[SequenceCache], tokens: Sequence[int]) -> Tensor:
        forwards.append(len(sequences))
        return prefill_many(sequences, tokens)

    monkeypatch.setattr(runner, "prefill_many", spy)
    wanted = [(f"keydiff + int4 + {SMALL}", 0.3), (f"keydiff + int4 + {SMALL}", 0.25), ("int4", 0.9), ("int4", 0.01)]
    alone = [match(runner, *each, TOKENS, config=CONFIG) for each in wanted[:3]]
    num_alone = len(forwards)
    *found, refused = match_many(runner, wanted, TOKENS, config=CONFIG)
    assert found == alone and isinstance(refused, SizeError)
    assert len(forwards) - num_alone < num_alone


def test_with_slack_a_search_ends_when_little_is_left(model: Model) -> None:
    policy, share = f"keydiff + ada + int4 + {SMALL}", 0.3
    (found,) = match_many(_runner(model), [(policy, share)], TOKENS, slack=0.2, config=CONFIG)
    assert isinstance(found, Matched) and 0.8 * found.target_bytes <= found.achieved_bytes <= found.target_bytes


def test_more_than_memory_holds_is_measured_in_parts(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = _runner(model)
    policy = f"keydiff + {SMALL}"
    expected = match(runner, policy, 0.5, TOKENS, config=CONFIG)
    prefill_many = runner.prefill_many

    def cramped(sequences: Sequence[SequenceCache], tokens: Sequence[int]) -> Tensor:
        if len(sequences) > 1:
            raise OutOfPages("no room for two")
        return prefill_many(sequences, tokens)

    monkeypatch.setattr(runner, "prefill_many", cramped)
    assert match(runner, policy, 0.5, TOKENS, config=CONFIG) == expected


def test_which_policies_evict_nothing() -> None:
    assert evicts_nothing("full") and evicts_nothing("int4")
    assert not evicts_nothing("snapkv + ada")
    with pytest.raises(PolicyError, match="nonsense"):
        evicts_nothing("nonsense")


@given(st.integers(1, 200_000).flatmap(lambda total: st.tuples(st.integers(1, total), st.just(total))))
def test_ratios_keep_exactly_the_slots_they_stand_for(case: tuple[int, int]) -> None:
    slots, num_tokens = case
    size = Policy.parse(f"keydiff + {ratio_text(slots, num_tokens)}").prefill.size
    assert size is not None
    facts = SizeFacts(num_tokens, num_heads=1, bytes_per_slot=1, overhead_bytes=0, open_len=0, full_bytes=0)
    assert size.slots_per_head(facts) == slots


def test_ratios_are_short() -> None:
    assert [ratio_text(slots, 1000) for slots in (1000, 500, 125, 333)] == ["1x", "2x", "8x", "3.01x"]
