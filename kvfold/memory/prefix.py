"""A user's facts as a stored KV prefix: the bank of slots, read once by the model and saved as a session.

A question loads it and reads only what changed since, the facts that it recalls beside it, and itself. When more than a
fifth of the slots have changed, the prefix is made anew. `Memory.forget` removes it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Unpack

from kvfold.errors import FileError
from kvfold.memory.bank import NUM_SLOTS, TOP, Bank
from kvfold.memory.fact import Fact
from kvfold.memory.memory import Memory
from kvfold.memory.prefix_files import prefix_path
from kvfold.memory.render import CLOSING, OPENING, fact_line
from kvfold.memory.slots import Slot, changed_share, render_bank
from kvfold.models.loader import Model
from kvfold.policy.policy import Policy
from kvfold.reply import GenerateOptions, Reply
from kvfold.session import Session

MOST_CHANGED = 0.2  # of the slots, before the prefix is made anew


class StoredPrefix:
    """The prefix of one user under one model and policy."""

    def __init__(
        self, memory: Memory, model: Model, policy: str | Policy = "full", *, num_slots: int = NUM_SLOTS, top: int = TOP
    ) -> None:
        self._memory, self._model, self._policy = memory, model, Policy.parse(policy)
        self._bank = Bank(memory, num_slots, top)
        what = "|".join((model.session_digest, str(model.spec.kv_dtype), self._policy.fingerprint, str(num_slots)))
        self._name = hashlib.sha256(what.encode()).hexdigest()[:32]
        self.path = prefix_path(memory.store.path, memory.owner, self._name)
        self.is_loaded = False  # whether the last session came from the file

    def session(self) -> tuple[Session, list[str]]:
        """A session that has read the prefix, and the lines of slots that changed since it was stored."""
        while True:
            of = self._owned()
            bank = self._bank.refresh()
            lines = self._bank.lines_of(self._name)
            session = self._loaded() if lines is not None and changed_share(lines, bank) <= MOST_CHANGED else None
            self.is_loaded = session is not None
            if session is not None and lines is not None:
                return session, [slot.line for line, slot in zip(lines, bank, strict=True) if slot.line != line]
            if all(slot.fact is None for slot in bank):
                return Session(self._model, self._policy), []
            session = self._built(bank, of)
            if session is not None:
                return session, []

    def ask(
        self, question: str, facts: Sequence[Fact] = (), *, max_new_tokens: int = 64, **options: Unpack[GenerateOptions]
    ) -> Reply:
        """The model's answer from the prefix, and from `facts`, such as recalled ones, that are not in it."""
        session, changed = self.session()
        with session:
            known = set(self._bank.lines_of(self._name) or ()) | set(changed)
            beside = [fact_line(fact) for fact in sorted(facts, key=lambda fact: fact.id)]
            lines = [*changed, *(line for line in beside if line not in known)]
            section = "\n".join([OPENING, *lines, CLOSING, "", ""]) if lines else ""
            return session.ask(f"{section}{question}", max_new_tokens=max_new_tokens, **options)

    def _loaded(self) -> Session | None:
        """None if the file is not there, or damaged."""
        try:
            return Session.load(self._model, self.path)
        except (FileError, FileNotFoundError):
            return None

    def _built(self, bank: Sequence[Slot], of: tuple[int, int] | None) -> Session | None:
        """Read and save the prefix; None, with nothing saved, if facts were forgotten meanwhile."""
        session = Session(self._model, self._policy)
        try:
            session.extend(render_bank(bank))
            self._bank.drop_lines(self._name)
            with self._memory.store.writing():  # nobody forgets while it is saved
                if self._owned() == of:
                    session.save(self.path)
                    self.path.chmod(0o600)
                    self._bank.keep_lines(self._name, bank)
                    return session
        except BaseException:
            session.close()
            raise
        session.close()
        return None

    def _owned(self) -> tuple[int, int] | None:
        """What changes when facts are forgotten."""
        version = self._memory.store.version(self._memory.owner)
        return None if version is None else (version.key, version.epoch)
