"""A folder of wheels that is pip's only index, and a home of its own for each test."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only place pip looks for packages."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return folder


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """KVFOLD_HOME of this test."""
    folder = tmp_path / "home"
    monkeypatch.setenv("KVFOLD_HOME", str(folder))
    return folder
