"""The wording of RULER's needles (arXiv:2404.06654): what is said before the text and asked after it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Magic:
    """Needles of one kind: "numbers", "uuids" or "words"."""

    kind: str
    keys: tuple[str, ...]  # asked for
    num_answers: int  # of all keys together

    def sentence(self, key: str, value: str) -> str:
        return f"One of the special magic {self.kind} for {key} is: {value}."

    @property
    def instruction(self) -> str:
        hidden = f"A special magic {self._noun} is" if self.num_answers == 1 else f"Some special magic {self._noun} are"
        return (
            f"{hidden} hidden within the following text. Make sure to memorize it. "
            f"I will quiz you about the {self._noun} afterwards.\n"
        )

    @property
    def question(self) -> str:
        return f"\nWhat {'is' if self.num_answers == 1 else 'are all'} the {self._asked}?"

    @property
    def begun(self) -> str:
        return f"The {self._asked} {'is' if self.num_answers == 1 else 'are'}"

    @property
    def _asked(self) -> str:
        *first, last = self.keys
        listed = f"{', '.join(first)}, and {last}" if first else last
        return f"special magic {self._noun} for {listed} mentioned in the provided text"

    @property
    def _noun(self) -> str:
        return self.kind.removesuffix("s") if self.num_answers == 1 else self.kind
