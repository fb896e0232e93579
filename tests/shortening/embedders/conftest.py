"""A home of its own for each test, and no package index."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """KVFOLD_HOME of this test; pip finds nothing."""
    folder = tmp_path / "home"
    monkeypatch.setenv("KVFOLD_HOME", str(folder))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    return folder
