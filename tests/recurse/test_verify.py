"""Chains: refused steps leave no trace, retries end, old steps are compressed, and the report counts what happened."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import kvfold
from kvfold.errors import InputError
from kvfold.models.loader import Model
from kvfold.recurse.checks import AgreementCheck, ArithmeticCheck
from kvfold.recurse.verify import Chain
from kvfold.stats import kept_positions
from tests import tiny

PROMPT = "the cat saw a bird. " * 8
POLICIES = [
    "full",
    "int4",
    "keydiff + 100tok + int8",
    "h2o + 100tok",
    "keydiff + 2x + kivi4",
    "streaming + 80tok + slot",
]


def _refuse_first(count: int, seen: list[str]) -> Callable[[str], str | None]:
    """A check that refuses so many attempts, then passes."""

    def check(text: str) -> str | None:
        seen.append(text)
        return "it is too early" if len(seen) <= count else None

    return check


@pytest.mark.parametrize("policy", POLICIES)
def test_a_refused_attempt_leaves_no_trace(model: Model, policy: str) -> None:
    """The cache after it, slot for slot, and all that is generated later, are those of a chain without it."""

    def run(num_refused: int) -> tuple[list[int], list[int], list[str], list[int]]:
        seen: list[str] = []
        with kvfold.Session(model, policy) as session:
            session.extend(PROMPT)
            chain = Chain(session, [_refuse_first(num_refused, seen)], retry_temperature=0.0, separator="\t")
            for _ in range(2):
                chain.step(max_new_tokens=36)
            retries = [step.num_retries for step in chain.steps]
            texts = [step.text for step in chain.steps]
            return session.token_ids, kept_positions(session.cache, 1, 1), texts, retries

    ids, kept, texts, retries = run(0)
    again_ids, again_kept, again_texts, again_retries = run(1)
    assert (retries, again_retries) == ([0, 0], [1, 0])
    assert again_texts == texts
    assert again_ids == ids
    assert again_kept == kept


def test_a_chain_without_refusals_is_one_plain_reply(model: Model) -> None:
    with kvfold.Session(model) as session:
        session.extend(PROMPT)
        chain = Chain(session, [], separator="\t")
        texts = [chain.step(max_new_tokens=35).text for _ in range(2)]
        assert len(session.cache.segments) == 0, "forks that are over leave no segments"
    with kvfold.Session(model) as session:
        session.extend(PROMPT)
        assert "".join(texts) == session.generate(max_new_tokens=70).text


def test_a_check_that_asks_the_model_changes_nothing(model: Model) -> None:
    def run(checks: list[AgreementCheck]) -> tuple[list[int], int]:
        with kvfold.Session(model, "int8") as session:
            session.extend(PROMPT)
            chain = Chain(session, checks, separator="\t")
            for _ in range(3):
                chain.step(max_new_tokens=34)
            assert chain.report().retries == 0
            return session.token_ids, len(session.cache.segments)

    assert run([AgreementCheck(threshold=1e-9)]) == run([])
    assert run([])[1] == 0


def test_a_step_ends_at_the_separator_which_stays_in_the_cache(model: Model) -> None:
    with kvfold.Session(model) as session:
        session.extend(PROMPT)
        free = session.fork().generate(max_new_tokens=30).text
        mark = free[12]
        chain = Chain(session, [], separator=mark)
        step = chain.step(max_new_tokens=30)
        first = next(part for part in free.split(mark) if part.strip())
        assert step.text == first
        written = model.tokenizer.decode(session.token_ids, skip_special_tokens=True)
        assert written.endswith(first + mark)


def test_retries_end_and_the_failed_step_is_reported_and_cropped(model: Model) -> None:
    with kvfold.Session(model) as session:
        session.extend(PROMPT)
        before = list(session.token_ids)
        chain = Chain(session, [lambda text: "no"], max_retries=2, separator="\t")
        step = chain.step(max_new_tokens=8)
        assert not step.passed and not step.is_kept
        assert len(step.attempts) == 3
        assert len({attempt.text for attempt in step.attempts}) > 1, "retries sample with other seeds"
        assert session.token_ids == before
        report = chain.report()
        assert (report.steps, report.failed, report.retries) == (1, 1, 2)
        assert report.tokens_generated == report.tokens_wasted == 24
        assert report.refusals == {"function": 3}


def test_a_failed_step_can_be_kept(model: Model) -> None:
    with kvfold.Session(model) as session:
        session.extend(PROMPT)
        before = len(session.token_ids)
        chain = Chain(session, [lambda text: False], max_retries=1, keep_failed=True, separator="\t")
        step = chain.step(max_new_tokens=8)
        assert step.is_kept and not step.passed
        assert model.tokenizer.decode(session.token_ids[before:]).endswith(step.text)
        assert chain.report().tokens_wasted == 8


def test_a_reason_is_read_before_the_next_attempt_and_counts_as_wasted(model: Model) -> None:
    seen: list[str] = []
    with kvfold.Session(model) as session:
        session.extend(PROMPT)
        chain = Chain(session, [_refuse_first(1, seen)], retry="reason", separator="\t")
        chain.step(max_new_tokens=8)
        written = model.tokenizer.decode(session.token_ids)
        assert "That line was refused, because it is too early. Write it again." in written
        assert seen[0] not in written.split("refused")[1]
        assert chain.report().tokens_wasted > 8


def test_a_long_reason_is_cut_before_it_is_read(model: Model) -> None:
    with kvfold.Session(model) as session:
        session.extend(PROMPT)
        chain = Chain(session, [lambda text: "w" * 80_000], retry="reason", max_retries=1)
        chain.step(max_new_tokens=2)
        assert 500 <= chain.report().tokens_wasted < 700


def test_a_check_that_closes_the_session_is_named(model: Model) -> None:
    with kvfold.Session(model) as session:
        session.extend(PROMPT)
        chain = Chain(session, [lambda text: session.close()])
        with pytest.raises(InputError, match="the check function closed the session of its chain"):
            chain.step(max_new_tokens=2)
    assert model.arena.used_bytes == 0


def test_accuracy_with_and_without_checks_comes_from_the_ground_truth(model: Model) -> None:
    seen: list[str] = []
    with kvfold.Session(model) as session:
        session.extend(PROMPT)
        chain = Chain(session, [_refuse_first(1, seen)], separator="\t")
        chain.step(max_new_tokens=8, is_right=lambda text: text != seen[0])
        chain.step(max_new_tokens=8, is_right=lambda text: True)
        chain.step(max_new_tokens=8)
        report = chain.report()
    assert seen[1] != seen[0]
    assert (report.accuracy_without, report.accuracy_with) == (0.5, 1.0)


def test_a_check_that_raises_leaves_the_session_as_it_was(model: Model) -> None:
    def broken(text: str) -> bool:
        raise RuntimeError("no network")

    with kvfold.Session(model) as session:
        session.extend(PROMPT)
        before = list(session.token_ids)
        chain = Chain(session, [broken])
        with pytest.raises(RuntimeError, match="no network"):
            chain.step(max_new_tokens=8)
        assert session.token_ids == before
        assert session.generate(max_new_tokens=4).token_ids


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_retries": -1}, "max_retries is -1; give a whole number from 0 on"),
        ({"max_retries": 1.5}, "max_retries is 1.5; give"),
        ({"retry_temperature": float("nan")}, "retry_temperature is nan; give"),
        ({"retry_temperature": -1}, "retry_temperature is -1; give"),
        ({"checks": [3]}, "3 is no check; give"),
        ({"checks": [ArithmeticCheck]}, "ArithmeticCheck'> is no check; give"),
        ({"checks": ArithmeticCheck()}, "checks are a list; write"),
        ({"separator": 5}, "the separator is 5; give"),
        ({"retry": "hope"}, 'retry is "hope"; give "resample" or "reason"'),
        ({"separator": ""}, "the separator is ''; give"),
    ],
)
def test_senseless_options_are_refused(model: Model, options: dict[str, object], message: str) -> None:
    with kvfold.Session(model) as session, pytest.raises(InputError, match=message):
        Chain(session, **{"checks": [], **options})  # type: ignore[arg-type]


def test_rewind_takes_forks_of_this_session_alone(model: Model) -> None:
    with kvfold.Session(model) as session, kvfold.Session(model) as other:
        session.extend("the cat")
        other.extend("the dog")
        with pytest.raises(InputError, match="rewind takes a fork that this session has continued"):
            session.rewind(other)
        with pytest.raises(InputError, match="rewind takes a fork"):
            session.rewind(session)


@pytest.mark.filterwarnings("ignore:the sequence passes 1024 positions")
@pytest.mark.parametrize(("num_tokens", "size"), [(8_192, 256), (65_536, 2048)])
def test_a_long_chain_runs_in_the_memory_of_a_short_one(num_tokens: int, size: int) -> None:
    """Pages of a chain, retries included, stay below the bytes of an eighth of its tokens in an ordinary bf16 cache."""
    model = tiny.ready()
    limit = model.spec.full_bytes(num_tokens // 8)
    tried: list[int] = []

    def check(text: str) -> bool:
        """Refuses the first attempt at every fourth step."""
        tried.append(chain.num_steps)
        return chain.num_steps % 4 != 3 or tried.count(chain.num_steps) > 1

    with kvfold.Session(model, f"keydiff + {size}tok + int8", template=None) as session:
        session.extend(tiny.prompt(32))
        chain = Chain(session, [check], separator="\t")
        while len(session.token_ids) < num_tokens:
            chain.step(model.tokenizer.decode(tiny.prompt(1000, seed=chain.num_steps)), max_new_tokens=8)
        report = chain.report()
    assert report.tokens >= num_tokens
    assert report.retries == report.steps // 4 > 0
    assert report.failed == 0
    assert report.peak_bytes < limit < report.full_bytes
