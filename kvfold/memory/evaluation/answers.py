"""Answers of a model that reads what a system shows. A context that all questions share is read once, and forked."""

from __future__ import annotations

from types import TracebackType

from kvfold.memory.evaluation.log import Question
from kvfold.memory.evaluation.systems import System
from kvfold.models.loader import Model
from kvfold.session import Session

_ORDER = "Answer in one word or number. If the notes do not tell it, answer: unknown."
_MAX_NEW_TOKENS = 16


class ModelAnswers:
    """Greedy answers under a policy. Close it, or use it in a `with` statement."""

    def __init__(self, model: Model, policy: str = "full") -> None:
        self._model, self._policy = model, policy
        self._session: Session | None = None
        self._context = ""

    def __call__(self, system: System, question: Question) -> str:
        context = system.context(question)
        if self._session is None or context != self._context:
            self._restart(context)
        assert self._session is not None
        return self._session.ask(f"{question.text} {_ORDER}", max_new_tokens=_MAX_NEW_TOKENS, stop=("\n",)).text

    def _restart(self, context: str) -> None:
        self.close()
        self._session, self._context = Session(self._model, self._policy), context
        self._session.extend(f"Notes:\n{context}" if context else "Notes: none.")

    def close(self) -> None:
        if self._session is not None:
            self._session.close()
        self._session = None

    def __enter__(self) -> ModelAnswers:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self.close()
