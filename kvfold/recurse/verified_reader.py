"""A reader that checks every reply, and asks again where a check refuses one.

A reply whose words are not in its part, or whose arithmetic is wrong, is sampled again at most `max_retries` times; its
cache is a fork of the shared prefix, so nothing of a refused reply stays. What is refused in the end is dropped, as a
plain reader drops words that are not in the text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from kvfold.engine.layer_major import Progress
from kvfold.recurse.budget import check_counts
from kvfold.recurse.calls import Prompt
from kvfold.recurse.checks import ArithmeticCheck, Check, QuoteCheck
from kvfold.recurse.pieces import Piece
from kvfold.recurse.reader import Reader
from kvfold.recurse.result import ReadResult
from kvfold.recurse.tree import Node, Quote

_TEMPERATURE = 0.7
_NOT_THERE = "its words are not in the text"


@dataclass
class ReadReport:
    """What checks did in one reading.

    Attributes:
        checked: Replies that say something.
        refused: Of those, how many a check refused when they came first.
        retries: Replies that were asked for again.
        recovered: Refused at first, passed after retries.
        tokens_wasted: Tokens read by calls whose replies were refused.
        answer_refusal: Why the final answer is refused; None if it passes, or there is none.
    """

    checked: int = 0
    refused: int = 0
    retries: int = 0
    recovered: int = 0
    tokens_wasted: int = 0
    answer_refusal: str | None = None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


class VerifiedReader(Reader):
    """A `Reader` whose replies pass checks; `report` tells what they refused."""

    def __init__(self, *args: Any, max_retries: int = 2, **options: Any) -> None:
        check_counts(0, max_retries=max_retries)
        super().__init__(*args, **options)
        self.report = ReadReport()
        self._max_retries = max_retries

    def ask(
        self, pieces: Sequence[Piece], *, reserved_calls: int = 0, progress: Progress | None = None
    ) -> Iterator[tuple[int, Node]]:
        """As a reader's; replies that a check refuses come last, after their retries."""
        refused: dict[int, Node] = {}
        for index, node in super().ask(pieces, reserved_calls=reserved_calls, progress=progress):
            self.report.checked += node.state != "nothing"
            if self._refusal(pieces[index], node) is None:
                yield index, node
            else:
                refused[index] = node
        self.report.refused += len(refused)
        for number in range(1, self._max_retries + 1):
            yield from self._again(pieces, refused, number, reserved_calls)
        for index, node in refused.items():
            self.report.tokens_wasted += node.num_tokens
            yield index, replace(node, state="dropped", answer="", quote=None, quote_span=None)

    def _again(
        self, pieces: Sequence[Piece], refused: dict[int, Node], number: int, reserved_calls: int
    ) -> Iterator[tuple[int, Node]]:
        """Retry what the budget has room for, beside one call of the level above; those that pass leave `refused`."""
        prompts = {index: self._prompt(pieces[index], number) for index in refused}
        needs = [self.calls.num_tokens(prompt) + prompt.max_new_tokens for prompt in prompts.values()]
        count, _ = self.bounded.meter.affordable(needs, reserved_calls + 1)
        now = list(prompts)[: 0 if self.bounded.stopped_by else count]
        for at, reply in self.bounded.replies([prompts[index] for index in now], reserved_calls=reserved_calls + 1):
            index, piece = now[at], pieces[now[at]]
            node = piece.node(self.context, self.question, reply)
            self.report.retries += 1
            self.report.tokens_wasted += refused[index].num_tokens
            refused[index] = node
            if self._refusal(piece, node) is None:
                del refused[index]
                self.report.recovered += 1
                yield index, node

    def _prompt(self, piece: Piece, number: int) -> Prompt:
        return replace(self.reading.prompt(piece.text), temperature=_TEMPERATURE, seed=number)

    def _refusal(self, piece: Piece, node: Node) -> str | None:
        if node.state == "dropped":
            return _NOT_THERE
        if node.state != "answer":
            return None
        return refusal(node.reply, piece.text) or _quote_refusal(node.answer, node.quote)

    def result(self, *, interrupted: bool = False) -> ReadResult:
        found = super().result(interrupted=interrupted)
        if found.text:
            quote = found.quotes[0] if found.quotes else None
            self.report.answer_refusal = refusal(found.text, self.context.text) or _quote_refusal(found.text, quote)
        return replace(found, checks=self.report.as_json())


def refusal(reply: str, text: str) -> str | None:
    """Why a reply about a text is refused: quotes that are not in it, or arithmetic that does not hold."""
    checks: tuple[Check, ...] = (QuoteCheck(text), ArithmeticCheck())
    return next((reason for check in checks if (reason := check.refusal(reply)) is not None), None)


def _quote_refusal(answer: str, quote: Quote | None) -> str | None:
    """Why an answer with numbers is refused by its sentence, which may compute more than the words of the answer do."""
    if quote is None or not any(map(str.isdigit, answer)):
        return None
    return ArithmeticCheck().refusal(quote.text)
