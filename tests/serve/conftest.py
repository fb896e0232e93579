"""Tests that talk to a running server are left out where its extra, or the vendors' clients, are not installed."""

from __future__ import annotations

from importlib.util import find_spec

_NEEDED = ("starlette", "uvicorn", "anthropic", "openai")
_NAMES = (
    "api/test_routers replicas/test_combine replicas/test_proxy replicas/test_replicas replicas/test_routing "
    "test_compiling test_native test_real_routers test_reused_tokens "
    "api/test_anthropic api/test_openai api/test_validation cache/test_explain ops/test_dashboard ops/test_tracing "
    "test_bad_requests test_ending test_fuzz test_isolation test_page test_preprocess test_prompt test_prompt_cache "
    "test_refusals test_restart test_same_reply test_server test_shared_prefix test_slow_clients"
)
_TALKING = [f"{name}.py" for name in _NAMES.split()]

collect_ignore = [] if all(map(find_spec, _NEEDED)) else _TALKING
