"""Episodes: bounded caches over one history, each shaped by its own turns, and nothing left of what shaped it."""

from __future__ import annotations

from pathlib import Path

import pytest

import kvfold
from kvfold.budget.profile import HeadProfile
from kvfold.episodes import Episodes
from kvfold.errors import InputError
from kvfold.models.loader import Model

BOATS = [f"The boat {i} lies in the harbour under a red sail." for i in range(9)]
BREAD = [f"Bread number {i} needs flour, salt and warm water." for i in range(9)]
TURNS = [turn for pair in zip(BOATS, BREAD, strict=True) for turn in pair]


def made(model: Model, **options: object) -> Episodes:
    chosen: dict[str, object] = {"num_episodes": 2, "window": 1, "slots": 100, "block_len": 200, "num_typical": 2}
    return Episodes(model, TURNS, **(chosen | options))  # type: ignore[arg-type]


@pytest.mark.parametrize("terms", ["uniform", "global + int8"])
def test_caches_are_bounded_and_hold_the_history_alone(model: Model, terms: str) -> None:
    """`slots` of each head on average, over a history of many more; positions are those of the history."""
    with made(model, terms=terms) as episodes:
        assert len(episodes.sessions) == 2
        for session in episodes.sessions:
            stats, length = session.stats(), len(session.token_ids)
            assert length > 800 and stats.logical_len == session.cache.sealed_len == length
            assert 90 <= stats.mean_slots <= 100
            assert max(session.kept(0, 0)) < length and session.kept(0, 0)[:4] == [0, 1, 2, 3]


def test_layers_share_slots_by_what_was_measured(model: Model, tmp_path: Path) -> None:
    """Three times the need, more slots; the mean over the model stays `slots`."""
    heads = [model.spec.layers[i].num_kv_heads for i in model.spec.compressible_layers]
    needs = tuple((0.6 if place == 1 else 0.2,) * count for place, count in enumerate(heads))
    file = tmp_path / "heads.json"
    HeadProfile(model.name, model.weights_digest, "by hand", needs).write(file)
    with made(model, terms=f'profile(file="{file}")') as episodes:
        for session in episodes.sessions:
            lens = [sum(session.cache.stored_lens(i)) / heads[0] for i in model.spec.compressible_layers]
            assert lens[1] > 1.5 * max(lens[0], *lens[2:])
            assert 90 <= session.stats().mean_slots <= 100


def test_the_patch_judges_the_past_alone(model: Model) -> None:
    """Not `snapkv`, whose softmax also runs over the patch itself."""
    with made(model) as episodes:
        assert {type(session.policy.prefill.score).__name__ for session in episodes.sessions} == {"EpiCache"}


def test_episodes_keep_different_slots(model: Model) -> None:
    with made(model) as episodes:
        first, second = (session.kept(1, 0) for session in episodes.sessions)
        assert first != second


def test_a_history_that_fits_is_kept_whole(model: Model) -> None:
    """Then every episode answers as one session over the same text."""
    with made(model, slots=5000) as episodes, kvfold.Session(model, "full") as plain:
        for block in episodes._blocks(TURNS, 200):
            plain.extend(block)
        expected = plain.ask("Where is the boat?", max_new_tokens=8).token_ids
        for session in episodes.sessions:
            assert session.kept(1, 1) == list(range(len(plain.token_ids)))
            assert session.ask("Where is the boat?", max_new_tokens=8).token_ids == expected


def test_a_question_is_answered_by_the_nearest_episode(model: Model) -> None:
    with made(model) as episodes:
        boats, bread = episodes.route("Which sail does the boat have?"), episodes.route("How much flour and salt?")
        assert {boats, bread} == {0, 1}
        question = "How much flour and salt?"
        expected = episodes.sessions[bread].ask(question, max_new_tokens=8).token_ids
        before = [session.kept(0, 0) for session in episodes.sessions]
        assert episodes.ask(question, max_new_tokens=8).token_ids == expected
        assert [session.kept(0, 0) for session in episodes.sessions] == before
        assert [stats.mean_slots for stats in episodes.stats()] == pytest.approx([100, 100], abs=10)


def test_blocks_are_whole_turns(model: Model) -> None:
    with made(model) as episodes:
        blocks = list(episodes._blocks(TURNS, 200))
        assert "".join(blocks) == "".join(f"{turn}\n" for turn in TURNS)
        lens = [len(episodes._ids(block)) for block in blocks]
        assert all(200 <= length < 300 for length in lens[:-1])


def test_closing_gives_everything_back(model: Model) -> None:
    episodes = made(model)
    assert model.arena.used_bytes > 0
    episodes.close()
    episodes.close()
    assert model.arena.used_bytes == 0
    with pytest.raises(InputError, match="closed"):
        episodes.ask("Where?")


def test_a_failure_on_the_way_gives_everything_back(model: Model) -> None:
    def stop(_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        made(model, progress=stop)
    assert model.arena.used_bytes == 0


@pytest.mark.parametrize(("turns", "options"), [([], {}), ("text", {}), ([" "], {}), (TURNS, {"slots": 0})])
def test_what_makes_no_sense_is_refused(model: Model, turns: list[str], options: dict[str, int]) -> None:
    with pytest.raises(InputError):
        Episodes(model, turns, **options)  # type: ignore[arg-type]
