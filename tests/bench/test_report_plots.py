"""Axes, lines, markers and heat maps: what is drawn stands where its numbers say."""

from __future__ import annotations

import pytest

from kvfold.bench.report.cells import Point
from kvfold.bench.report.charts import BASE, TOP, Axis, bars, plot, spread, y
from kvfold.bench.report.markup import (
    bytes_text,
    counted,
    difference_text,
    listed,
    percent_text,
    score_text,
    shortened,
    styles_of,
    tag,
)
from kvfold.bench.report.tables import depth_of, heat_map
from kvfold.bench.statistics import Estimate
from tests.bench.report_runs import Elements, row

POLICIES = [f"policy_{i}" for i in range(49)]


def _points(*places: tuple[str, float, float]) -> list[Point]:
    return [Point(policy, "25%", share, Estimate(mean, mean - 0.1, mean + 0.1, 9)) for policy, share, mean in places]


def test_halving_is_the_same_step_everywhere() -> None:
    axis = Axis([0.06, 1.01])
    steps = [axis.x(2 * share) - axis.x(share) for share in (0.0625, 0.1, 0.25, 0.5)]
    assert steps == pytest.approx([steps[0]] * 4) and steps[0] < 0  # fewer bytes stand further right
    assert axis.ticks == [1.0, 0.5, 0.25, 0.125, 0.0625]


def test_an_axis_without_points_still_has_ticks() -> None:
    assert Axis([]).ticks == [1.0, 0.5, 0.25]


def test_long_axes_leave_labels_out() -> None:
    assert len(Axis([2.0**-20]).ticks) <= 8


def test_scores_go_from_base_to_top() -> None:
    assert (y(0.0), y(1.0)) == (BASE, TOP)


def test_a_plot_has_a_line_and_a_band_of_each_policy_and_rings_on_the_front() -> None:
    found = _points(("a", 0.25, 0.5), ("a", 0.5, 0.8), ("b", 0.25, 0.4))
    axis = Axis([0.25, 0.5])
    elements = Elements(plot(found, axis, styles_of(["a", "b"]), "a title"))
    classes = elements.values("path", "class")
    assert classes.count("line") == 2 and classes.count("band") == 1  # one point has no band
    names = [found["y"] for name, found in elements.tags if name == "text" and found.get("class") == "name"]
    assert len(names) == 2 and len(set(names)) == 2
    rings = [(found["cx"], found["cy"]) for name, found in elements.tags if name == "circle"]
    assert rings == [
        (f"{axis.x(s):.1f}".removesuffix(".0"), f"{y(m):.1f}".removesuffix(".0")) for s, m in ((0.25, 0.5), (0.5, 0.8))
    ]
    assert "a in 25%: 50.0 (40.0 to 60.0), 25% of the bytes, 9 samples" in elements.text


def test_policies_are_told_apart_without_colours() -> None:
    made = list(styles_of(POLICIES).values())
    assert len({(style.colour, style.shape) for style in made}) == len(made)
    assert len({(style.shape, style.dash) for style in made[:15]}) == 15


def test_a_policy_named_full_is_drawn_in_ink() -> None:
    assert styles_of(["full", "a"])["full"].colour == "var(--ink)" and list(styles_of(["a", "full"])) == ["full", "a"]


@pytest.mark.parametrize(("depth", "band"), [(0, 0), (0.05, 0), (0.1, 1), (0.95, 9), (1, 9)])
def test_depths_fall_into_ten_bands(depth: float, band: int) -> None:
    found = heat_map([row("full", "100%", 0.5, facts={"depth": depth})], "known", styles_of(["full"]))
    assert [means for means in found.rows if means != [None]] == [[0.5]] and found.rows[band] == [0.5]


@pytest.mark.parametrize("depth", [None, "deep", -0.1, 1.1, float("nan")])
def test_what_is_no_depth_has_no_place(depth: object) -> None:
    assert depth_of(row("full", "100%", 0.5, facts={"depth": depth})) is None


def test_rows_without_a_score_have_no_place() -> None:
    assert depth_of(row("full", "100%", None, facts={"depth": 0.5})) is None


def test_heat_maps_have_a_column_of_each_policy_and_length_and_hold_means() -> None:
    places = [("a", 1000, 0.0, 1.0), ("a", 1000, 0.05, 0.5), ("a", 4000, 1.0, 0.0), ("full", 1000, 0.0, 1.0)]
    rows = [row(p, "100%", score, length=n, facts={"depth": depth}) for p, n, depth, score in places]
    found = heat_map(rows, "known", styles_of(["full", "a", "b"]))
    assert len(found.policies) == 2 and list(found.lengths) == ["1k", "4k"]
    assert found.rows[0] == [1.0, None, 0.75, None] and found.rows[9] == [None, None, None, 0.0]


def test_labels_move_apart_and_stay_inside() -> None:
    assert spread([10, 11, 50], 10, 0, 100) == [10, 20, 50]
    assert spread([95, 96, 97], 10, 0, 100) == [80, 90, 100]


def test_a_label_is_no_longer_than_its_room() -> None:
    assert shortened("snapkv + ada", 12) == "snapkv + ada" and shortened("snapkv + ada", 8) == "snapkv …"


def test_bars_are_as_long_as_their_values() -> None:
    elements = Elements(bars([("a", 10.0, "10 B"), ("b", 5.0, "5 B")], styles_of(["a", "b"]), "a title"))
    wide, half = (float(width) for width in elements.values("rect", "width"))
    assert wide == 2 * half > 0 and "10 B" in elements.text


def test_numbers_in_words() -> None:
    assert [bytes_text(n) for n in (0, 999, 1000, 23_547_840, 5e10)] == ["0 B", "999 B", "1 kB", "23.5 MB", "50 GB"]
    assert [percent_text(s) for s in (1.02, 0.9999, 0.125, 0.03125)] == ["102%", "100%", "12.5%", "3.12%"]
    assert [listed(["a", "b", "c"][:n]) for n in range(4)] == ["", "a", "a and b", "a, b and c"]
    assert [counted(n, "row") for n in (1, 0, 1200)] == ["1 row", "0 rows", "1,200 rows"]
    assert score_text(Estimate(0.7125, 0.6, 0.8, 9)) == "71.2 <small>60–80</small>"
    assert "−12.9 <small>−16 to −9</small>" in difference_text(Estimate(-0.129, -0.16, -0.09, 9))


def test_a_difference_that_may_be_chance_is_grey() -> None:
    assert 'class="chance"' in difference_text(Estimate(-0.1, -0.2, 0.0, 9))
    assert "class" not in difference_text(Estimate(-0.1, -0.2, -0.01, 9))
    assert "0.0 <small>0 to 0" in difference_text(Estimate(-0.0001, -0.001, 0.001, 9))


def test_markup_escapes_content_and_attributes() -> None:
    assert tag("p", "a < b", title='"<', data_x=True, hidden=False) == '<p title="&#34;&lt;" data-x>a &lt; b</p>'
