"""Windows of texts whose tokens get labels: some context, and the tokens behind it that are predicted.

    text      |------------ context ------------|--- labelled ---|--- labelled ---| …
    window 0  |--------- labelled, whole -------|
    window 1  |------------ context ------------|--- labelled ---|
    window 2                  |------------ context ------------|--- labelled ---|

Every token of a text is labelled once, but for the first where the tokenizer begins no text with a BOS token. Of a
window's context all but the last token are cached; the last one is fed together with the labelled tokens, so no label
is computed from the uncompressed context. The first window has no context to compress.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvfold.errors import InputError

DEFAULT_WINDOW = 4096


@dataclass(frozen=True)
class Window:
    """Tokens `start` to `begin` of a text are its context, those from `begin` to `end` are labelled."""

    text: int
    start: int
    begin: int
    end: int

    @property
    def num_labels(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True)
class WindowPlan:
    """How texts are cut: tokens of a window, and how many of these are context."""

    window: int
    context: int

    @classmethod
    def of(cls, max_positions: int, window: int | None, context: int | None) -> WindowPlan:
        """Defaults: the trained window, at most 4096 tokens, half of it context."""
        most = max_positions or DEFAULT_WINDOW
        chosen = min(most, DEFAULT_WINDOW) if window is None else window
        if not 2 <= chosen <= most:
            raise InputError(f"the window is {chosen} tokens; the model was trained on {most}: choose from 2 to {most}")
        behind = chosen // 2 if context is None else context
        if not 1 <= behind < chosen:
            raise InputError(f"the context is {behind} of a window of {chosen} tokens; choose from 1 to {chosen - 1}")
        return cls(chosen, behind)

    def cut(self, lens: Sequence[int], *, has_bos: bool) -> list[Window]:
        """The windows of texts of so many tokens, text by text."""
        first, step = (0 if has_bos else 1), self.window - self.context
        found = []
        for text, length in enumerate(lens):
            found.append(Window(text, 0, first, min(self.context, length)))
            for begin in range(max(self.context, first), length, step):
                found.append(Window(text, begin - self.context, begin, min(begin + step, length)))
        return [window for window in found if window.num_labels > 0]


def bos_ids(tokenizer: Any) -> list[int]:
    """The BOS token, where the tokenizer begins texts with it."""
    found = list(tokenizer("a")["input_ids"][:1])
    return found if tokenizer.bos_token_id is not None and found == [tokenizer.bos_token_id] else []
