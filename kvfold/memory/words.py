"""Words that say what a sentence is about: without articles, prepositions, auxiliaries and question words."""

from __future__ import annotations

from kvfold.shortening.word_index import words_of

_FUNCTION_WORDS = """
    a about after again all also am an and any anymore are as at be because been before being but by can could
    currently did do does doing don down during each few for from further had has have having he her here hers him his
    how i if in into is it its just longer me mine more most my no nor not now of off on once only or other our ours out
    over own please s same she should since so some still such t tell than that the their theirs them then there these
    they this those through to too under until up used very was we were what when where which while who whom whose why
    will with would you your yours ll ve re d m
"""
FUNCTION_WORDS = frozenset(words_of(_FUNCTION_WORDS))


def content_words(text: str) -> list[str]:
    """Lower-case words that are no function words, in their order; all words of a text that has no others."""
    words = words_of(text)
    return [word for word in words if word not in FUNCTION_WORDS] or words
