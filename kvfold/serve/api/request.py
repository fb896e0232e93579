"""A chat request independent of the vendor's format: content blocks in render order, sampling, tools, stop strings.

The order is Anthropic's: tools, system, messages. A cache marker (`cache_control`) is set on a block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from kvfold.engine.sampling import Sampling
from kvfold.serve.api.errors import bad_request

Kind = Literal["tool", "system", "text", "tool_use", "tool_result", "memory"]
Role = Literal["system", "user", "assistant", "tool"]
Section = Literal["tools", "system", "messages", "memory"]


@dataclass(frozen=True)
class Block:
    """`message`: index of its message; -1 for tools and the leading system text.

    `data`: of a tool its definition {name, description, parameters}; of a tool_use {id, name, arguments}; of a
    tool_result the {id} of its call. `ttl_s`: time to live of its cache marker; None without one. A memory block is the
    server's own, behind the last message.
    """

    kind: Kind
    role: Role = "user"
    text: str = ""
    message: int = -1
    data: Mapping[str, Any] = field(default_factory=dict)
    ttl_s: float | None = None

    @property
    def section(self) -> Section:
        if self.kind == "memory":
            return "memory"
        if self.message >= 0:
            return "messages"
        return "tools" if self.kind == "tool" else "system"


def check_calls(blocks: Sequence[Block], field: str) -> None:
    """Every tool call is followed by exactly one result, and every result has its call; `field`: named in errors."""
    waits: dict[str, bool] = {}  # call id -> whether its result is still missing
    for block in blocks:
        name = block.data.get("id", "")
        if block.kind == "tool_use":
            if name in waits:
                raise _bad_call(field, "two calls have the id {}; give each call its own", name)
            waits[name] = True
        elif block.kind == "tool_result":
            if not waits.get(name, False):
                how = "comes twice" if name in waits else "follows no such call"
                raise _bad_call(field, f"the result of call {{}} {how}; send each call with one result behind it", name)
            waits[name] = False
    for name in (name for name, is_open in waits.items() if is_open):
        raise _bad_call(field, "the call {} has no result; send one behind it", name)


def _bad_call(field: str, reason: str, name: str) -> Exception:
    quoted = f'"{name[:80]}"'
    return bad_request(f"{field}: {reason.format(quoted)}", logged=f"{field}: {reason.format('of an id')}")


@dataclass(frozen=True)
class ChatRequest:
    """`calls_tools`: whether tool calls in the reply are parsed."""

    model: str
    blocks: Sequence[Block]
    max_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    stop: Sequence[str] = ()
    tool_choice: str = "auto"
    raw_text: str | None = None  # a prompt that is tokenized without the chat template
    raw_ids: Sequence[int] | None = None  # a prompt of token ids
    ignores_eos: bool = False  # the reply has max_tokens, but for stop strings
    has_seed: bool = False  # the client's; else it was drawn
    policy: str = ""  # that the client counts on; empty: any
    user: str = ""  # whose facts a memory keeps and recalls
    user_field: str = "user"  # what the API calls it

    @property
    def tools(self) -> list[Block]:
        return [block for block in self.blocks if block.kind == "tool"]

    @property
    def has_markers(self) -> bool:
        return any(block.ttl_s is not None for block in self.blocks)

    @property
    def calls_tools(self) -> bool:
        return bool(self.tools) and self.tool_choice == "auto"
