"""A description of every field of every route that takes a body: from it valid bodies are drawn.

`Object` says which fields there are; the rest says what each may hold. What ties fields together (calls of tools have
results, `stream_options` needs `stream`) is drawn by functions.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, TypeAlias

Make: TypeAlias = Callable[[Random], Any]
MAX_OUTPUT = 16
_WORDS = ("the cat", "sat on", "a mat", "é€", "\n", " ", "<user>", "</tool_call>", "{}", "\U0001f600", "0", "\\")


def text(rng: Random) -> str:
    """It begins with characters that the tiny tokenizer knows, so that it has a token."""
    return rng.choice(_WORDS[:3]) + "".join(rng.choices(_WORDS, k=rng.randint(0, 3)))


def name(rng: Random) -> str:
    return "".join(rng.choices("abcXYZ019_-", k=rng.randint(1, 12)))


def flag(rng: Random) -> bool:
    return rng.random() < 0.5


def one_of(*values: Any) -> Make:
    """One of these values; functions among them are called."""

    def make(rng: Random) -> Any:
        found = rng.choice(values)
        return found(rng) if callable(found) else found

    return make


def whole(low: int, high: int) -> Make:
    return lambda rng: rng.choice((low, high, rng.randint(low, high)))


def number(low: float, high: float) -> Make:
    return lambda rng: rng.choice((low, high, rng.uniform(low, high), int(high)))


def some(item: Make, low: int, high: int) -> Make:
    return lambda rng: [item(rng) for _ in range(rng.randint(low, high))]


@dataclass(frozen=True)
class Object:
    """Fields that are always there, and fields that may be; each may be null instead of absent."""

    required: Mapping[str, Make]
    optional: Mapping[str, Make] = field(default_factory=dict)
    density: float = 0.2

    def __call__(self, rng: Random) -> dict[str, Any]:
        chosen = [name for name in self.optional if rng.random() < self.density]
        found = {name: make(rng) for name, make in self.required.items()}
        found |= {name: None if rng.random() < 0.1 else self.optional[name](rng) for name in chosen}
        pairs = list(found.items())
        rng.shuffle(pairs)
        return dict(pairs)

    @property
    def names(self) -> set[str]:
        return {*self.required, *self.optional}


def schema(rng: Random, depth: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = {"type": rng.choice(("object", "string", "number")), "description": text(rng)}
    if rng.random() < 0.5 and depth < 2:
        found["properties"] = {name(rng): schema(rng, depth + 1) for _ in range(rng.randint(0, 2))}
    return found | rng.choice(({}, {"maximum": 1e300}, {"enum": [1, "a", None]}, {"minimum": -(10**30)}))


def unlike(tool: Make) -> Make:
    """Tools of different names."""

    def make(rng: Random) -> Any:
        found = {json.dumps(item.get("function", item)["name"]): item for item in some(tool, 0, 3)(rng)}
        return list(found.values())

    return make


# Anthropic

_marker = Object({"type": one_of("ephemeral")}, {"ttl": one_of("5m")})
_MARKED: dict[str, Make] = {"cache_control": _marker}
_text_block = Object({"type": one_of("text"), "text": text}, {"citations": one_of([])})
_marked_text = Object({"type": one_of("text"), "text": text}, _MARKED)


def messages(rng: Random) -> list[Any]:
    """Turns of user and assistant, in which calls of tools have results, and one marker at most."""
    found: list[Any] = [{"role": "user", "content": one_of(text, some(_text_block, 1, 3))(rng)}]
    for turn in range(rng.randint(0, 3)):
        ids = [f"toolu_{turn}_{i}" for i in range(rng.randint(0, 2))]
        calls = [_use(rng, call_id) for call_id in ids]
        spoken = some(_text_block, 0 if calls else 1, 2)(rng)
        found.append({"role": "assistant", "content": [*spoken, *calls]})
        results = [_result(rng, call_id) for call_id in ids]
        found.append({"role": "user", "content": [*results, *some(_text_block, 0 if results else 1, 2)(rng)]})
    if rng.random() < 0.2:
        found.append({"role": "system", "content": text(rng)})
    elif rng.random() < 0.3:
        found[-1]["content"] = [*_as_blocks(found[-1]["content"]), _marked_text(rng)]
    return found


def _as_blocks(content: Any) -> list[Any]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _use(rng: Random, call_id: str) -> Any:
    more: dict[str, Make] = {"caller": Object({"type": one_of("direct")})}
    made = Object({"name": name, "input": one_of({}, {"at": 1.5}, schema)}, more)(rng)
    return {"type": "tool_use", "id": call_id, **made}


def _result(rng: Random, call_id: str) -> Any:
    made = Object({"content": one_of(text, some(_text_block, 1, 2))}, {"is_error": flag})(rng)
    return {"type": "tool_result", "tool_use_id": call_id, **made}


_tool = Object(
    {"name": name, "input_schema": schema},
    {
        "type": one_of("custom"),
        "description": text,
        "strict": one_of(False),
        "defer_loading": one_of(False),
        "eager_input_streaming": one_of(False),
        "allowed_callers": one_of(["direct"]),
        "input_examples": one_of([]),
    },
)
_PROMPT: dict[str, Make] = {
    "system": one_of("", text, some(_marked_text, 0, 2)),
    "tools": unlike(_tool),
    "tool_choice": Object({"type": one_of("auto", "none")}, {"disable_parallel_tool_use": one_of(False)}),
    "cache_control": _marker,
    "thinking": Object({"type": one_of("disabled")}),
    "output_config": Object({}, {"effort": one_of("high")}),
    "speed": one_of("standard"),
    "mcp_servers": one_of([]),
    "context_management": Object({}, {"edits": one_of([])}),
}
_MESSAGE = Object(
    {"model": one_of("tiny", "tiny-too"), "messages": messages, "max_tokens": whole(1, MAX_OUTPUT)},
    {
        **_PROMPT,
        "stream": flag,
        "kvfold": Object({}, {"policy": one_of("full")}),
        "temperature": number(0, 2),
        "top_p": number(1e-6, 1),
        "top_k": whole(0, 1 << 20),
        "stop_sequences": some(text, 0, 4),
        "metadata": Object({}, {"user_id": text}),
        "service_tier": one_of("auto", "standard_only"),
        "diagnostics": Object({}, {"previous_message_id": text}),
    },
)
_COUNT = Object({"model": one_of("tiny"), "messages": messages}, _PROMPT)

# OpenAI

_BREAK: dict[str, Make] = {"prompt_cache_breakpoint": Object({"mode": one_of("explicit")})}


def _part(kind: str) -> Make:
    return Object({"type": one_of(kind), "text": text}, {**_BREAK, "annotations": one_of([]), "logprobs": one_of([])})


def _content(kind: str) -> Make:
    return one_of("", text, some(_part(kind), 1, 3))


def chat(rng: Random) -> list[Any]:
    named: dict[str, Make] = {"name": name}
    found: list[Any] = [
        Object({"role": one_of("system", "developer", "user"), "content": _content("text")}, named)(rng)
    ]
    for turn in range(rng.randint(0, 3)):
        ids = [f"call_{turn}_{i}" for i in range(rng.randint(0, 2))]
        content = one_of(None, text)(rng) if ids else _content("text")(rng)
        calls = {"tool_calls": [_chat_call(rng, call_id) for call_id in ids]} if ids else {}
        found.append({"role": "assistant", "content": content, **calls})
        found += [{"role": "tool", "tool_call_id": call_id, "content": _content("text")(rng)} for call_id in ids]
        found.append(Object({"role": one_of("user"), "content": _content("text")}, named)(rng))
    return found


def _chat_call(rng: Random, call_id: str) -> Any:
    function = {"name": name(rng), "arguments": json.dumps(one_of({}, schema)(rng))}
    return {"id": call_id, "type": "function", "function": function}


_POLICY = Object({}, {"policy": one_of("full")})
_metadata = one_of({}, lambda rng: {name(rng): text(rng) for _ in range(rng.randint(0, 16))})
_SHARED: dict[str, Make] = {
    "user": text,
    "safety_identifier": text,
    "metadata": _metadata,
    "store": one_of(False),
    "service_tier": one_of("auto", "default"),
    "temperature": number(0, 2),
    "top_p": number(1e-6, 1),
    "seed": whole(-(1 << 63), (1 << 63) - 1),
    "prompt_cache_key": text,
    "prompt_cache_options": Object({}, {"mode": one_of("implicit", "explicit"), "ttl": one_of("30m")}),
    "kvfold": _POLICY,
}
_ROUTED: dict[str, Make] = {
    "no_stop_trim": one_of(False),
    "ignore_eos": flag,
    "skip_special_tokens": one_of(True),
    "return_hidden_states": one_of(False),
}
_REASONING: dict[str, Make] = {
    "continue_final_message": one_of(False),
    "separate_reasoning": one_of(True),
    "stream_reasoning": one_of(True),
    "include_reasoning": one_of(True),
}
_LOGITS: dict[str, Make] = {
    "n": one_of(1),
    "presence_penalty": one_of(0, 0.0),
    "frequency_penalty": one_of(0),
    "logit_bias": one_of({}),
    "stop": one_of(text, some(text, 0, 4)),
}
_STREAM: dict[str, Make] = {"stream": flag, "stream_options": one_of(None)}
_DEFINED: dict[str, Make] = {"description": text, "parameters": schema, "strict": one_of(False)}
_function = Object({"name": name}, _DEFINED)
_STEERING: dict[str, Make] = {
    "text": Object({}, {"format": Object({"type": one_of("text")}), "verbosity": one_of("medium")}),
    "reasoning": Object({}, {"effort": one_of("none"), "context": one_of("auto"), "mode": one_of("standard")}),
    "truncation": one_of("disabled"),
}
_CHAT = Object(
    {"model": one_of("tiny", "tiny-too"), "messages": chat},
    {
        **_SHARED,
        **_LOGITS,
        **_STREAM,
        **_ROUTED,
        **_REASONING,
        "max_tokens": whole(1, MAX_OUTPUT),
        "max_completion_tokens": one_of(None),
        "tools": unlike(Object({"type": one_of("function"), "function": _function})),
        "tool_choice": one_of("auto", "none"),
        "parallel_tool_calls": one_of(True),
        "logprobs": one_of(False),
        "top_logprobs": one_of(0),
        "response_format": Object({"type": one_of("text")}),
        "modalities": one_of(["text"]),
        "reasoning_effort": one_of("none"),
        "verbosity": one_of("medium"),
    },
)
_COMPLETION = Object(
    {"model": one_of("tiny"), "prompt": one_of(text, some(text, 1, 1), some(whole(0, 20), 1, 9))},
    {
        **_SHARED,
        **_LOGITS,
        **_STREAM,
        **_ROUTED,
        "max_tokens": whole(1, MAX_OUTPUT),
        "best_of": one_of(1),
        "echo": one_of(False),
        "logprobs": one_of(None),
        "suffix": one_of(""),
    },
)


def items(rng: Random) -> list[Any]:
    state: dict[str, Make] = {"status": one_of("completed"), "id": name}
    message = Object({"role": one_of("user", "system", "developer"), "content": _content("input_text")}, state)
    found: list[Any] = [message(rng)]
    for turn in range(rng.randint(0, 3)):
        ids = [f"call_{turn}_{i}" for i in range(rng.randint(0, 2))]
        said = Object({"role": one_of("assistant"), "content": _content("output_text")}, state)
        found += [said(rng)] if rng.random() < 0.5 else []
        called = Object({"name": name, "arguments": lambda rng: json.dumps(one_of({}, schema)(rng))}, state)
        found += [{"type": "function_call", "call_id": call_id, **called(rng)} for call_id in ids]
        given = Object({"output": _content("input_text")}, state)
        found += [{"type": "function_call_output", "call_id": call_id, **given(rng)} for call_id in ids]
        found.append(message(rng))
    return found


_ASKED: dict[str, Make] = {
    **_STEERING,
    "instructions": text,
    "tools": unlike(Object({"type": one_of("function"), "name": name}, {**_DEFINED, "defer_loading": one_of(False)})),
    "tool_choice": one_of("auto", "none"),
    "parallel_tool_calls": one_of(True),
}
_RESPONSE = Object(
    {"model": one_of("tiny"), "input": one_of("", text, items)},
    {
        **_SHARED,
        **_STREAM,
        **_ASKED,
        "store": one_of(False, True),
        "priority": one_of(0),
        "top_k": one_of(-1),
        "min_p": one_of(0, 0.0),
        "repetition_penalty": one_of(1, 1.0),
        "max_output_tokens": whole(1, MAX_OUTPUT),
        "background": one_of(False),
        "include": one_of([], ["reasoning.encrypted_content"]),
        "top_logprobs": one_of(0),
    },
)
_INPUT_TOKENS = Object({"model": one_of("tiny"), "input": one_of("", text, items)}, _ASKED)

ROUTES: Mapping[str, Object] = {
    "/v1/messages": _MESSAGE,
    "/v1/messages/count_tokens": _COUNT,
    "/v1/chat/completions": _CHAT,
    "/v1/completions": _COMPLETION,
    "/v1/responses": _RESPONSE,
    "/v1/responses/input_tokens": _INPUT_TOKENS,
}


def valid(path: str, rng: Random) -> dict[str, Any]:
    """A body that the route answers with 200."""
    found = ROUTES[path](rng)
    takes_options = {"stream_options"} & ROUTES[path].names
    if takes_options and found.get("stream") and rng.random() < 0.5:
        usage: dict[str, Make] = {} if path == "/v1/responses" else {"include_usage": flag}
        found["stream_options"] = Object({}, {**usage, "include_obfuscation": one_of(False)})(rng)
    return found


def described(path: str) -> Sequence[str]:
    return sorted(ROUTES[path].names)
