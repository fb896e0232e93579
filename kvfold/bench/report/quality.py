"""Quality against memory, question known and unknown side by side, for all workloads and for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvfold.bench.record import MODES
from kvfold.bench.report.cells import Scope
from kvfold.bench.report.html import Html, buttons, join, tag, text, view
from kvfold.bench.report.look import Look
from kvfold.bench.report.pareto import points
from kvfold.bench.report.plot import Axis, plot
from kvfold.bench.report.ranking import rankings
from kvfold.bench.report.words import ASKED, named


def quality(scopes: Sequence[Scope], looks: Mapping[str, Look], group: str) -> Html:
    """Buttons, and for each scope both panels and the rankings; the first scope is shown."""
    names = [scope.name for scope in scopes]
    views = [view(group, scope.name, names[0], _panels(scope, looks), rankings(scope, looks)) for scope in scopes]
    return join([buttons(group, names, names[0]), _legend(looks), *views])


def _legend(looks: Mapping[str, Look]) -> Html:
    """Pressing a policy hides it in the plots."""
    made = [
        tag("button", named(policy, looks), type="button", data_toggle=look.number, aria_pressed="true")
        for policy, look in looks.items()
    ]
    front = tag("span", tag("span", class_="dashes"), text("nothing scores more in fewer bytes"), class_="named")
    return tag("div", *made, front, class_="legend")


def _panels(scope: Scope, looks: Mapping[str, Look]) -> Html:
    found = {mode: points(scope, mode) for mode in MODES if mode in scope.samples}
    axis = Axis([point.share for listed in found.values() for point in listed])
    titles = {mode: f"Score against bytes, {scope.name}, question {mode}; numbers are in the tables" for mode in found}
    panels = [
        tag("figure", tag("figcaption", text(ASKED[mode])), plot(listed, axis, looks, titles[mode]))
        for mode, listed in found.items()
    ]
    return tag("div", *panels, class_="panels")
