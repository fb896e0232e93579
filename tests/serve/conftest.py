"""Tests that talk to a running server are left out where its extra, or the vendors' clients, are not installed."""

from __future__ import annotations

from importlib.util import find_spec

_NEEDED = ("starlette", "uvicorn", "anthropic", "openai")
_PARTS = (
    "anthropic bad_requests dashboard ending explain fields fuzz intake isolation openai page prompt "
    "prompt_cache refusals restart same_reply server slow_clients traces"
)
_TALKING = [f"test_{name}.py" for name in _PARTS.split()]

collect_ignore = [] if all(map(find_spec, _NEEDED)) else _TALKING
