"""Two users, or two tenants with a user of the same name, never see each other's facts."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import given, settings
from hypothesis import strategies as st

from kvfold.memory import Memory
from kvfold.memory.store import FactStore

NAMES = st.sampled_from(["a", "b", "ab", "A", "a' OR '1'='1", "%", "*", "ä"])
OWNERS = st.tuples(st.sampled_from(["", "a", "b", "%"]), NAMES)
WORDS = st.sampled_from(["house", "garden", "river", "opera", "violin"])
STEPS = st.lists(st.tuples(OWNERS, st.sampled_from(["add", "ask", "forget", "export"]), WORDS, WORDS), max_size=30)


@given(STEPS)
@settings(max_examples=40, deadline=None)
def test_nobody_sees_the_facts_of_others(steps: list[tuple[tuple[str, str], str, str, str]]) -> None:
    known: dict[tuple[str, str], set[str]] = defaultdict(set)
    with TemporaryDirectory() as folder, FactStore(Path(folder) / "memory.db") as store:
        memories: dict[tuple[str, str], Memory] = {}
        for owner, verb, first, second in steps:
            tenant, user = owner
            memory = memories.setdefault(owner, Memory(None, user, tenant=tenant, embedder="hashed", store=store))
            if verb == "add":
                text = f"The {first} of {tenant}-{user} stands by the {second}."
                memory.add(text)
                known[owner].add(text)
            elif verb == "forget":
                assert memory.forget() == len(known.pop(owner, ()))
            elif verb == "export":
                assert all(f'"user": "{user}"' in line for line in memory.export().splitlines())
            found = {one.fact.text for one in memory.recall(f"Which {first} stands by the {second}?")}
            assert found <= known[owner]
            assert {fact.text for fact in memory.facts()} == known[owner]
            assert dict(store.owners(tenant)) == {
                name: len(texts) for (of, name), texts in known.items() if of == tenant and texts
            }
