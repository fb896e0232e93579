"""Drafts on a real model: the same greedy tokens, and several of them a pass where the answer repeats the prompt."""

from __future__ import annotations

import pytest

import kvfold

pytestmark = pytest.mark.model

TEXT = (
    "The harbour of Lindholm has three piers. The northern pier belongs to the fishermen, the middle one to the ferry, "
    "and the southern one to nobody. Every morning at six the ferry leaves for the islands with mail, milk and guests. "
)
OPENING = TEXT[: TEXT.index(" belongs")]


def write(model: kvfold.Model, policy: str, speculate: bool) -> kvfold.Reply:
    """Two copies of a text and the beginning of a third: a model that can read goes on copying."""
    with kvfold.Session(model, policy, template=None, open_len=16) as session:
        session.extend(f"{TEXT}\n\n{TEXT}\n\n{OPENING}")
        reply: kvfold.Reply = session.generate(max_new_tokens=32, speculate=speculate)
        return reply


@pytest.mark.parametrize(
    "policy",
    [
        "full",
        "h2o + 96tok",
        pytest.param("int4", marks=pytest.mark.slow),
        pytest.param("streaming + 96tok", marks=pytest.mark.slow),
    ],
)
def test_greedy_tokens_are_the_same(smollm2: kvfold.Model, policy: str) -> None:
    plain, fast = write(smollm2, policy, False), write(smollm2, policy, True)
    assert fast.token_ids == plain.token_ids and fast.text == plain.text
    assert fast.stats.drafted >= fast.stats.accepted > 0


def test_a_copied_text_has_several_tokens_a_pass(smollm2: kvfold.Model) -> None:
    reply = write(smollm2, "full", True)
    assert reply.text.startswith(" belongs to the fishermen")
    assert reply.stats.tokens_per_pass is not None and reply.stats.tokens_per_pass > 1.5
