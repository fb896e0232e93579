"""Style of a policy in all plots: colour, marker and dash, readable without colour vision.

Colours are those of Okabe and Ito (2008), which people with any kind of colour vision tell apart; the stylesheet has a
lighter set for dark screens. Seven colours times seven markers never repeat before the fiftieth policy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvfold.bench.report.html import Html, tag
from kvfold.bench.report.merge import FULL

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


@dataclass(frozen=True)
class PolicyStyle:
    """`number` names the policy in attributes: expressions hold characters that selectors would have to quote."""

    number: int
    colour: str
    shape: str
    dash: str | None

    def marker(self, x: float, y: float, *content: Html) -> Html:
        place = f"translate({x:.1f} {y:.1f})"
        return tag("path", *content, d=self.shape, transform=place, fill=self.colour, fill_rule="evenodd")

    def icon(self) -> Html:
        """The marker on a stroke of its line, for words that name the policy."""
        stroke = tag("path", d="M0 6H22", stroke=self.colour, stroke_width=2, stroke_dasharray=self.dash)
        return tag("svg", stroke, self.marker(11, 6), viewBox="0 0 22 12", class_="icon", aria_hidden="true")


def styles(policies: Sequence[str]) -> dict[str, PolicyStyle]:
    """The full cache is a ring in the colour of the text."""
    made = {FULL: PolicyStyle(0, "var(--ink)", _FULL_SHAPE, None)}
    for number, policy in enumerate((policy for policy in policies if policy != FULL), 1):
        made[policy] = _look(number)
    return made


def _look(number: int) -> PolicyStyle:
    turn, place = divmod(number - 1, NUM_COLOURS)
    shape = list(_SHAPES.values())[(place + turn) % len(_SHAPES)]
    return PolicyStyle(number, f"var(--c{place})", shape, _DASHES[turn % len(_DASHES)])
