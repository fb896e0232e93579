"""Sampling: greedy at temperature 0, cut-offs, and seeds that give the same draws."""

from __future__ import annotations

import math

import pytest
import torch

from kvfold.engine.sampling import NO_TOKEN, Sampler, Sampling, next_tokens
from kvfold.errors import InputError, LogitsError

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


def test_rows_of_a_batch_draw_as_they_do_alone() -> None:
    """Greedy, drawn and cut rows in one call, several steps; a broken row is told without the others."""
    given = [Sampling(), Sampling(1.0, seed=1), Sampling(0.7, top_k=3, seed=2), Sampling(2.0, top_p=0.6, seed=1)]
    logits_SNV = 3 * torch.randn(30, len(given), 200, generator=torch.Generator().manual_seed(0))
    together, alone = [Sampler(one) for one in given], [Sampler(one) for one in given]
    for logits_NV in logits_SNV:
        expected = [sampler.pick(logits_V) for sampler, logits_V in zip(alone, logits_NV, strict=True)]
        assert next_tokens(logits_NV, together) == expected
    logits_SNV[0, 2] = math.nan
    found = next_tokens(logits_SNV[0], together)
    assert found[2] == NO_TOKEN and NO_TOKEN not in (found[0], found[1], found[3])


MASKED = LOGITS.index_fill(0, torch.tensor([0]), -torch.inf)  # a token that the model rules out


@pytest.mark.parametrize("logits_V", [LOGITS, 1e4 * LOGITS, MASKED, torch.full((5,), 3e38) * LOGITS.exp()])
@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-45, 1e-40, 1e-38, 1e-30])
def test_temperatures_next_to_zero_are_greedy(logits_V: torch.Tensor, temperature: float) -> None:
    for options in ({}, {"top_p": 0.9}, {"top_k": 3, "top_p": 1e-300}):
        sampler = Sampler(Sampling(temperature, **options))  # type: ignore[arg-type]
        assert {sampler.pick(logits_V) for _ in range(20)} == {1}


@pytest.mark.parametrize("temperature", [1e37, 1e38, 1e300, 1.7e308])
def test_huge_temperatures_leave_all_tokens_equally_likely(temperature: float) -> None:
    assert drawn(temperature=temperature) == {0, 1, 2, 3, 4}
    sampler = Sampler(Sampling(temperature))
    assert {sampler.pick(MASKED) for _ in range(400)} == {1, 2, 3, 4}


@pytest.mark.parametrize("top_p", [5e-324, 1e-300, 1e-46, 1e-10])
def test_a_tiny_share_keeps_the_likeliest(top_p: float) -> None:
    assert drawn(temperature=1.0, top_p=top_p) == {1}


@pytest.mark.parametrize("temperature", [0.0, 1e-40, 1.0])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_of_a_broken_model_are_refused(temperature: float, bad: float) -> None:
    broken_V = LOGITS.index_fill(0, torch.tensor([2]), bad)
    for logits_V in (broken_V, torch.full((5,), -torch.inf)):
        with pytest.raises(LogitsError, match="NaN or infinite"):
            Sampler(Sampling(temperature)).pick(logits_V)
        with pytest.raises(LogitsError):
            list(Sampler(Sampling(temperature)).picks(logits_V.unsqueeze(0)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.1}, "temperature is -0.1"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"temperature": math.inf}, "temperature is inf"),
        ({"top_p": math.nan}, "top_p is nan"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.1}, "top_p is 1.1"),
    ],
)
def test_options_out_of_range(options: dict[str, float], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Sampling(**options)  # type: ignore[arg-type]
