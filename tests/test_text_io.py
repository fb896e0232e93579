"""Text files: what has no end is not read forever."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvfold import text_io
from kvfold.errors import InputError


def test_a_file_without_an_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_io, "MAX_BYTES", 3 << 20)
    with pytest.raises(InputError, match="/dev/zero has more than 3 MB; split the text, or name another file"):
        text_io.read_text_file(Path("/dev/zero"))


def test_a_file_of_the_largest_size_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(text_io, "MAX_BYTES", 5)
    path = tmp_path / "text"
    path.write_text("a b c", encoding="utf-8")
    assert text_io.read_text_file(path) == "a b c"
