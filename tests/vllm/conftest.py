"""Everything here needs vLLM, which has an environment of its own (docs/vllm.md)."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if find_spec("vllm") is not None:
        return
    reason = pytest.mark.skip(reason="vLLM is not installed here; docs/vllm.md tells how to run these tests")
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(reason)
