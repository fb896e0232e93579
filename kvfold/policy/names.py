"""What the axes and their terms are called in a sentence, and what to say about a name that is none of them."""

from __future__ import annotations

from difflib import get_close_matches

from kvfold.errors import PolicyError
from kvfold.policy.registry import AXES, Term, terms

_NOUNS = {
    "score": ("score", "scores"),
    "budget": ("budget", "budgets"),
    "size": ("size", "sizes"),
    "when": ("trigger", "triggers"),
    "protect": ("protection", "protections"),
    "evicted": ("treatment of evicted slots", "treatments of evicted slots"),
    "position": ("position", "positions"),
    "codec": ("codec", "codecs"),
    "attend": ("reader", "readers"),
    "prefill": ("way to prefill", "ways to prefill"),
}


def noun(axis: str) -> str:
    return _NOUNS[axis][0]


def nouns(axis: str) -> str:
    return _NOUNS[axis][1]


def listing(axis: str) -> str:
    """`codecs: bf16, fp8, ...`"""
    return f"{nouns(axis)}: {', '.join(term.name for term in terms(axis))}"


def unknown_name(name: str, axis: str | None = None) -> PolicyError:
    """The nearest names, then those of the axis if it is known or can be guessed, else all, grouped."""
    near = _nearest(name, terms(axis))
    if axis is None and near:
        axis = near[0].axis
    hint = f"did you mean {_either([term.name for term in near])}? " if near else ""
    known = listing(axis) if axis else "; ".join(listing(each) for each in AXES if terms(each))
    return PolicyError(f'no {noun(axis) if axis else "term"} "{name}"; {hint}{known}')


def _nearest(name: str, among: tuple[Term, ...]) -> list[Term]:
    by_name = {term.name: term for term in among}
    return [by_name[close] for close in get_close_matches(name.lower(), by_name, n=3, cutoff=0.6)]


def _either(names: list[str]) -> str:
    return " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))
