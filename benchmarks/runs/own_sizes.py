"""Does a policy that decides its own size need fewer bytes than any fixed size at the same score?

    kvfold bench --policies "kvzip + global, kvzip + adaptive(loss=0.02, window=none)" --memory 50%,25%,own --out RUN …
    python -m benchmarks.runs own_sizes RUN --fixed "kvzip + global" [--by kl]

Fixed sizes make a curve of score over bytes that ends at the full cache; they may also be policies with sizes of their
own, `--fixed "kvzip + global + 4x" "kvzip + global + 8x"`, which spares the run looking for them. Every other policy of
the memory `own` is compared with the curve twice: at the same bytes, what it scores more, and at the same score, how
many times its bytes the curve takes.
All workloads count the same. Between two sizes the curve is straight, sample by sample, so that differences are paired;
their interval is a bootstrap of samples. `--by kl` compares divergence from the full cache, where the run has it of
every sample. Prints a table and one line of JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean

from benchmarks.commands import argument_parser
from kvfold.bench.record import MODES, OWN, Mode, Recorded, Row, read_run
from kvfold.bench.report.cells import weighted
from kvfold.bench.report.merge import FULL, Sample, sample_of
from kvfold.bench.statistics import Estimate, paired_difference
from kvfold.errors import InputError

Values = Mapping[Sample, float]


@dataclass(frozen=True)
class Point:
    """One policy in one memory: bytes as a share of the full cache's, and what is the more the better."""

    policy: str
    memory: str
    shares: Values
    values: Values

    def share(self, samples: Sequence[Sample]) -> float:
        return fmean(weighted(self.shares, samples))

    def value(self, samples: Sequence[Sample]) -> float:
        return fmean(weighted(self.values, samples))


@dataclass(frozen=True)
class Compared:
    """A policy beside the curve; None where the curve does not reach that far."""

    mode: Mode
    policy: str
    num_samples: int
    share: float
    value: float
    gain: Estimate | None  # at the same bytes
    times_bytes: float | None  # of the curve at the same value


def compare(recorded: Recorded, fixed: Sequence[str], by: str) -> list[Compared]:
    """Every other policy of the memory `own`, in every mode, on the samples that all have."""
    found = []
    for mode in MODES:
        points = points_of([row for row in recorded.rows if row.mode == mode], by)
        curve = [point for point in points if point.policy in (*fixed, FULL)]
        own = [point for point in points if point.memory == OWN and point.policy not in fixed]
        if len(curve) < 2 or not own:
            continue
        samples = [sample for sample in own[0].values if all(sample in point.values for point in (*curve, *own))]
        curve.sort(key=lambda point: point.share(samples))
        found += [_compared(mode, point, curve, samples) for point in own]
    if not found:
        raise InputError(f"the run has no policy in the memory {OWN} beside sizes of {', '.join(fixed)}")
    return found


def points_of(rows: Sequence[Row], by: str) -> list[Point]:
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row.score is not None and (by == "score" or row.kl is not None):
            groups.setdefault((row.policy, row.memory), []).append(row)
    return [
        Point(
            *key,
            {sample_of(row): row.resident_bytes / row.full_bytes for row in members},
            {sample_of(row): (row.score or 0.0) if by == "score" else -(row.kl or 0.0) for row in members},
        )
        for key, members in groups.items()
    ]


def _compared(mode: Mode, point: Point, curve: Sequence[Point], samples: Sequence[Sample]) -> Compared:
    share, value = point.share(samples), point.value(samples)
    return Compared(
        mode, point.policy, len(samples), share, value, _gain(point, curve, samples), _times(point, curve, samples)
    )


def _gain(point: Point, curve: Sequence[Point], samples: Sequence[Sample]) -> Estimate | None:
    share = point.share(samples)
    for below, above in pairwise(curve):
        low, high = below.share(samples), above.share(samples)
        if low <= share <= high and low < high:
            part = (share - low) / (high - low)
            straight = {s: (1 - part) * below.values[s] + part * above.values[s] for s in samples}
            return paired_difference(weighted(point.values, samples), weighted(straight, samples))
    return None


def _times(point: Point, curve: Sequence[Point], samples: Sequence[Sample]) -> float | None:
    """Where the curve first comes to the same value."""
    share, value = point.share(samples), point.value(samples)
    for below, above in pairwise(curve):
        low, high = below.value(samples), above.value(samples)
        if low <= value <= high and low < high:
            part = (value - low) / (high - low)
            return ((1 - part) * below.share(samples) + part * above.share(samples)) / share
    return None


def _line(found: Compared, scale: float) -> str:
    gain = "outside"
    if found.gain is not None:
        mean, low, high = (scale * value for value in (found.gain.mean, found.gain.low, found.gain.high))
        gain = f"{mean:+.2f} [{low:+.2f}, {high:+.2f}]"
    times = "outside" if found.times_bytes is None else f"{found.times_bytes:.2f} x"
    numbers = f"{100 * found.share:6.1f} % {scale * found.value:8.2f} {gain:>24} {times:>8} {found.num_samples:5}"
    return f"{found.mode:8} {found.policy:56} {numbers}"


def main(arguments: Sequence[str]) -> None:
    parser = argument_parser("runs own_sizes", __doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of `kvfold bench`")
    parser.add_argument("--fixed", required=True, nargs="+", metavar="POLICY", help="whose sizes are the curve")
    parser.add_argument("--by", choices=("score", "kl"), default="score", help="default: %(default)s")
    args = parser.parse_args(arguments)
    recorded = read_run(args.run)
    found = compare(recorded, args.fixed, args.by)
    scale = 100.0 if args.by == "score" else 1.0
    value = "score" if args.by == "score" else "-KL"
    print(f"{'question':8} {'policy':56} {'bytes':>8} {value:>8} {'more at these bytes':>24} {'curve':>8} {'n':>5}")
    for each in found:
        print(_line(each, scale))
    about = {"commit": recorded.run.commit, "device": recorded.run.device, "model": recorded.run.model}
    print(json.dumps({**about, "fixed": args.fixed, "by": args.by, "rows": [asdict(each) for each in found]}))
