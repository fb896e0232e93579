"""English verbs by which statements are compared: those of one value at a time, and those of many.

Who lives in Paris no longer lives in Berlin; who likes tea may like coffee, too.
"""

from __future__ import annotations

from kvfold.shortening.word_index import words_of

_ONE_VALUE = {
    "be": "am is are was were be been being became becomes become",
    "live": "live lives lived living reside resides resided residing moved move moves moving relocated relocate based",
    "work": "work works worked working joined employed",
    "call": "called named nicknamed",
    "cost": "cost costs costing",
    "weigh": "weigh weighs weighed",
    "drive": "drive drives drove driving",
    "start": "start starts started begin begins began",
    "end": "end ends ended finish finishes finished",
    "open": "open opens opened",
    "close": "close closes closed",
    "meet": "meets takes scheduled set due",
    "belong": "belong belongs belonged",
    "report": "report reports reported",
    "lead": "lead leads led leading manage manages managed",
    "sit": "sit sits sat sitting stands",
    "prefer": "prefer prefers preferred",
    "earn": "earn earns earned",
    "study": "study studies studied studying attend attends attended attending",
    "leave": "leaves departs depart",
    "arrive": "arrive arrives arriving",
    "expire": "expire expires expired",
    "change": "changed changes change switched turned renamed",
}
_MANY_VALUES = {
    "like": "like likes liked love loves loved enjoy enjoys enjoyed adore adores",
    "hate": "hate hates hated dislike dislikes disliked",
    "have": "have has had own owns owned keep keeps kept",
    "visit": "visit visits visited saw seen see sees met",
    "buy": "buy buys bought",
    "read": "read reads reading",
    "speak": "speak speaks spoke speaking",
    "use": "use uses using",
    "eat": "eat eats ate eating drink drinks drank drinking",
    "play": "play plays played playing",
    "want": "want wants wanted need needs needed plan plans planned",
    "know": "know knows knew",
    "learn": "learn learns learned learnt learning teach teaches taught",
    "collect": "collect collects collected",
}
_NOUNS = {  # by which one asks for what a verb states
    "call": "name nickname",
    "live": "home city town address",
    "work": "job employer company",
    "cost": "price",
    "study": "school university",
}
CHANGE = "change"  # matches whatever had one value
AUXILIARIES = frozenset({"am", "is", "are", "was", "were", "be", "been", "has", "have", "had"})
PARTICIPLES = frozenset(["called", "named", "nicknamed", "based", "employed", "scheduled", "set", "due", "renamed"])
HELPERS = frozenset({"do", "does", "did", "will", "would", "can", "could", "should", "must", "may", "might", "used"})
FAMILY_OF = {
    form: name for group in (_ONE_VALUE, _MANY_VALUES) for name, forms in group.items() for form in forms.split()
}
HAS_MANY_VALUES = frozenset(_MANY_VALUES)
_EXPANDED = {name: tuple(dict.fromkeys(words_of(forms))) for name, forms in {**_ONE_VALUE, **_MANY_VALUES}.items()}
_FAMILY_OF_WORD = {word: name for name, words in _EXPANDED.items() for word in words}
_FAMILY_OF_WORD |= {noun: name for name, nouns in _NOUNS.items() for noun in words_of(nouns)}


def verb_forms(word: str) -> tuple[str, ...]:
    """The words of `words_of` that mean the same as one: a question where somebody lives finds who moved."""
    name = _FAMILY_OF_WORD.get(word, "be")
    return (word,) if name in ("be", CHANGE) else (word, *(form for form in _EXPANDED[name] if form != word))
