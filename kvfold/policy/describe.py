"""The language described from its registry: rows for the command line, and the table of docs/policy.md.

`python -m kvfold.policy.describe` rewrites the table between its two marker comments.
"""

from __future__ import annotations

from collections.abc import Iterable
from inspect import cleandoc
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from kvfold.policy.bind import arguments_text
from kvfold.policy.parts import Stage
from kvfold.policy.registry import AXES, NAMES, Registration, load_variants, term_of, terms
from kvfold.policy.text import plan_text, term_text

if TYPE_CHECKING:
    from kvfold.policy.policy import Policy


BEGIN = "<!-- terms: begin; written by `python -m kvfold.policy.describe` -->"
END = "<!-- terms: end -->"
PAGE = Path("docs/policy.md")
_NO_REUSE = "Judges by the end of the prompt: no prefix is reused."
_HEADINGS = ("axis", "term", "arguments and defaults", "cost", "paper", "what it does", "against its paper")


class Row(NamedTuple):
    """One term, as people read it; the default of an axis is marked."""

    axis: str
    name: str
    arguments: str
    cost: str
    paper: str
    summary: str
    published: str
    revision: int
    is_default: bool


def rows() -> tuple[Row, ...]:
    """All terms in the order of axis and name."""
    load_variants()
    return tuple(_row(term) for axis in AXES for term in terms(axis))


def _row(term: Registration) -> Row:
    is_default = NAMES.get(term.axis) == term.name
    text = arguments_text(term)
    judges_by_end = term.axis == "score" and term.variant().needs.judges_by_end
    summary = f"{term.summary} {_NO_REUSE}" if judges_by_end else term.summary
    facts = (text, term.cost, term.paper, summary, term.published)
    return Row(term.axis, term.name, *facts, term.revision, is_default)


def about(term: Registration) -> dict[str, str]:
    """What a term is, with the whole docstring of its class; facts that it has not are left out."""
    row = _row(term)
    facts = {
        "term": row.name,
        "axis": row.axis,
        "arguments": row.arguments,
        "cost": row.cost,
        "paper": row.paper,
        "against its paper": row.published,
        "about": cleandoc(term.variant.__doc__ or ""),
    }
    return {name: text for name, text in facts.items() if text}


def table() -> str:
    """A Markdown table of all terms."""
    lines = [_line(_HEADINGS), _line("---" for _ in _HEADINGS)]
    for row in rows():
        name = f"**`{row.name}`**" if row.is_default else f"`{row.name}`"
        arguments = f"`{row.arguments}`" if row.arguments else ""
        lines.append(_line((row.axis, name, arguments, row.cost, _link(row.paper), row.summary, row.published)))
    return "\n".join(lines)


def with_table(page: str) -> str:
    """The page with the part between the markers written anew."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


def main() -> None:
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |"


def _link(paper: str) -> str:
    number = paper.removeprefix("arXiv:")
    return f"[{paper}](https://arxiv.org/abs/{number})" if number != paper else paper


if __name__ == "__main__":
    main()


def explain(policy: Policy) -> dict[str, str]:
    """Phase or axis -> what happens."""
    return {
        "prefill": _phase(policy.prefill),
        "decode": _phase(policy.decode),
        "codec": _codec(policy),
        "position": term_of(policy.position).summary,
        "attend": term_of(policy.attend).summary,
        "layers": term_of(policy.token_pruning).summary,
    }


def _phase(stage: Stage) -> str:
    if stage.size is None:
        return "everything is kept"
    name, summary = term_of(stage.when).name, term_of(stage.when).summary
    if not stage.when.can_fire:
        return f"nothing is evicted ({name}): {summary}"
    scored, shared = term_text(stage.score, False), term_text(stage.budget, False)
    stays, rest = term_text(stage.protect, True), term_text(stage.evicted, False)
    return (
        f"{name}: {summary} Slots are scored by {scored} and shared out by {shared} down to {stage.size}; "
        f"{stays} always stays, the rest goes to {rest}"
    )


def _codec(policy: Policy) -> str:
    plan = policy.codec
    where = "all layers" if plan.layers.is_all else f"layers {plan.layers}, the others native"
    losses = {codec.lossless for codec in plan.codecs}
    return f"{plan_text(plan, True)} on {where}; {'lossless' if losses == {True} else 'lossy'}"
