"""A server with a memory: facts of named users are kept and recalled, behind what is cached, and nobody else's."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import pytest

from kvfold.memory.fact import Owner
from kvfold.memory.store import FactStore
from kvfold.models.loader import Model
from kvfold.serve.api.request import Block, ChatRequest
from kvfold.serve.memory import MAX_SECTION_CHARS, MAX_TURN_CHARS, RequestMemory
from kvfold.serve.ops.metrics import Metrics
from tests import tiny
from tests.serve.asking import TENANTS, get, until
from tests.serve.running import Running, running

SAID, ASKED = "I live in Berlin. My dog is called Rex.", "Where do I live?"


@pytest.fixture(scope="module")
def served() -> Model:
    return tiny.ready("llama")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "memory.db"


@pytest.fixture
def server(served: Model, file: Path) -> Iterator[Running]:
    with running(served, memory_file=file) as found:
        yield found


def say(server: Running, text: str, user: str | None = "anna", key: str = "any", **more: Any) -> Any:
    metadata: Any = {} if user is None else {"metadata": {"user_id": user}}
    messages: Any = [{"role": "user", "content": text}]
    asked = {"model": "tiny", "max_tokens": 2, "messages": messages, **metadata, **more}
    return server.anthropic_as(key).messages.create(**asked)


def facts(file: Path, tenant: str, user: str) -> list[str]:
    with FactStore(file) as store:
        version = store.version(Owner(tenant, user))
        return [] if version is None else [fact.text for fact in store.changed(Owner(tenant, user), version.key, 0)]


def test_what_a_user_said_is_recalled_for_him_alone(server: Running, file: Path) -> None:
    plain = say(server, ASKED).usage.input_tokens
    say(server, SAID)
    assert say(server, ASKED).usage.input_tokens > plain + 20
    for user in ("ben", "anna ", " ", None):
        assert say(server, ASKED, user).usage.input_tokens == plain
    assert (
        say(server, "Which opera is the longest?").usage.input_tokens
        == say(server, "Which opera is the longest?", None).usage.input_tokens
    )
    assert facts(file, "default", "anna") == ["I live in Berlin.", "My dog is called Rex."]
    metrics = get(server, "/metrics")[1]
    assert 'kvfold_memory_requests_total{result="recalled"} 1' in metrics
    assert "kvfold_memory_facts_written_total 2" in metrics


def test_the_apis_of_openai_name_their_user(server: Running, file: Path) -> None:
    client, messages = server.openai, [{"role": "user", "content": SAID}]
    client.chat.completions.create(model="tiny", messages=messages, max_tokens=2, user="anna")  # type: ignore[arg-type]
    stream = client.responses.create(
        model="tiny", input="I work at Bosch.", max_output_tokens=16, user="ben", stream=True
    )
    assert list(stream)
    until(lambda: facts(file, "default", "ben") == ["I work at Bosch."])
    assert len(facts(file, "default", "anna")) == 2
    asked = {"model": "tiny", "input": ASKED, "max_output_tokens": 16}
    counts = [client.responses.create(**asked, **who).usage for who in ({}, {"user": "anna"})]  # type: ignore[call-overload]
    assert counts[1].input_tokens > counts[0].input_tokens + 20
    before = client.completions.create(model="tiny", prompt=ASKED, max_tokens=2).usage
    after = client.completions.create(model="tiny", prompt=ASKED, max_tokens=2, user="anna").usage
    assert before and after and before.prompt_tokens == after.prompt_tokens


@pytest.mark.parametrize("policy", ["full", "keydiff + 2x"])
def test_cached_prefixes_are_those_of_a_server_without_memory(served: Model, file: Path, policy: str) -> None:
    """With markers of both kinds, and over two turns; the section itself is never cached."""
    text = "The cat sat on the mat and ate a hat. " * 4
    found = []
    for memory_file in (None, file):
        usages = []
        with running(served, policy, memory_file=memory_file) as server:
            say(server, SAID)
            marked: Any = [{"type": "text", "text": f"{text}{ASKED}", "cache_control": {"type": "ephemeral"}}]
            turns: Any = [{"role": "user", "content": marked}]
            for _ in range(3):
                usages.append(say(server, "", messages=turns, system=text).usage)
                server.settle()
                turns = [*turns, {"role": "assistant", "content": "Berlin."}, {"role": "user", "content": marked}]
        found.append([(one.cache_creation_input_tokens, one.cache_read_input_tokens) for one in usages])
        inputs = [one.input_tokens for one in usages]
    assert found[0] == found[1] and found[0][1][1] > 200
    assert min(inputs) > 50, "facts were there"


def test_implicit_breakpoints_end_before_the_section(server: Running) -> None:
    say(server, SAID)
    text = "The cat sat on the mat and ate a hat. " * 4
    messages: Any = [{"role": "user", "content": f"{text}{ASKED}"}]
    server.openai.chat.completions.create(model="tiny", messages=messages, max_tokens=2, user="anna")
    server.settle()
    messages += [{"role": "assistant", "content": "Berlin."}, {"role": "user", "content": "Thanks a lot."}]
    usage = server.openai.chat.completions.create(model="tiny", messages=messages, max_tokens=2, user="anna").usage
    assert usage is not None and usage.prompt_tokens_details is not None
    assert (usage.prompt_tokens_details.cached_tokens or 0) > 100


def test_tenants_with_users_of_the_same_name_share_nothing(served: Model, file: Path) -> None:
    with running(served, memory_file=file, tenants=TENANTS) as server:
        plain = say(server, ASKED, key="key-a").usage.input_tokens
        say(server, SAID, key="key-a")
        assert say(server, ASKED, key="key-b").usage.input_tokens == plain
        assert say(server, ASKED, key="key-a").usage.input_tokens > plain
    assert facts(file, "blue", "anna") == [] and len(facts(file, "red", "anna")) == 2


def test_it_is_off_unless_asked_for(served: Model, tmp_path: Path) -> None:
    with running(served) as server:
        say(server, SAID)
        assert say(server, ASKED).usage.input_tokens == say(server, ASKED, None).usage.input_tokens
        assert "kvfold_memory" not in get(server, "/metrics")[1]
    assert list(tmp_path.iterdir()) == []


def test_a_name_that_cannot_be_kept_is_refused(server: Running) -> None:
    for name, told in (("a" * 513, "it has 513 characters"), ("a\0b", "it has a NUL character in it")):
        with pytest.raises(anthropic.BadRequestError, match=f"metadata.user_id: {told}; facts are kept by a name"):
            say(server, ASKED, name)


def test_requests_that_are_refused_are_not_counted(server: Running) -> None:
    with pytest.raises(anthropic.BadRequestError, match="maximum"):
        say(server, "x" * (server.service.model.spec.max_positions + 1))
    assert "kvfold_memory_requests_total{" not in get(server, "/metrics")[1]
    say(server, ASKED)
    assert 'kvfold_memory_requests_total{result="none"} 1' in get(server, "/metrics")[1]


def test_a_memory_that_fails_costs_no_reply(server: Running, file: Path) -> None:
    say(server, SAID)
    server.service._memory._writer.submit(lambda: None).result()  # type: ignore[union-attr]
    with sqlite3.connect(file) as connection:
        connection.execute("DROP TABLE fact")
    connection.close()
    assert say(server, f"{SAID} {ASKED}").content and say(server, SAID).content
    until(lambda: "kvfold_memory_errors_total 4" in get(server, "/metrics")[1])  # each recalls and writes


def test_facts_that_do_not_fit_are_left_out(server: Running) -> None:
    say(server, SAID)
    most = server.service.model.spec.max_positions
    empty = say(server, "a", None).usage.input_tokens
    text = f"{'x' * (most - empty - len(ASKED) - 10)} {ASKED}"
    assert say(server, text).usage.input_tokens == say(server, text, None).usage.input_tokens


def test_a_reply_that_is_cancelled_leaves_no_facts(server: Running, file: Path) -> None:
    asked: Any = {"model": "tiny", "max_tokens": 700, "messages": [{"role": "user", "content": SAID}]}
    with server.anthropic.messages.stream(**asked, metadata={"user_id": "anna"}) as stream:
        next(iter(stream))
    until(lambda: server.service.scheduler.num_running == 0)
    say(server, "I work at Bosch.")
    until(lambda: facts(file, "default", "anna") != [])
    assert facts(file, "default", "anna") == ["I work at Bosch."]


# Without a server


def request(text: str, user: str = "anna", **more: Any) -> ChatRequest:
    return ChatRequest("tiny", [Block("text", "user", text, 0)], 1, user=user, **more)


@pytest.fixture
def memory(file: Path) -> Iterator[RequestMemory]:
    found = RequestMemory(file, Metrics(), "hashed")
    yield found
    found.close()


def test_the_section_stands_behind_the_last_text_of_the_last_message(memory: RequestMemory) -> None:
    memory.write_later(request(SAID), "t", 1e9)
    history = [Block("text", "user", "Hi", 0), Block("text", "assistant", "Hello", 1)]
    asked = [*history, Block("text", "user", "Please tell:", 2), Block("text", "user", ASKED, 2, ttl_s=300.0)]
    found = memory.with_facts(ChatRequest("tiny", asked, 1, user="anna"), "t", 1e9)
    assert list(found.blocks[:-1]) == asked
    last = found.blocks[-1]
    assert (last.kind, last.role, last.message, last.ttl_s, last.section) == ("memory", "user", 2, None, "memory")
    assert "I live in Berlin." in last.text
    call, result = Block("tool_use", "assistant", message=3), Block("tool_result", "tool", "5", 4)
    for blocks in ([*asked, call, result], [*asked, Block("text", "system", "Be brief.", 3)]):
        behind = ChatRequest("tiny", blocks, 1, user="anna")
        assert memory.with_facts(behind, "t", 1e9) is behind


def test_documents_are_not_what_a_user_says_of_himself(memory: RequestMemory, file: Path) -> None:
    memory.write_later(request("I live in Berlin. " * (MAX_TURN_CHARS // 18 + 1)), "t", 1e9)
    memory.write_later(request(" ".join(f"Box {number} is red." for number in range(40))), "t", 1e9)
    memory.write_later(request("Who am I?"), "t", 1e9)
    memory.write_later(request(SAID, raw_text=SAID), "t", 1e9)
    memory._writer.submit(lambda: None).result()
    assert facts(file, "t", "anna") == []


def test_the_section_has_a_limit(memory: RequestMemory) -> None:
    for number in range(12):
        memory.write_later(request(f"My house number {number} is {'very ' * 180}old."), "t", 1e9)
    found = memory.with_facts(request("How old is my house?"), "t", 1e9)
    assert found.blocks[-1].kind == "memory" and 1000 < len(found.blocks[-1].text) <= MAX_SECTION_CHARS
