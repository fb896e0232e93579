"""Writing one fact: what it supersedes ends when it begins, and nothing is deleted.

    Anna lives in Berlin.      2026-01-05 to 2026-03-01
    Anna moved to Paris.       2026-03-01 to

Turns may come in any order of time: a fact that is older than what supersedes it ends there at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from kvfold.memory.embedding import identity
from kvfold.memory.fact import Fact, Owner
from kvfold.memory.statement import Statement, statement_of
from kvfold.memory.store import FactStore, Topic
from kvfold.memory.supersede import supersedes
from kvfold.shortening.base import Embedder
from kvfold.shortening.embedders.codes import cosines


class Written(NamedTuple):
    """A new fact, and the older ones that ended when it began, as they were."""

    fact: Fact
    ended: tuple[Fact, ...]


def write_fact(store: FactStore, owner: Owner, embedder: Embedder, fact: Fact) -> Written | None:
    """The fact as it was written; None if the same text is valid already. The caller holds a transaction."""
    said = statement_of(fact.text)
    topic = topic_of(said)
    same = store.same_text(owner, topic, fact.text)
    if any(one.is_valid(fact.valid_from) for one in same):
        return None
    others = [] if said is None else store.same_topic(owner, topic)
    later = [one for one in same if one.valid_from > fact.valid_from]
    later += [one for one in others if one.valid_from > fact.valid_from and _supersedes(embedder, one, fact)]
    ended = [one for one in others if one.is_valid(fact.valid_from) and _supersedes(embedder, fact, one)]
    next_one = min(later, key=lambda one: one.valid_from, default=None)
    for one in ended:
        store.end(owner, one.id, fact.valid_from)
    end = None if next_one is None else next_one.valid_from
    before = max((one.id for one in ended), default=None)
    written = store.insert(owner, topic, replace(fact, valid_to=end, supersedes=before))
    if next_one is not None:
        store.link(owner, next_one.id, written.id)
    return Written(written, tuple(ended))


def copy_facts(store: FactStore, owner: Owner, embedder: Embedder, facts: Sequence[Fact]) -> int:
    """Write facts of an export as they are, with new ids; returns how many. The caller holds a transaction."""
    made, codes = identity(embedder), embedder.codes([fact.text for fact in facts])
    ids = {}
    for fact, code in zip(facts, codes, strict=True):
        bare = replace(fact, supersedes=None, embedder=made, embedding=code.tobytes())
        ids[fact.id] = store.insert(owner, topic_of(statement_of(fact.text)), bare).id
    for fact in facts:
        if fact.supersedes in ids:
            store.link(owner, ids[fact.id], ids[fact.supersedes])
    return len(facts)


def topic_of(said: Statement | None) -> Topic:
    return Topic() if said is None else Topic(said.subject, said.verb, said.kind)


def _supersedes(embedder: Embedder, new: Fact, old: Fact) -> bool:
    says, said = statement_of(new.text), statement_of(old.text)
    return says is not None and said is not None and supersedes(says, said, _cosine(embedder, new, old))


def _cosine(embedder: Embedder, a: Fact, b: Fact) -> float:
    """By kept vectors where one embedder made both."""
    if a.embedder == b.embedder and len(a.embedding) == len(b.embedding):
        codes = [np.frombuffer(fact.embedding, dtype=np.int8)[None] for fact in (a, b)]
    else:
        codes = [embedder.codes([fact.text]) for fact in (a, b)]
    return float(cosines(codes[0], codes[1])[0, 0])
