"""Where vLLM is not installed, its connector names the extra, and nothing else asks for it."""

from __future__ import annotations

import importlib
import sys
import tomllib
from pathlib import Path

import pytest

import kvfold
from kvfold.errors import MissingExtra


def test_the_connector_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("kvfold.vllm")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(MissingExtra, match=r'pip install "kvfold\[vllm\]"'):
        _ = importlib.import_module("kvfold.vllm").FoldConnector


def test_vllm_finds_the_plug_in_which_does_nothing_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVFOLD_VLLM_RAGGED", raising=False)
    text = (Path(kvfold.__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    project = tomllib.loads(text)["project"]
    module, _, function = project["entry-points"]["vllm.general_plugins"]["kvfold"].partition(":")
    getattr(importlib.import_module(module), function)()


def test_nothing_else_imports_it() -> None:
    root = Path(kvfold.__file__).parent
    for path in root.rglob("*.py"):
        if "vllm" not in path.relative_to(root).parts:
            text = path.read_text(encoding="utf-8")
            assert "import vllm" not in text and "from vllm" not in text and "kvfold.vllm import" not in text, path
