"""Fixtures and markers are those of tests/; and a folder with a tiny model, for commands that load one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import model, pytest_collection_modifyitems, shared
from tests.tiny import build, tokenizer

__all__ = ["model", "pytest_collection_modifyitems", "shared"]


@pytest.fixture
def tiny_llama(tmp_path: Path) -> Path:
    build().save_pretrained(tmp_path / "tiny-llama")
    tokenizer().save_pretrained(tmp_path / "tiny-llama")
    return tmp_path / "tiny-llama"
