"""Quality against memory, question known and unknown side by side, for all workloads and for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvfold.bench.record import MODES
from kvfold.bench.report.cells import Scope
from kvfold.bench.report.html import Html, buttons, join, tag, text, view
from kvfold.bench.report.pareto import points
from kvfold.bench.report.plot import Axis, plot
from kvfold.bench.report.policy_style import PolicyStyle
from kvfold.bench.report.ranking import rankings
from kvfold.bench.report.text import ASKED, named


def quality(scopes: Sequence[Scope], styles: Mapping[str, PolicyStyle], group: str) -> Html:
    """Buttons, and for each scope both panels and the rankings; the first scope is shown."""
    names = [scope.name for scope in scopes]
    views = [view(group, scope.name, names[0], _panels(scope, styles), rankings(scope, styles)) for scope in scopes]
    return join([buttons(group, names, names[0]), _legend(styles), *views])


def _legend(styles: Mapping[str, PolicyStyle]) -> Html:
    """Pressing a policy hides it in the plots."""
    made = [
        tag("button", named(policy, styles), type="button", data_toggle=style.number, aria_pressed="true")
        for policy, style in styles.items()
    ]
    front = tag("span", tag("span", class_="dashes"), text("nothing scores more in fewer bytes"), class_="named")
    return tag("div", *made, front, class_="legend")


def _panels(scope: Scope, styles: Mapping[str, PolicyStyle]) -> Html:
    found = {mode: points(scope, mode) for mode in MODES if mode in scope.samples}
    axis = Axis([point.share for listed in found.values() for point in listed])
    titles = {mode: f"Score against bytes, {scope.name}, question {mode}; numbers are in the tables" for mode in found}
    panels = [
        tag("figure", tag("figcaption", text(ASKED[mode])), plot(listed, axis, styles, titles[mode]))
        for mode, listed in found.items()
    ]
    return tag("div", *panels, class_="panels")
