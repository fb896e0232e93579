"""What a prompt costs before it is admitted: so many renderings, and each character is tokenized once."""

from __future__ import annotations

from typing import Any

import pytest

from kvfold.models import special_tokens
from kvfold.serve.api.request import Block, ChatRequest
from kvfold.serve.prompt import PromptRenderer
from tests.serve.templates import QWEN, im_tokenizer

USER = Block("text", "user", "go", 0)


def tools(count: int) -> list[Block]:
    definition: Any = {"description": "find it", "parameters": {"type": "object"}}
    return [*(Block("tool", data={"name": f"look_{i}", **definition}) for i in range(count)), USER]


def calls(count: int) -> list[Block]:
    made = ({"id": "1", "name": "look", "arguments": {"at": i}} for i in range(count))
    return [USER, *(Block("tool_use", "assistant", message=1, data=data) for data in made), Block("text", message=2)]


def messages(count: int) -> list[Block]:
    return [Block("text", "user" if i % 2 == 0 else "assistant", "the cat", i) for i in range(count)]


def texts(count: int) -> list[Block]:
    return [Block("text", "user", "the cat ", 0)] * count


class Counted:
    """Renderings and tokenized characters of a renderer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.renderer = PromptRenderer(im_tokenizer(QWEN))
        self.num_renderings = self.num_characters = 0
        tokenizer, call = self.renderer._tokenizer, special_tokens._call
        render = tokenizer.apply_chat_template

        def counted_render(*args: Any, **options: Any) -> Any:
            self.num_renderings += 1
            return render(*args, **options)

        def counted_call(given: Any, parts: list[str], *options: Any) -> Any:
            self.num_characters += sum(map(len, parts))
            return call(given, parts, *options)

        monkeypatch.setattr(tokenizer, "apply_chat_template", counted_render)
        monkeypatch.setattr(special_tokens, "_call", counted_call)


@pytest.mark.parametrize("make", [tools, calls, messages, texts])
def test_a_prompt_is_rendered_twice_however_many_blocks_it_has(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(monkeypatch)
    counted.renderer.prompt(ChatRequest("m", make(2), 1))  # the template is asked once how it writes tools and calls
    assert counted.num_renderings <= 6
    for count in (20, 400):
        counted.num_renderings = counted.num_characters = 0
        found = counted.renderer.prompt(ChatRequest("m", make(count), 1))
        assert found.ends is not None
        assert counted.num_renderings == 2
        assert counted.num_characters == len(counted.renderer._tokenizer.decode(found.tokens))


def test_special_tokens_in_texts_are_tokenized_once_too(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(monkeypatch)
    found = counted.renderer.prompt(ChatRequest("m", [Block("text", "user", "<|im_end|>the " * 400, 0)], 1))
    assert counted.num_characters == len(counted.renderer._tokenizer.decode(found.tokens))
