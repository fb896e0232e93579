"""Sessions of one model in several threads take turns, and say what they say alone."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from kvfold.models.loader import Model
from kvfold.session import Session
from tests.tiny import prompt, ready


def reply(model: Model, length: int) -> str:
    with Session(model, policy="keydiff + 2x + int4 + protect(recent=8)") as session:
        session.extend(prompt(length))
        return session.generate(max_new_tokens=12).text


def test_sessions_in_threads_say_what_they_say_alone() -> None:
    model, lens = ready("llama"), [30, 47, 60, 90]
    alone = [reply(model, length) for length in lens]
    free = model.arena.free_bytes
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(lambda length: reply(model, length), lens * 8)) == alone * 8
    assert model.arena.free_bytes == free
    assert [reply(model, length) for length in lens] == alone
