"""Elements, numbers and names as markup. What models write stands in the page: `tag` and the template escape every
plain string, and only `Markup` is nested as it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup, escape

from kvfold.bench.report.merge import FULL
from kvfold.bench.statistics import Estimate

Attribute = str | int | float | bool | None
NUM_COLOURS = 7  # --c0 to --c6 of the stylesheet
_DASHES = (None, "5 3", "2 2", "7 2 2 2")
_SHAPES = {  # paths around the origin, about 8 units wide
    "circle": "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0Z",
    "square": "M-3.6-3.6h7.2v7.2h-7.2Z",
    "triangle": "M0-4.8L4.4 3.4H-4.4Z",
    "diamond": "M0-5L4.6 0L0 5L-4.6 0Z",
    "wedge": "M0 4.8L4.4-3.4H-4.4Z",
    "cross": "M-1.4-4.4h2.8v3h3v2.8h-3v3h-2.8v-3h-3v-2.8h3Z",
    "bar": "M-4.8-2h9.6v4h-9.6Z",
}
_FULL_SHAPE = "M-4.6 0a4.6 4.6 0 1 0 9.2 0a4.6 4.6 0 1 0-9.2 0ZM-2.2 0a2.2 2.2 0 1 0 4.4 0a2.2 2.2 0 1 0-4.4 0Z"


def tag(name: str, /, *content: str, **attributes: Attribute) -> Markup:
    """`class_` writes class, `data_scope` data-scope; True writes a bare attribute, None and False none."""
    opening = "".join(_attribute(key, value) for key, value in attributes.items())
    return Markup(f"<{name}{opening}>{Markup('').join(content)}</{name}>")


def _attribute(key: str, value: Attribute) -> str:
    name = key.rstrip("_").replace("_", "-")
    if value is None or value is False:
        return ""
    if value is True:
        return f" {name}"
    # Tenths are as fine as a screen shows.
    shown = f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else str(value)
    return f' {name}="{escape(shown)}"'


@dataclass(frozen=True)
class PolicyStyle:
    """Colour, marker and dash of a policy in all figures, readable without colour vision.

    Colours are those of Okabe and Ito (2008), which people with any kind of colour vision tell apart; the stylesheet
    has a lighter set for dark screens. Seven colours times seven markers never repeat before the fiftieth policy.
    `number` names the policy in attributes: expressions hold characters that selectors would have to quote.
    """

    number: int
    colour: str
    shape: str
    dash: str | None

    def marker(self, x: float, y: float, *content: str, **attributes: Attribute) -> Markup:
        place = f"translate({x:.1f} {y:.1f})"
        look: dict[str, Any] = {"transform": place, "fill": self.colour, "fill_rule": "evenodd", **attributes}
        return tag("path", *content, d=self.shape, **look)

    def icon(self) -> Markup:
        """The marker on a stroke of its line, for words that name the policy."""
        stroke = tag("path", d="M0 6H22", stroke=self.colour, stroke_width=2, stroke_dasharray=self.dash)
        return tag("svg", stroke, self.marker(11, 6), viewBox="0 0 22 12", class_="icon", aria_hidden="true")


Styles = Mapping[str, PolicyStyle]


def styles_of(policies: Sequence[str]) -> dict[str, PolicyStyle]:
    """The full cache is a ring in the colour of the text."""
    made = {FULL: PolicyStyle(0, "var(--ink)", _FULL_SHAPE, None)}
    shapes = list(_SHAPES.values())
    for number, policy in enumerate(policy for policy in policies if policy != FULL):
        turn, place = divmod(number, NUM_COLOURS)
        shape, dash = shapes[(place + turn) % len(shapes)], _DASHES[turn % len(_DASHES)]
        made[policy] = PolicyStyle(number + 1, f"var(--c{place})", shape, dash)
    return made


def named(policy: str, styles: Styles) -> Markup:
    """A policy with its marker."""
    return tag("span", styles[policy].icon(), tag("code", policy), class_="named")


def score_text(score: Estimate) -> Markup:
    """71.3 with the interval beside it, smaller."""
    interval = f"{100 * score.low:.0f}–{100 * score.high:.0f}"
    return Markup("{} {}").format(f"{100 * score.mean:.1f}", tag("small", interval))


def difference_text(difference: Estimate) -> Markup:
    """A difference that zero lies within is set in grey: it may be chance."""
    interval = tag("small", f"{_signed(difference.low, 0)} to {_signed(difference.high, 0)}")
    kind = None if difference.excludes_zero else "chance"
    return tag("span", f"{_signed(difference.mean, 1)} ", interval, class_=kind)


def _signed(difference: float, digits: int) -> str:
    """Of 100, with a minus as wide as the plus; what rounds to zero has no sign."""
    shown = f"{100 * difference:+.{digits}f}"
    return shown[1:] if float(shown) == 0 else shown.replace("-", "−")


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


def tokens_text(length: int) -> str:
    return f"{length / 1000:.3g}k" if length >= 1000 else str(length)


def counted(number: int, noun: str) -> str:
    """1 sample, 2 samples, 1,200 samples."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def listed(words: Sequence[str]) -> str:
    """a, b and c."""
    return " and ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else "".join(words)


def shortened(words: str, most: int) -> str:
    return words if len(words) <= most else f"{words[: most - 1]}…"
