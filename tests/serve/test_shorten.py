"""A server whose policy shortens: texts are cut alike in every request, usage tells both sizes, and what a question
cuts stands behind the last cache marker."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from kvfold.errors import PolicyError
from kvfold.policy import Policy
from kvfold.serve.api.request import Block, ChatRequest
from kvfold.serve.shorten import RequestShortener
from tests.serve.running import Running, running, tool_model, typed
from tests.serve.test_prompt_cache import MARK, create, text, user

DOCUMENT = "\n\n".join(f"The {thing} is in room {n}. It was painted by the {n}th owner. Nobody asks." for n, thing in
                       enumerate(("lamp", "bell", "boat", "clock", "drum", "flag", "globe", "harp"), 11))  # fmt: skip


@pytest.fixture(scope="module")
def by_graph() -> Iterator[Running]:
    with running(tool_model(), policy="shorten(graph, 2x, least=64)") as found:
        yield found


@pytest.fixture(scope="module")
def by_rank() -> Iterator[Running]:
    with running(tool_model(), policy="shorten(rank, 2x, least=64)") as found:
        yield found


def _sent(found: Any) -> int:
    usage = found.usage
    return int(usage.input_tokens + usage.cache_creation_input_tokens + usage.cache_read_input_tokens)


def test_usage_tells_original_and_sent_tokens(by_graph: Running) -> None:
    found = create(by_graph, user(text(DOCUMENT), text("where is the bell?")))
    original = found.usage.original_input_tokens
    assert original * 0.45 < _sent(found) < original * 0.6
    short = create(by_graph, user(text("where is the bell?")))
    assert short.usage.original_input_tokens == _sent(short)


def test_openai_usage_tells_it_too(by_graph: Running) -> None:
    asked: Any = {"model": "tiny", "messages": [{"role": "user", "content": DOCUMENT}], "max_tokens": 2}
    usage = by_graph.openai.chat.completions.create(**asked).usage
    assert usage is not None and usage.model_extra is not None
    assert usage.model_extra["original_prompt_tokens"] > 1.5 * usage.prompt_tokens


def test_a_prefix_is_found_as_without_shortening(by_graph: Running) -> None:
    document = f"The house is open at nine. {DOCUMENT}"  # that no other test sends
    first = create(by_graph, user(text(document, MARK), text("where is the bell?")))
    second = create(by_graph, user(text(document, MARK), text("who painted the harp?")))
    assert first.usage.cache_creation_input_tokens > 64
    assert second.usage.cache_read_input_tokens == first.usage.cache_creation_input_tokens
    later = create(
        by_graph,
        user(text(document, MARK), text("where is the bell?")),
        {"role": "assistant", "content": "In room 12."},
        user(text("and the harp?")),
    )
    assert later.usage.cache_read_input_tokens == first.usage.cache_creation_input_tokens


def test_a_question_cuts_behind_the_last_marker_alone(by_rank: Running) -> None:
    with pytest.raises(anthropic.BadRequestError, match="put the marker before the text"):
        create(by_rank, user(text(DOCUMENT, MARK), text("where is the bell?")))
    system = [{"type": "text", "text": "You are a guide. " * 12, "cache_control": MARK}]
    found = create(by_rank, user(text(DOCUMENT), text("where is the bell?")), system=system)
    assert _sent(found) < found.usage.original_input_tokens


def test_what_is_read_holds_what_was_asked(by_rank: Running) -> None:
    shortener = RequestShortener(Policy.parse("shorten(rank, 4x, least=64)").shorten, by_rank.service.tokenizer)  # type: ignore[arg-type]
    for thing in ("boat", "harp"):
        blocks = [Block("text", text=one, message=0) for one in (DOCUMENT, f"where is the {thing}?")]
        shorter, num_cut = shortener.shorten(ChatRequest("tiny", blocks, 4))
        assert num_cut > 0 and f"The {thing} is in room" in shorter.blocks[0].text
        assert shorter.blocks[1].text == blocks[1].text


def test_prompts_longer_than_the_context_are_cut_to_fit(by_graph: Running) -> None:
    most = by_graph.service.model.spec.max_positions
    paragraph = "The tide comes in at noon and goes out at dusk. "
    document = paragraph * (3 * most // (2 * len(paragraph)))
    found = create(by_graph, user(text(document), text("when?")), max_tokens=1)
    assert found.usage.original_input_tokens > most > _sent(found)


@pytest.mark.parametrize(
    "policy", ['shorten(graph, 8x, keep="all", least=0)', 'shorten(rank, 30tok, keep="all", least=0)']
)
def test_a_text_that_cannot_be_cut_that_far_is_sent_whole(policy: str) -> None:
    """For its size, or as a tool's reply to which nobody asks anything."""
    shortener = RequestShortener(Policy.parse(policy).shorten, tool_model().tokenizer)  # type: ignore[arg-type]
    texts = [DOCUMENT.replace("Nobody", "Do not"), "\n" * 400, "where?"]
    for last in (2, 3):
        blocks = [Block("text", text=one, message=0) for one in texts[:last]]
        assert shortener.shorten(ChatRequest("tiny", blocks, 4)) == (ChatRequest("tiny", blocks, 4), 0)
    raw = ChatRequest("tiny", [], 4, raw_text="\n" * 400)
    assert shortener.shorten(raw) == (raw, 0)


def test_completions_are_cut_as_well(by_graph: Running) -> None:
    found = typed(by_graph.openai.completions.create, model="tiny", prompt=DOCUMENT + "\n\nwhere?", max_tokens=2)
    assert found.usage.model_extra["original_prompt_tokens"] > found.usage.prompt_tokens


@pytest.mark.parametrize("by", ("words", "topics", "rank(judge)", "rank(attention)"))
def test_selectors_that_ask_the_model_are_not_served(by: str) -> None:
    told = rf"shorten\({by.partition('(')[0]}, …\) asks the model, which is busy with requests here; serve with graph"
    with pytest.raises(PolicyError, match=told), running(tool_model(), policy=f"shorten({by}, 2x) + int4"):
        pass
