"""Where vLLM is not installed, its connector names the extra, and nothing else asks for it."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

import kvfold
from kvfold.errors import MissingExtra


def test_the_connector_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("kvfold.vllm")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(MissingExtra, match=r'pip install "kvfold\[vllm\]"'):
        importlib.import_module("kvfold.vllm")


def test_nothing_else_imports_it() -> None:
    root = Path(kvfold.__file__).parent
    for path in root.rglob("*.py"):
        if "vllm" not in path.relative_to(root).parts:
            text = path.read_text(encoding="utf-8")
            assert "import vllm" not in text and "from vllm" not in text and "kvfold.vllm import" not in text, path
