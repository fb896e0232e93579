"""Replies that call tools, in every format: real replies and writers over a scheduler's events as they would come."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvfold.engine.scheduling.jobs import Ended, Event, PrefillDone, TextDelta
from kvfold.serve.api.anthropic import MessagesBody
from kvfold.serve.api.anthropic_reply import MessageWriter
from kvfold.serve.api.openai import OpenAIBody
from kvfold.serve.api.openai_chat import ChatWriter
from kvfold.serve.api.openai_responses import ResponseWriter
from kvfold.serve.api.request import Block, ChatRequest
from kvfold.serve.cache.breakpoints import CachePlan
from kvfold.serve.cache.source import PlainSource
from kvfold.serve.event_queue import EventQueue, Mailbox
from kvfold.serve.local_service import LocalService
from kvfold.serve.reply import Reply, RequestContext
from kvfold.serve.settings import Settings
from tests import tiny

TEXT = 'I look.\n<tool_call>{"name": "look", "arguments": {"at": "é"}}</tool_call>'
ASK = ChatRequest("tiny", [Block("tool", data={"name": "look", "description": "", "parameters": {}})], 50)


@pytest.fixture(scope="module")
def service() -> Iterator[LocalService]:
    found = LocalService(tiny.ready("llama"), "full", Settings(("tiny",)), None)
    yield found
    found.close()


async def _collected(service: LocalService, make: Callable[..., Any], body: Any, is_streamed: bool) -> Any:
    events = EventQueue(Mailbox(asyncio.get_running_loop()), 60.0, lambda: None)
    source = PlainSource(service.new_sequence, 7)
    reply = Reply(
        ASK,
        RequestContext("t", 0.0),
        events,
        source,
        CachePlan(),
        metrics=service.metrics,
        cancel=lambda: None,
        timeout_s=60.0,
        is_cut=False,
    )
    async with asyncio.TaskGroup() as group:
        group.create_task(_feed(events))
        await reply.begin()
        writer = make(service, body, reply)
        if not is_streamed:
            return await writer.whole()
        return [_read(event) if isinstance(event, str) else event async for event in writer.events()]


async def _feed(events: EventQueue) -> None:
    """One after the other, each when the last one has been read."""
    written: list[Event] = [TextDelta(TEXT[i : i + 5]) for i in range(0, len(TEXT), 5)]
    for event in (PrefillDone(0), *written, Ended("eos", 9)):
        events.put(event)
        while events.is_unread:
            await asyncio.sleep(0)


def _read(lines: str) -> Any:
    """The event of its lines."""
    return json.loads(lines.split("data: ", 1)[1])


def test_a_message(service: LocalService) -> None:
    found = asyncio.run(_collected(service, MessageWriter, MessagesBody(ASK), False))
    text, call = found["content"]
    assert text == {"type": "text", "text": "I look."}
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "look", {"at": "é"})
    assert found["stop_reason"] == "tool_use"
    assert (found["usage"]["input_tokens"], found["usage"]["output_tokens"]) == (7, 9)


def test_a_stream_of_a_message(service: LocalService) -> None:
    found = asyncio.run(_collected(service, MessageWriter, MessagesBody(ASK, True), True))
    indices = [(event["type"], event["index"]) for event in found if "index" in event]
    starts = [index for kind, index in indices if kind == "content_block_start"]
    stops = [index for kind, index in indices if kind == "content_block_stop"]
    assert starts == stops == [0, 1]
    (partial,) = (event["delta"]["partial_json"] for event in found if "partial_json" in event.get("delta", {}))
    assert partial == '{"at": "é"}'
    assert found[-2]["delta"]["stop_reason"] == "tool_use"


def test_a_chat_completion(service: LocalService) -> None:
    found = asyncio.run(_collected(service, ChatWriter, OpenAIBody(ASK), False))["choices"][0]
    assert (found["finish_reason"], found["message"]["content"]) == ("tool_calls", "I look.")
    assert found["message"]["tool_calls"][0]["function"] == {"name": "look", "arguments": '{"at": "é"}'}
    chunks = asyncio.run(_collected(service, ChatWriter, OpenAIBody(ASK, True), True))
    calls = [chunk["choices"][0]["delta"].get("tool_calls") for chunk in chunks]
    assert [call[0]["index"] for call in calls if call] == [0]
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_a_response(service: LocalService) -> None:
    found = asyncio.run(_collected(service, ResponseWriter, OpenAIBody(ASK), False))
    assert [item["type"] for item in found["output"]] == ["message", "function_call"]
    assert (found["output"][1]["name"], found["output"][1]["arguments"]) == ("look", '{"at": "é"}')
    events = asyncio.run(_collected(service, ResponseWriter, OpenAIBody(ASK, True), True))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [item["type"] for item in events[-1]["response"]["output"]] == ["message", "function_call"]
    assert events[-1]["type"] == "response.completed"
