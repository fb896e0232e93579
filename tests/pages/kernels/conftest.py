"""Triton's kernel on every device: on a CPU, where numba's is used otherwise, in the interpreter."""

from __future__ import annotations

import pytest

from kvfold.pages.kernels import dispatch


@pytest.fixture
def triton_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "uses_numba", lambda _: False)
