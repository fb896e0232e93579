"""Sampling: greedy at temperature 0, cut-offs, and seeds that give the same draws."""

from __future__ import annotations

import pytest
import torch

from kvfold.engine.sample import Sampler, Sampling
from kvfold.errors import InputError

LOGITS = torch.log(torch.tensor([0.05, 0.4, 0.15, 0.3, 0.1]))


def drawn(num: int = 400, **options: float) -> set[int]:
    sampler = Sampler(Sampling(**options))  # type: ignore[arg-type]
    return {sampler.pick(LOGITS) for _ in range(num)}


def test_zero_temperature_is_greedy() -> None:
    assert drawn(temperature=0.0) == {1}


def test_cut_offs_keep_the_likeliest() -> None:
    assert drawn(temperature=1.0) == {0, 1, 2, 3, 4}
    assert drawn(temperature=1.0, top_k=2) == {1, 3}
    assert drawn(temperature=1.0, top_k=99) == {0, 1, 2, 3, 4}
    assert drawn(temperature=1.0, top_p=0.4) == {1}
    assert drawn(temperature=1.0, top_p=0.41) == {1, 3}
    assert drawn(temperature=1.0, top_p=0.8) == {1, 2, 3}
    assert drawn(temperature=1.0, top_k=3, top_p=0.5) == {1, 3}


def test_of_equally_likely_tokens_the_first_stay() -> None:
    logits_V = torch.zeros(512).index_fill(0, torch.arange(100, 512), 1.0)
    for options in (Sampling(1.0, top_k=1), Sampling(1.0, top_p=1e-6), Sampling(1.0, top_k=1, top_p=0.5)):
        assert Sampler(options).pick(logits_V) == Sampler(Sampling()).pick(logits_V) == 100
    sampler = Sampler(Sampling(1.0, top_k=3))
    assert {sampler.pick(logits_V) for _ in range(100)} == {100, 101, 102}


def test_frequencies_follow_the_temperature() -> None:
    sampler = Sampler(Sampling(temperature=0.5, seed=3))
    count = torch.bincount(torch.tensor([sampler.pick(LOGITS) for _ in range(4000)]), minlength=5) / 4000
    torch.testing.assert_close(count, torch.softmax(LOGITS * 2, -1), atol=0.03, rtol=0)


def test_a_seed_gives_the_same_draws() -> None:
    def draws(seed: int) -> list[int]:
        sampler = Sampler(Sampling(temperature=1.0, seed=seed))
        return [sampler.pick(LOGITS) for _ in range(50)]

    assert draws(1) == draws(1) != draws(2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.1}, "temperature is -0.1"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.1}, "top_p is 1.1"),
    ],
)
def test_options_out_of_range(options: dict[str, float], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Sampling(**options)  # type: ignore[arg-type]
