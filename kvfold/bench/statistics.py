"""Bootstrap confidence intervals, paired differences, and rankings with ties.

Percentile bootstrap (Efron 1979): draw as many samples as there are, with replacement, many times; the middle 95 % of
the means so drawn is the interval. Policies are compared on the same samples, and a draw takes the same samples of
both: how hard a sample is then cancels out. Nothing corrects for what the method cannot see: samples that are all alike
have an interval of no width, and that of 5 normal samples holds the true mean about 83 times in 100 (a test counts).

    B resamples   N samples
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from kvfold.errors import InputError

RESAMPLES = 2000
_MIDDLE = (2.5, 97.5)  # percentiles
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Estimate:
    """A mean and its 95 % interval."""

    mean: float
    low: float
    high: float
    num_samples: int

    @property
    def excludes_zero(self) -> bool:
        """Of a difference: whether it is significant."""
        return self.low > 0 or self.high < 0


@dataclass(frozen=True)
class Rank:
    """One place of a ranking; `tied`: the names whose difference to this one is not significant, best first."""

    name: str
    estimate: Estimate
    tied: tuple[str, ...]


def mean_interval(samples: Sequence[float], *, resamples: int = RESAMPLES, seed: int = 0) -> Estimate:
    """The mean of independent samples."""
    values_N = _values("samples", samples)
    return _estimate(values_N, _drawn_means(values_N, _draws(len(values_N), resamples, seed)))


def paired_difference(
    samples: Sequence[float], baseline: Sequence[float], *, resamples: int = RESAMPLES, seed: int = 0
) -> Estimate:
    """The mean of samples[i] - baseline[i]: above zero where the samples are better."""
    pair = _aligned({"samples": samples, "baseline": baseline})
    return mean_interval((pair["samples"] - pair["baseline"]).tolist(), resamples=resamples, seed=seed)


def ranked(scores: Mapping[str, Sequence[float]], *, resamples: int = RESAMPLES, seed: int = 0) -> tuple[Rank, ...]:
    """Names by mean, highest first, all scored on the same samples; names of equal mean in the order they came.

    Each pair is judged by its own 95 % interval: of pairs that are equal in truth, about one in twenty is told apart.
    """
    values = _aligned(scores)
    draws_BN = _draws(len(next(iter(values.values()))), resamples, seed)
    means = {name: _drawn_means(values_N, draws_BN) for name, values_N in values.items()}
    order = sorted(values, key=lambda name: -float(values[name].mean()))
    ties: dict[str, list[str]] = {name: [] for name in order}
    for upper, lower in combinations(order, 2):
        if not _estimate(values[upper] - values[lower], means[upper] - means[lower]).excludes_zero:
            ties[upper].append(lower)
            ties[lower].append(upper)
    places = {name: index for index, name in enumerate(order)}
    return tuple(
        Rank(name, _estimate(values[name], means[name]), tuple(sorted(ties[name], key=places.__getitem__)))
        for name in order
    )


def _draws(num_samples: int, resamples: int, seed: int) -> NDArray[np.int64]:
    """Indices [B, N] of the samples that each resample takes."""
    if resamples < 1:
        raise InputError(f"{resamples} resamples give no interval; take 1 or more, {RESAMPLES} as a rule")
    return np.random.default_rng(seed).integers(0, num_samples, (resamples, num_samples))


def _drawn_means(values_N: Floats, draws_BN: NDArray[np.int64]) -> Floats:
    means_B: Floats = values_N[draws_BN].mean(axis=1)
    return means_B


def _estimate(values_N: Floats, means_B: Floats) -> Estimate:
    low, high = np.percentile(means_B, _MIDDLE)
    return Estimate(float(values_N.mean()), float(low), float(high), len(values_N))


def _values(name: str, samples: Sequence[float]) -> Floats:
    values_N = np.asarray(samples, dtype=np.float64)
    if len(values_N) < 2:
        raise InputError(f"{name} holds {len(values_N)} of the 2 or more samples that an interval needs; give more")
    if not np.isfinite(values_N).all():
        raise InputError(f"{name} holds a sample that is no finite number; leave out what could not be scored")
    return values_N


def _aligned(scores: Mapping[str, Sequence[float]]) -> dict[str, Floats]:
    if not scores:
        raise InputError("there are no scores to compare; give those of one name or more")
    found = {name: _values(name, samples) for name, samples in scores.items()}
    lens = {name: len(values_N) for name, values_N in found.items()}
    if len(set(lens.values())) > 1:
        told = ", ".join(f"{name} {length}" for name, length in lens.items())
        raise InputError(f"numbers of samples differ ({told}); compare scores of the same samples in the same order")
    return found
