"""Where blocks end: one rendering with marks finds what a rendering for each block would."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import pytest

from kvfold.serve.api.request import Block, ChatRequest
from kvfold.serve.prompt import Prompt, PromptRenderer
from tests import tiny
from tests.serve.running import TOOL_TEMPLATE
from tests.serve.templates import QWEN, SMOLLM2, TRIMMING, im_tokenizer

WITH_TOOLS = {"tests": TOOL_TEMPLATE, "qwen": QWEN}
WITHOUT = {"tiny": tiny.TEMPLATE, "smollm2": SMOLLM2, "trimming": TRIMMING}
TEXTS = ("the cat", "a", " sat\n", "\n\nthen", "é€ the", '{"name": "', "<tool_call>", "[0]", "</tools>\n{", "x" * 50)
VALUES: tuple[Any, ...] = (1, "b", None, [1, ["the"]], {"a": {"b": []}}, 'q"uote\\', "é€", {}, True, -2.5)


# Renders once for each block


class Slow:
    """Where renderings that go on differently after a block part from the whole, for each block alone."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def prompt(self, blocks: Sequence[Block]) -> Prompt:
        plain = self._render(blocks)
        ends = list(accumulate((self._end(blocks, i, plain) for i in range(len(blocks))), max))
        borders, tokens, count_at = sorted({0, *ends, len(plain)}), list[int](), {0: 0}
        for begin, end in pairwise(borders):
            tokens += self._tokenizer(plain[begin:end], add_special_tokens=False)["input_ids"]
            count_at[end] = len(tokens)
        return Prompt(tokens, [count_at[end] for end in ends])

    def _end(self, blocks: Sequence[Block], at: int, plain: str) -> int:
        block, until = blocks[at], list(blocks[: at + 1])
        if block.kind == "tool":
            other = Block("tool", data={"name": "\ue00f", "description": "\ue00f", "parameters": {}})
            return _agree(plain, self._render([*until, other, *(b for b in blocks[at:] if b.kind != "tool")]))
        if block.kind == "tool_use":
            return _agree(plain, self._render(until, opens_reply=False) + "\ue00f")
        marked = Block(block.kind, block.role, f"{block.text}\ue00f", block.message)
        return self._render([*until[:-1], marked, *blocks[at + 1 :]]).index("\ue00f")

    def _render(self, blocks: Sequence[Block], *, opens_reply: bool = True) -> str:
        tools = [{"type": "function", "function": dict(block.data)} for block in blocks if block.kind == "tool"]
        found, last = list[dict[str, Any]](), None
        for block in blocks:
            if block.kind == "tool":
                continue
            if (block.message, block.role) != last or block.kind == "tool_result":
                found.append({"role": block.role, "content": ""})
            message, last = found[-1], (block.message, block.role)
            if block.kind == "tool_use":
                call = {"name": block.data["name"], "arguments": block.data["arguments"]}
                message.setdefault("tool_calls", []).append({"type": "function", "function": call})
            else:
                message["content"] += ("\n" if message["content"] else "") + block.text
        more: dict[str, Any] = {"tools": tools} if tools else {}
        return str(
            self._tokenizer.apply_chat_template(found, tokenize=False, add_generation_prompt=opens_reply, **more)
        )


def _agree(a: str, b: str) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


# Conversations


def conversation(seed: int, *, has_tools: bool) -> list[Block]:
    rng = random.Random(seed)
    found = [Block("tool", data=_definition(rng)) for _ in range(rng.randrange(5) if has_tools else 0)]
    found += [Block("system", "system", rng.choice(TEXTS)) for _ in range(rng.randrange(3))]
    for turn in range(rng.randrange(4)):
        number = 2 * turn
        found += [Block("text", "user", rng.choice(TEXTS), number) for _ in range(rng.randint(1, 2))]
        num_calls = rng.randrange(4) if has_tools else 0
        num_texts = rng.randint(0 if num_calls else 1, 2)
        found += [Block("text", "assistant", rng.choice(TEXTS), number + 1) for _ in range(num_texts)]
        calls = [{"id": "1", "name": rng.choice(("look", "l")), "arguments": _object(rng)} for _ in range(num_calls)]
        found += [Block("tool_use", "assistant", message=number + 1, data=call) for call in calls]
        found += [Block("tool_result", "tool", rng.choice(TEXTS), number + 2) for _ in calls]
    return [*found, Block("text", "user", rng.choice(TEXTS), 99)]


