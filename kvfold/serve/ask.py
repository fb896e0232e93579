"""A request in no vendor's words: blocks in the order in which they are rendered, and how to reply.

The order is that of Anthropic's contract: tools, then system, then messages. A block is the unit that a cache marker
can stand on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from kvfold.engine.sample import Sampling

Kind = Literal["tool", "system", "text", "tool_use", "tool_result"]
Role = Literal["system", "user", "assistant", "tool"]
Section = Literal["tools", "system", "messages"]


@dataclass(frozen=True)
class Block:
    """`message` counts messages; tools and the leading system text are before message 0.

    `data`: of a tool its definition {name, description, parameters}; of a tool_use {id, name, arguments}.
    `ttl_s`: how long what ends here is to be cached, where a marker stands on it.
    """

    kind: Kind
    role: Role = "user"
    text: str = ""
    message: int = -1
    data: Mapping[str, Any] = field(default_factory=dict)
    ttl_s: float | None = None

    @property
    def section(self) -> Section:
        if self.message >= 0:
            return "messages"
        return "tools" if self.kind == "tool" else "system"

    @property
    def is_cacheable(self) -> bool:
        """An empty text cannot carry a marker."""
        return self.kind in ("tool", "tool_use", "tool_result") or bool(self.text)

    def marked(self, ttl_s: float | None) -> Block:
        return replace(self, ttl_s=ttl_s)


@dataclass(frozen=True)
class Ask:
    """What is asked, and of whom. `calls_tools`: whether calls in the reply are told apart from text."""

    model: str
    blocks: Sequence[Block]
    max_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    stop: Sequence[str] = ()
    tool_choice: str = "auto"
    raw_text: str | None = None  # a prompt that goes in as it is, without the chat template

    @property
    def tools(self) -> list[Block]:
        return [block for block in self.blocks if block.kind == "tool"]

    @property
    def calls_tools(self) -> bool:
        return bool(self.tools) and self.tool_choice == "auto"
