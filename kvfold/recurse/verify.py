"""A chain of steps over one session: each step is generated, checked, and cropped and tried again if it is refused.

    with Session(model, "keydiff + 2048tok + int8") as session:
        session.extend("Add 17, 25 and 40, one sum a line.")
        chain = Chain(session, [ArithmeticCheck()])
        while chain.num_steps < 10 and not chain.step().is_last:
            pass
        print(chain.report())

    cache   | prompt | step 1 | step 2 | attempt 1 of step 3          refused: cropped
                                       | attempt 2 of step 3          passes: stays, and so does the separator

A refused attempt leaves no trace: the session is rewound to a fork made before the step, also where slots were evicted
while it was generated. Under a policy with an absolute size (`2048tok`, `512MB`) old steps are compressed as the chain
grows, so its memory has a bound; the fork may double that bound while a step is generated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from math import inf
from typing import Literal

from kvfold.errors import InputError, OutOfPages
from kvfold.recurse.budget import check_counts
from kvfold.recurse.chain_report import Attempt, ChainReport, Step
from kvfold.recurse.checks import Check, as_checks
from kvfold.reply import Reply
from kvfold.session import Session

Retry = Literal["resample", "reason"]
_NOTE = "That line was refused, because {reason}. Write it again.\n"
_REASON_CHARS = 500  # of a note
_MOST_BLANKS = 4  # empty lines before a step


class Chain:
    """Checked steps of one reply. The session belongs to the chain while a step runs, and to the caller in between.

    A step ends at `separator`, which is never part of its text. A refused one is tried `max_retries` times more, with
    other seeds at `retry_temperature` or more (`retry="resample"`), or behind a note that tells the reason ("reason").
    A step that never passes is cropped and reported; `keep_failed` leaves its last attempt in the cache.
    """

    def __init__(
        self,
        session: Session,
        checks: Sequence[Check | Callable[[str], str | bool | None]],
        *,
        max_retries: int = 3,
        retry: Retry = "resample",
        retry_temperature: float = 0.7,
        separator: str = "\n",
        keep_failed: bool = False,
    ) -> None:
        check_counts(0, max_retries=max_retries)
        if not isinstance(retry_temperature, int | float) or not 0 <= retry_temperature < inf:
            raise InputError(f"retry_temperature is {retry_temperature!r}; give a number from 0 on")
        if retry not in ("resample", "reason"):
            raise InputError(f'retry is "{retry}"; give "resample" or "reason"')
        if not isinstance(separator, str) or not separator:
            raise InputError(f"the separator is {separator!r}; give the text that ends a step, such as a line break")
        self.session = session
        self.checks = as_checks(checks)
        self.steps: list[Step] = []
        self._max_retries, self._retry, self._retry_temperature = max_retries, retry, retry_temperature
        self._separator, self._keep_failed = separator, keep_failed
        self._tokens_noted = 0
        session.model.arena.reset_peak()

    @property
    def num_steps(self) -> int:
        return len(self.steps)

    def step(
        self,
        text: str | None = None,
        *,
        max_new_tokens: int = 128,
        temperature: float = 0.0,
        seed: int = 0,
        is_right: Callable[[str], bool] | None = None,
    ) -> Step:
        """Read `text`, if there is one, and generate a step until it passes or its retries are used up.

        `is_right` tells by the ground truth whether a step is right; it decides nothing and is reported. If an attempt
        raises, the session is as before the attempt.
        """
        if text is not None:
            self.session.extend(text)
        attempts: list[Attempt] = []
        is_kept = False
        while not is_kept and len(attempts) <= self._max_retries:
            attempt, is_kept = self._attempt(attempts, max_new_tokens, temperature, seed)
            attempts.append(attempt)
        rights = [None if is_right is None else is_right(one.text) for one in (attempts[0], attempts[-1])]
        self.steps.append(Step(tuple(attempts), is_kept, *rights))
        return self.steps[-1]

    def _attempt(
        self, refused: Sequence[Attempt], max_new_tokens: int, temperature: float, seed: int
    ) -> tuple[Attempt, bool]:
        """The next attempt after those that were refused, and whether it stays in the cache."""
        before = self.session.fork()
        try:
            if refused and self._retry == "reason":
                self._note(refused[-1])
            elif refused:
                temperature = max(temperature, self._retry_temperature)
            reply, num_tokens = self._generate(max_new_tokens, temperature, seed + len(refused))
            found = [(check.name, self._refusal(check, reply.text)) for check in self.checks]
            refusals = tuple((name, reason) for name, reason in found if reason is not None)
            is_kept = not refusals or (self._keep_failed and len(refused) == self._max_retries)
            if is_kept and reply.reason == "stop":
                self.session.write(self._separator)
        except BaseException:
            if self.session.is_closed:
                before.close()
            else:
                self.session.rewind(before)
            raise
        if is_kept:
            self._let_go(before)
        else:
            self.session.rewind(before)
        return Attempt(reply.text, num_tokens, reply.reason, refusals), is_kept

    def _refusal(self, check: Check, text: str) -> str | None:
        reason = check.refusal(text, self.session)
        if self.session.is_closed:
            raise InputError(f"the check {check.name} closed the session of its chain; let it ask a fork")
        return reason

    def _generate(self, max_new_tokens: int, temperature: float, seed: int) -> tuple[Reply, int]:
        """The next text that is not empty; separators before it are kept as they came."""
        num_tokens = 0
        for _ in range(_MOST_BLANKS):
            reply = self.session.generate(
                max_new_tokens=max_new_tokens, temperature=temperature, seed=seed, stop=[self._separator]
            )
            num_tokens += len(reply.token_ids)
            if reply.text.strip() or reply.reason != "stop":
                break
            self.session.write(self._separator)
        return reply, num_tokens

    def _note(self, attempt: Attempt) -> None:
        num_before = len(self.session.token_ids)
        reason = "; ".join(reason for _, reason in attempt.refusals)
        self.session.extend(_NOTE.format(reason=reason[:_REASON_CHARS]), compress=False)
        self._tokens_noted += len(self.session.token_ids) - num_before

    def _let_go(self, before: Session) -> None:
        """Close the fork; what it shared belongs to the session alone again."""
        before.close()
        with suppress(OutOfPages):  # the slots stay in two segments
            self.session.cache.join_tail()

    def report(self) -> ChainReport:
        """Sums over all steps so far."""
        model, num_tokens = self.session.model, len(self.session.token_ids)
        return ChainReport.of(
            self.steps,
            tokens=num_tokens,
            tokens_noted=self._tokens_noted,
            peak_bytes=model.arena.peak_bytes,
            full_bytes=model.spec.full_bytes(num_tokens),
        )
