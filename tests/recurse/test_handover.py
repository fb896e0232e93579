"""Pipelines: the next module goes on where the last one ended, reads nothing again, and leaves nothing behind."""

from __future__ import annotations

import pytest

import kvfold
from kvfold.errors import InputError
from kvfold.models.loader import Model
from kvfold.recurse.handover import Pipeline

TEXT = "the cat saw a bird. " * 10


def read(session: kvfold.Session) -> str:
    session.extend(TEXT)
    return session.generate(max_new_tokens=6).text


def check(session: kvfold.Session) -> str:
    session.extend("Is it so?", compress=False)
    return session.generate(max_new_tokens=6).text


def write(session: kvfold.Session) -> str:
    return session.ask("What now?", max_new_tokens=6).text


@pytest.mark.parametrize("policy", ["full", "keydiff + 2x + int8", "keydiff + 100tok"])
def test_modules_do_what_one_session_would(model: Model, policy: str) -> None:
    with kvfold.Session(model, policy) as session:
        expected = [module(session) for module in (read, check, write)]
        num_tokens = len(session.token_ids)
    with kvfold.Session(model, policy) as session:
        with Pipeline([read, check, write]).run(session) as result:
            assert [run.output for run in result.runs] == expected
            assert result.output == expected[-1]
            assert [run.name for run in result.runs] == ["read", "check", "write"]
            first, second, third = result.runs
            assert (first.tokens_handed, second.tokens_handed) == (0, first.tokens_new)
            assert (third.tokens_handed, third.tokens_new) == (num_tokens, 0)
            assert result.tokens_new == num_tokens == len(result.session.token_ids)
        assert session.token_ids == [], "the session that was given is as it was"


def test_text_is_cut_and_read_again(model: Model) -> None:
    with (
        kvfold.Session(model) as session,
        Pipeline([read, check], hand_over="text", max_tokens=40).run(session) as result,
    ):
        first, second = result.runs
        assert (first.tokens_handed, second.tokens_handed) == (0, 0)
        told = model.tokenizer.decode(result.session.token_ids)
        assert told.count("the cat saw a bird.") == 1 < TEXT.count("the cat saw a bird.")
        assert second.tokens_new > 40


def test_a_compressed_handover_holds_less_than_the_full_cache(model: Model) -> None:
    with kvfold.Session(model, "keydiff + 100tok") as session, Pipeline([read, write]).run(session) as result:
        assert result.runs[-1].resident_bytes < result.runs[-1].full_bytes * 2, "fp32 slots"
        assert max(map(len, (result.session.kept(0, 0), result.session.kept(2, 1)))) <= 100


@pytest.mark.parametrize("hand_over", ["cache", "text"])
def test_a_module_that_raises_frees_everything(model: Model, hand_over: str) -> None:
    def broken(session: kvfold.Session) -> str:
        session.extend("the cat")
        raise RuntimeError("broken")

    with kvfold.Session(model) as session, pytest.raises(RuntimeError, match="broken"):
        Pipeline([read, broken], hand_over=hand_over).run(session)  # type: ignore[arg-type]
    assert model.arena.used_bytes == 0


def test_what_cannot_be_a_pipeline_is_refused(model: Model) -> None:
    with pytest.raises(InputError, match="at least one module"):
        Pipeline([])
    with pytest.raises(InputError, match='hand_over is "mail"'):
        Pipeline([read], hand_over="mail")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="max_tokens is 0"):
        Pipeline([read], max_tokens=0)
    with kvfold.Session(model) as session, pytest.raises(InputError, match="returned NoneType; return its output"):
        Pipeline([lambda session: None]).run(session)  # type: ignore[list-item,return-value]


def test_a_module_that_closes_its_session_is_named(model: Model) -> None:
    def shut(session: kvfold.Session) -> str:
        session.close()
        return "done"

    with kvfold.Session(model) as session, pytest.raises(InputError, match="module shut closed its session"):
        Pipeline([read, shut]).run(session)
    assert model.arena.used_bytes == 0
