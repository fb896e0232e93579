"""SizeCache of a run: within their memory, remembered, tried again before they are looked for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import pytest
from torch import Tensor

from kvfold.bench.byte_matching import resident_bytes
from kvfold.bench.plan import Shard
from kvfold.bench.record import TOO_SMALL
from kvfold.bench.size_cache import Cell, Place, SearchedTokens, SizeCache, SizedPolicy, cells, share_of
from kvfold.engine.runner import Runner
from kvfold.errors import InputError, PolicyError
from kvfold.models.loader import Model
from kvfold.pages.sequence import SequenceCache
from tests.bench.runs import SMALL
from tests.tiny import prompt

KEYDIFF, SNAPKV = f"keydiff + {SMALL}", f"snapkv(window=8) + ada + int4 + {SMALL}"
WANTED = [Cell(KEYDIFF, "60%"), Cell(SNAPKV, "45%"), Cell("int4", "100%"), Cell("int4", "2%")]
FIRST, SECOND = Place("kv", "kv", 500, "known"), Place("lines", "lines", 500, "known")
TOKENS = prompt(500)


@pytest.fixture
def runner(model: Model) -> Runner:
    return Runner(model.hf, model.spec, model.arena)


@pytest.fixture
def forwards(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sequences of each forward, as they come."""
    found: list[int] = []
    prefill_many = runner.prefill_many

    def spy(sequences: Sequence[SequenceCache], tokens: Sequence[int]) -> Tensor:
        found.append(len(sequences))
        return prefill_many(sequences, tokens)

    monkeypatch.setattr(runner, "prefill_many", spy)
    return found


def _tokens(_: str) -> SearchedTokens:
    return SearchedTokens(TOKENS, len(TOKENS))


def _unasked(_: str) -> NoReturn:
    raise AssertionError("what is known is looked for again")


def test_cells_are_the_full_cache_and_what_memories_ask_of_policies() -> None:
    found = cells(["full", "int4", "keydiff"], ["100%", "25%"])
    assert found == [("full", "100%"), ("int4", "100%"), ("int4", "25%"), ("keydiff", "25%")]


def test_in_the_memory_own_policies_run_as_they_are_written(runner: Runner, tmp_path: Path) -> None:
    sized, chosen = f"keydiff + 40tok + {SMALL}", f"keydiff + adaptive(loss=0.3) + {SMALL}"
    found = cells([sized, chosen, "quest", "keydiff"], ["25%", "own"])
    assert found[1:3] == [(sized, "own"), (chosen, "own")]
    assert found[3:] == [("quest", "25%"), ("quest", "own"), ("keydiff", "25%")]
    written = SizeCache(tmp_path / "sizes.json", runner, found[:3]).at(FIRST, _unasked)
    assert [(sized.resolved, sized.note) for sized in written.values()] == [(cell.policy, "") for cell in found[:3]]
    with pytest.raises(PolicyError, match="has a size of its own; leave it out, or add own to the memories"):
        cells([chosen], ["25%"])


def test_sizes_fit_and_are_remembered(runner: Runner, tmp_path: Path) -> None:
    path = tmp_path / "sizes.json"
    found = SizeCache(path, runner, WANTED).at(FIRST, _tokens)
    for cell in WANTED[:3]:
        (taken,) = resident_bytes(runner, [found[cell].resolved], TOKENS)
        share = taken / runner.spec.full_bytes(len(TOKENS))
        assert found[cell].note == "" and found[cell].share == pytest.approx(share, abs=1e-4)
        assert share <= share_of(cell.memory) * (1 if cell.as_written else 0.99)
    assert found[WANTED[3]].note == TOO_SMALL
    assert SizeCache(path, runner, WANTED).at(FIRST, _unasked) == found
    other = tmp_path / "other.json"
    assert SizeCache(other, runner, WANTED, known=path).at(FIRST, _unasked) == found
    assert other.read_text() == path.read_text()
    with pytest.raises(InputError, match="no file of sizes"):
        SizeCache(other, runner, WANTED, known=tmp_path / "nothing.json")


def test_what_fits_again_is_tried_once(runner: Runner, tmp_path: Path, forwards: list[int]) -> None:
    found = SizeCache(tmp_path / "sizes.json", runner, WANTED)
    first = found.at(FIRST, _tokens)
    forwards.clear()
    second = found.at(SECOND, lambda _: SearchedTokens(prompt(498, seed=5), 498), FIRST)
    assert forwards == [len(WANTED) - 1]  # int4 of two memories is one
    assert [second[cell].resolved for cell in WANTED] == [first[cell].resolved for cell in WANTED]
    assert second[WANTED[3]].note == TOO_SMALL and second[WANTED[0]].workload == "lines"


def test_a_search_needs_few_tries(runner: Runner, tmp_path: Path, forwards: list[int]) -> None:
    """Three for a size on average; what is too small, or evicts nothing, is tried once."""
    policies = [KEYDIFF, f"{KEYDIFF} + int4", f"keydiff + ada + {SMALL}", f"h2o + {SMALL}", SNAPKV]
    wanted = cells([*policies, "int4"], ["60%", "45%", "30%", "2%"])[1:]
    found = SizeCache(tmp_path / "sizes.json", runner, wanted).at(FIRST, _tokens)
    sized = [cell for cell in wanted if not cell.as_written and found[cell].note == ""]
    assert len(sized) >= 10 and sum(forwards) <= 3 * len(sized) + len(wanted) - len(sized)
    assert len(forwards) <= 5


def test_shards_find_together_what_one_process_does(runner: Runner, tmp_path: Path) -> None:
    found: dict[Cell, SizedPolicy] = {}
    for index in range(2):
        share = SizeCache(tmp_path / f"{index}.json", runner, WANTED)
        share.take(Shard(index, 2))
        assert 0 < len(share.wanted) < len(WANTED)
        found |= share.at(FIRST, _tokens)
    assert found == SizeCache(tmp_path / "sizes.json", runner, WANTED).at(FIRST, _tokens)


def test_what_does_not_fit_again_is_looked_for(runner: Runner, tmp_path: Path) -> None:
    """A prompt of a third of the length, where the open block weighs more."""
    short = prompt(170, seed=5)
    found = SizeCache(tmp_path / "sizes.json", runner, WANTED[:1])
    first = found.at(FIRST, _tokens)[WANTED[0]]
    second = found.at(SECOND, lambda _: SearchedTokens(short, 170), FIRST)[WANTED[0]]
    assert second.resolved != first.resolved
    assert second.note == TOO_SMALL or second.share <= 0.6


def test_a_foreign_file_is_refused(runner: Runner, tmp_path: Path) -> None:
    (tmp_path / "sizes.json").write_text('[{"colour": 1}]')
    with pytest.raises(InputError, match="holds no sizes of a run"):
        SizeCache(tmp_path / "sizes.json", runner, WANTED)
