"""Which older fact a newer one supersedes: the same subject, a verb of one value at a time, and another value.

Two facts are compared if their cosine is above 0.8, if they share at least two words and half of the shorter one's, or
if the newer one says itself that something changed. Below that cosine values must be of one kind (numbers, days, names,
words), and words alone behind `is` are not enough: who is tired is still tall. A fact whose negation comes later ends,
too. Where rules are in doubt both facts stay.
"""

from __future__ import annotations

from kvfold.memory.statement import Statement
from kvfold.memory.verbs import CHANGE, HAS_MANY_VALUES

NEAR_COSINE = 0.8
_ONE_AT_A_TIME = frozenset(["favourite", "favorite", "preferred", "main", "default"])
_MIN_SHARED, _MIN_SHARE = 2, 0.5


def supersedes(new: Statement, old: Statement, cosine: float) -> bool:
    """Whether the old statement holds no longer once the new one is made."""
    if new.subject != old.subject or new.owners != old.owners:
        return False
    if new.is_negated != old.is_negated:
        return (new.verb == old.verb or _is_comparable(new, old)) and _denies(new, old)
    if new.is_negated or not _is_comparable(new, old) or not new.values - old.values or not old.values - new.values:
        return False
    if cosine > NEAR_COSINE:
        return True
    says_so = new.is_update or new.verb == CHANGE
    is_state = new.verb == old.verb == "be" and new.kind == "word" and not _ONE_AT_A_TIME & set(new.subject.split())
    return new.kind == old.kind and (says_so or (not is_state and _shares_enough(new, old)))


def _denies(new: Statement, old: Statement) -> bool:
    return bool(new.values) and new.values <= old.values


def _is_comparable(new: Statement, old: Statement) -> bool:
    if new.verb in HAS_MANY_VALUES or old.verb in HAS_MANY_VALUES:
        return False
    verbs = {new.verb, old.verb}
    is_attribute = " " in new.subject  # her colour changes to green; what she herself changes to may be anything
    is_change = is_attribute and CHANGE in verbs and verbs <= {CHANGE, "be", "call"}
    return len(verbs) == 1 or is_change or new.kind == old.kind == "day"


def _shares_enough(new: Statement, old: Statement) -> bool:
    shared = len(new.words & old.words)
    return shared >= _MIN_SHARED and shared >= _MIN_SHARE * min(len(new.words), len(old.words))
