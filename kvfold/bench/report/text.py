"""Text formats of numbers and names, the same in every table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvfold.bench.report.html import Html, join, tag, text
from kvfold.bench.report.policy_style import PolicyStyle
from kvfold.bench.statistics import Estimate

ASKED = {"known": "Question known while compressing", "unknown": "Question not yet known"}


def score_text(score: Estimate) -> Html:
    """71.3 with the interval beside it, smaller."""
    interval = f"{100 * score.low:.0f}–{100 * score.high:.0f}"
    return join([text(f"{100 * score.mean:.1f} "), tag("small", text(interval))])


def difference_text(difference: Estimate) -> Html:
    """A difference that zero lies within is set in grey: it may be chance."""
    interval = f"{_signed(difference.low, 0)} to {_signed(difference.high, 0)}"
    content = join([text(f"{_signed(difference.mean, 1)} "), tag("small", text(interval))])
    return tag("span", content, class_=None if difference.excludes_zero else "chance")


def _signed(difference: float, digits: int) -> str:
    """Of 100, with a minus as wide as the plus; what rounds to zero has no sign."""
    shown = f"{100 * difference:+.{digits}f}"
    return shown[1:] if float(shown) == 0 else shown.replace("-", "−")


def named(policy: str, styles: Mapping[str, PolicyStyle]) -> Html:
    """A policy with its marker."""
    return tag("span", styles[policy].icon(), tag("code", text(policy)), class_="named")


def percent_text(share: float) -> str:
    """Three digits: 102%, 12.5%, 3.12%."""
    return f"{100 * share:.3g}%" if share < 0.9995 else f"{100 * share:.0f}%"


def bytes_text(number: float) -> str:
    """23547840 is 23.5 MB; units are decimal."""
    for unit in ("B", "kB", "MB"):
        if number < 999.5:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} GB"


def counted(number: int, noun: str) -> str:
    """1 sample, 2 samples, 1,200 samples."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def listed(words: Sequence[str]) -> str:
    """a, b and c."""
    return " and ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else "".join(words)
