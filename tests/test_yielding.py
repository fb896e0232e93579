"""Changes that last as long as a context."""

from __future__ import annotations

import pytest

from kvfold.yielding import patched


def test_an_interrupt_while_a_change_is_undone_comes_after_it() -> None:
    found, interrupts = [], [KeyboardInterrupt, KeyboardInterrupt]

    def undo() -> None:
        found.append("first")
        if interrupts:
            raise interrupts.pop()
        found.append("second")

    with pytest.raises(KeyboardInterrupt), patched(lambda: None, undo):
        pass
    assert found == ["first", "first", "first", "second"]
