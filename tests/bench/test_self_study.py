"""Self-study: the whole cache follows itself exactly, a compressed one less, and sessions stay as they were."""

from __future__ import annotations

import pytest

from kvfold.bench.fidelity import Fidelity, StudyResult, mean, study
from kvfold.errors import InputError
from kvfold.models.loader import Model
from kvfold.session import Session

TEXT = " ".join(f"line {number} tells of the sea." for number in range(12))


def read(model: Model, policy: str, template: str | None) -> Session:
    session = Session(model, policy, page_size=4, open_len=8, template="auto" if template else None)
    return session.extend(messages=[{"role": "system", "content": TEXT}]) if template else session.extend(TEXT)


@pytest.mark.parametrize("template", ["auto", None])
def test_the_whole_cache_follows_itself(model: Model, template: str | None) -> None:
    with read(model, "full", template) as full, read(model, "full", template) as other:
        before = list(full.token_ids), full.cache.logical_len
        found = study(full, other, ["Who?", "When and where?"], 10)
        assert (full.token_ids, full.cache.logical_len) == before
        with full.fork() as asked:
            expected = asked.extend("Who?", compress=False).generate(max_new_tokens=10).text
    assert [item.question for item in found] == ["Who?", "When and where?"]
    assert found[0].answer == expected
    for item in found:  # without a template, the first word follows the question, which both have read
        assert item.fidelity.num_tokens == (10 if template else 9)
        assert item.fidelity.agreement == 1.0 and item.fidelity.kl_nats == pytest.approx(0.0, abs=1e-6)


def test_a_compressed_cache_does_not(model: Model) -> None:
    with read(model, "full", "auto") as full, read(model, "knorm + 4x", "auto") as compressed:
        (item,) = study(full, compressed, ["Who?"], 10)
    assert item.fidelity.kl_nats > 0.01


def test_sessions_must_have_read_the_same(model: Model) -> None:
    told = pytest.raises(InputError, match="compare sessions that have read the same")
    with read(model, "full", "auto") as full, read(model, "full", None) as other, told:
        study(full, other, ["Who?"], 10)


def test_the_mean_is_over_tokens() -> None:
    rows = [StudyResult("a", "", Fidelity(1, 4.0, 0.0, 8.0)), StudyResult("b", "", Fidelity(3, 0.0, 1.0, 0.0))]
    assert mean(rows) == Fidelity(4, 1.0, 0.75, 2.0)
