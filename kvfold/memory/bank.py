"""The bank of slots of one user, kept beside the facts: it follows them, few slots at a time."""

from __future__ import annotations

import time
from collections.abc import Sequence

from kvfold.memory.fact import Fact
from kvfold.memory.memory import Memory
from kvfold.memory.slots import Slot, updated
from kvfold.memory.store import KEY

NUM_SLOTS = 32
TOP = 8  # slots that one update rewrites at most


class Bank:
    """Slots of a memory's user; `refresh` takes in what was written since."""

    def __init__(self, memory: Memory, num_slots: int = NUM_SLOTS, top: int = TOP) -> None:
        self._memory, self._num_slots, self._top = memory, num_slots, top

    def refresh(self) -> tuple[Slot, ...]:
        """The slots now. A new bank takes the facts that weigh most; later ones come by TF-IDF."""
        memory = self._memory
        with memory.store.writing():
            facts = memory.facts()
            slots, last = self._read()
            new = [fact for fact in facts if fact.id > last and fact.is_valid(time.time())]
            if not new:
                return slots
            if last == 0:
                slots = self._first(new)
            else:
                uses = {fact.id: fact.uses for fact in facts}
                slots = updated(slots, new, uses, memory.num_recalls, self._top)
            self._write(slots, max(fact.id for fact in facts))
        return slots

    def _first(self, facts: Sequence[Fact]) -> tuple[Slot, ...]:
        best = sorted(facts, key=lambda fact: (fact.importance, fact.uses, fact.valid_from, fact.id), reverse=True)
        kept = sorted(best[: self._num_slots], key=lambda fact: fact.id)
        return updated([Slot()] * self._num_slots, kept, {}, 0, self._num_slots)

    def _read(self) -> tuple[tuple[Slot, ...], int]:
        owner, rows = self._memory.owner, self._memory.store.rows
        found = {number: Slot(fact, line) for number, fact, line in rows(_SLOTS, owner)}
        slots = tuple(found.get(number, Slot()) for number in range(self._num_slots))
        last = next((banked for (banked,) in rows(_LAST, owner)), 0)
        return slots, last

    def _write(self, slots: Sequence[Slot], last: int) -> None:
        store, owner = self._memory.store, self._memory.owner
        kept = [(*owner, number, slot.fact, slot.line) for number, slot in enumerate(slots) if slot.fact is not None]
        store.write_rows(f"INSERT OR REPLACE INTO slot (owner, number, fact, line) VALUES ({KEY}, ?, ?, ?)", kept)
        store.write_rows("UPDATE owner SET banked = ? WHERE tenant = ? AND user = ?", [(last, *owner)])

    # Lines of stored KV prefixes

    def lines_of(self, name: str) -> list[str] | None:
        """The lines that a prefix of this name was made from; None if there is none."""
        rows = self._memory.store.rows(_LINES, (*self._memory.owner, name))
        return next((lines.split("\n") for (lines,) in rows), None)

    def drop_lines(self, name: str) -> None:
        sql = f"DELETE FROM prefix WHERE owner = {KEY} AND name = ?"
        self._memory.store.write_rows(sql, [(*self._memory.owner, name)])

    def keep_lines(self, name: str, slots: Sequence[Slot]) -> None:
        lines = "\n".join(slot.line for slot in slots)
        sql = f"INSERT OR REPLACE INTO prefix (owner, name, lines) VALUES ({KEY}, ?, ?)"
        self._memory.store.write_rows(sql, [(*self._memory.owner, name, lines)])


_SLOTS = f"SELECT number, fact, line FROM slot WHERE owner = {KEY}"
_LAST = "SELECT banked FROM owner WHERE tenant = ? AND user = ?"
_LINES = f"SELECT lines FROM prefix WHERE owner = {KEY} AND name = ?"
