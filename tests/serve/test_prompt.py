"""Prompts: the tokens are the template's own, and longer conversations begin with the tokens of shorter ones."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoTokenizer

from kvfold.models.pull.pull import model_folder
from kvfold.serve.api.errors import ApiError
from kvfold.serve.api.request import Block, ChatRequest
from kvfold.serve.prompt import PromptRenderer
from tests import tiny
from tests.serve.running import TOOL_TEMPLATE

SYSTEM = Block("system", "system", "be kind")
TOOL = Block("tool", data={"name": "look", "description": "find it", "parameters": {"type": "object"}})
USER, AGAIN = Block("text", "user", "text 0", 0), Block("text", "user", "text 2", 2)
ANSWER = Block("text", "assistant", "text 1", 1)
CALL = Block("tool_use", "assistant", message=1, data={"id": "1", "name": "look", "arguments": {"at": "b", "a": 1}})
RESULT = Block("tool_result", "tool", "found", 2)


def tokenizer(template: str = TOOL_TEMPLATE) -> Any:
    found = tiny.tokenizer()
    found.chat_template = template
    return found


def ask(*blocks: Block) -> ChatRequest:
    return ChatRequest("m", blocks, 1)


def texts(given: Any, *blocks: Block) -> list[str]:
    """What stands up to each block's end."""
    prompt = PromptRenderer(given).prompt(ask(*blocks))
    assert prompt.ends is not None
    return [given.decode(prompt.tokens[:end]) for end in prompt.ends]


def test_blocks_end_where_their_text_does() -> None:
    assert texts(tokenizer(), SYSTEM, USER, ANSWER, AGAIN) == [
        "<system>be kind",
        "<system>be kind<end>\n<user>text 0",
        "<system>be kind<end>\n<user>text 0<end>\n<assistant>text 1",
        "<system>be kind<end>\n<user>text 0<end>\n<assistant>text 1<end>\n<user>text 2",
    ]


def test_tools_calls_and_results_end_behind_their_json() -> None:
    found = texts(tokenizer(), TOOL, USER, ANSWER, CALL, RESULT, Block("text", "user", "so?", 3))
    assert found[0].endswith('"parameters": {"type": "object"}}}')
    assert '"arguments": {"at": "b", "a": 1}}</tool_call>' in found[3].removeprefix(found[2])
    assert found[4].endswith("<tool>found")
    assert found[5].endswith("<user>so?")


def test_texts_of_one_message_are_joined_by_lines() -> None:
    found = texts(tokenizer(), USER, Block("text", "user", "more", 0))
    assert found == ["<user>text 0", "<user>text 0\nmore"]


def test_a_longer_conversation_begins_with_the_tokens_of_a_shorter_one() -> None:
    renderer, blocks = PromptRenderer(tokenizer()), [TOOL, SYSTEM, USER, ANSWER, CALL, RESULT]
    whole = renderer.prompt(ask(*blocks))
    assert whole.ends is not None
    for count in (3, 6):
        part = renderer.prompt(ask(*blocks[:count]))
        assert part.ends == whole.ends[:count]
        assert part.tokens[: part.ends[-1]] == whole.tokens[: part.ends[-1]]


def test_a_template_that_rewrites_texts_is_used_as_it_is_and_keeps_no_blocks_apart() -> None:
    given = tokenizer("{% for m in messages %}[{{ m['content'] | reverse }}]{% endfor %}")
    prompt = PromptRenderer(given).prompt(ask(Block("text", "user", "the cat", 0)))
    assert prompt.ends is None
    assert given.decode(prompt.tokens) == "[tac eht]"
    trimming = tokenizer("{% for m in messages %}[{{ m['content'] | trim | upper }}]{% endfor %}")
    assert texts(trimming, Block("text", "user", "the cat ", 0)) == ["[THE CAT"]


def test_what_a_template_does_not_take_is_refused() -> None:
    with pytest.raises(ApiError, match="no chat template; use /v1/completions"):
        PromptRenderer(tokenizer("")).prompt(ask(USER))
    with pytest.raises(ApiError, match="chat template has no tools"):
        PromptRenderer(tokenizer(tiny.TEMPLATE)).prompt(ask(TOOL, USER))
    with pytest.raises(ApiError, match="rejects them: only one"):
        PromptRenderer(tokenizer("{{ raise_exception('only one') }}")).prompt(ask(USER))


@pytest.mark.model
@pytest.mark.parametrize("name", ["smollm2-135m", "qwen2.5-coder-1.5b"])
def test_real_templates_give_the_tokens_they_give_elsewhere(name: str) -> None:
    folder = model_folder(name)
    if not folder.exists():
        pytest.skip(f"{name} is not pulled")
    given = AutoTokenizer.from_pretrained(folder)
    messages = [{"role": block.role, "content": block.text} for block in (SYSTEM, USER, ANSWER, AGAIN)]
    expected = given.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    found = PromptRenderer(given).prompt(ask(SYSTEM, USER, ANSWER, AGAIN))
    assert found.tokens == expected
    assert found.ends is not None
    assert len(set(found.ends)) == 4


@pytest.mark.model
def test_a_real_template_that_writes_tools_behind_the_system_text() -> None:
    folder = model_folder("qwen2.5-coder-1.5b")
    if not folder.exists():
        pytest.skip("qwen2.5-coder-1.5b is not pulled")
    given = AutoTokenizer.from_pretrained(folder)
    found = texts(given, TOOL, SYSTEM, USER, CALL, RESULT)
    assert found[0] == found[1], "a marker on a tool covers the system text, too"
    assert '"name": "look"' in found[0]
    assert "be kind" in found[0]
    assert found[3].endswith("</tool_call><|im_end|>\n")
    assert found[4].endswith("<tool_response>\nfound")