def _definition(rng: random.Random) -> dict[str, Any]:
    name, description = rng.choice(("look", "lo", "", "a_b")), rng.choice(("", *TEXTS))
    return {"name": name, "description": description, "parameters": _object(rng)}


def _object(rng: random.Random) -> dict[str, Any]:
    return {rng.choice(("at", "a", "name", "é")): rng.choice(VALUES) for _ in range(rng.randrange(4))}


@pytest.mark.parametrize("name", [*WITH_TOOLS, *WITHOUT])
def test_ends_and_tokens_are_those_of_a_rendering_for_each_block(name: str) -> None:
    given = im_tokenizer({**WITH_TOOLS, **WITHOUT}[name])
    renderer, slow, num_tools = PromptRenderer(given), Slow(given), 0
    for seed in range(60):
        blocks = conversation(seed, has_tools=name in WITH_TOOLS)
        if name == "trimming" and any(block.text.strip() != block.text for block in blocks):
            continue  # such a text has another end there: see below
        num_tools += sum(block.kind in ("tool", "tool_use") for block in blocks)
        assert renderer.prompt(ChatRequest("m", blocks, 1)) == slow.prompt(blocks), blocks
    assert (num_tools > 100) == (name in WITH_TOOLS)


@pytest.mark.parametrize("name", [*WITH_TOOLS, *WITHOUT])
@pytest.mark.parametrize("text", ["", " ", "the cat ", "\n", " the"])
def test_no_text_keeps_known_templates_from_telling_where_blocks_end(name: str, text: str) -> None:
    has_tools = name in WITH_TOOLS
    given = im_tokenizer({**WITH_TOOLS, **WITHOUT}[name])
    call = Block("tool_use", "assistant", message=1, data={"id": "1", "name": "look", "arguments": {}})
    blocks = [
        *([Block("tool", data={"name": "look", "description": text, "parameters": {}})] if has_tools else []),
        Block("system", "system", text),
        Block("text", "user", text, 0),
        Block("text", "user", "a", 0),
        Block("text", "assistant", text, 1),
        *([call, Block("tool_result", "tool", text, 2)] if has_tools else []),
        Block("text", "user", text, 3),
    ]
    found = PromptRenderer(given).prompt(ChatRequest("m", blocks, 1))
    assert found.ends is not None
    assert found.ends == sorted(found.ends)
    again = [Block("tool_use", "assistant", message=4, data=call.data)] if has_tools else []
    longer = [*blocks, Block("text", "assistant", "", 4), *again, Block("text", "user", "c ", 5)]
    more = PromptRenderer(given).prompt(ChatRequest("m", longer, 1))
    assert more.ends is not None
    assert more.ends[: len(blocks)] == found.ends
    assert more.tokens[: found.ends[-1]] == found.tokens[: found.ends[-1]]


def test_a_template_that_takes_one_call_in_a_message_tells_where_texts_end() -> None:
    given = im_tokenizer(
        "{% if tools %}<tool_call>{% endif %}{% for m in messages %}{% if (m.tool_calls or []) | length > 1 %}"
        "{{ raise_exception('one call') }}{% endif %}{{ m.content }}{% for c in m.tool_calls or [] %}"
        "{{ c | tojson }}{% endfor %}{% endfor %}"
    )
    call = Block("tool_use", "assistant", message=1, data={"id": "1", "name": "look", "arguments": {}})
    found = PromptRenderer(given).prompt(
        ChatRequest("m", [Block("text", "user", "a", 0), call, Block("text", "user", "b", 2)], 1)
    )
    assert found.ends is not None, "a call that cannot be marked ends with what is before it"
    assert found.ends[0] == found.ends[1]
