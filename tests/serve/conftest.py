"""Tests that talk to a running server are left out where its extra, or the vendors' clients, are not installed."""

from __future__ import annotations

from importlib.util import find_spec

_NEEDED = ("starlette", "uvicorn", "anthropic", "openai")
_TALKING = ["test_anthropic.py", "test_openai.py", "test_prompt.py", "test_prompt_cache.py", "test_server.py"]

collect_ignore = [] if all(map(find_spec, _NEEDED)) else _TALKING
