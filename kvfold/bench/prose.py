"""Word lists and general sentence patterns of the generated filler text; `haystack` fills them in.

Written for this project, so that a needle table can be made anywhere without a corpus. A quarter of the sentences hold
numbers (years, counts, prices, times, serial numbers of up to seven digits): a score that keeps whatever has a digit
finds no needle by that alone. Braces name a word list: a topic's own `{who}`, `{where}`, `{what}`, one of `WORDS`,
which all topics share, or one of `NUMBERS`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Topic:
    """Word lists and sentence patterns of one subject."""

    who: tuple[str, ...]
    where: tuple[str, ...]
    what: tuple[str, ...]
    patterns: tuple[str, ...]


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(","))


def _lines(text: str) -> tuple[str, ...]:
    return tuple(line.strip() for line in text.strip().splitlines())


def topic(who: str, where: str, what: str, patterns: str) -> Topic:
    return Topic(_words(who), _words(where), _words(what), _lines(patterns))


WORDS = {
    "name": _words(
        "Agnes, Bertil, Carmen, Dorota, Emil, Farida, Goran, Hanne, Ivo, Jorun, Kamal, Lucia, Matteo, Nadia, Oskar, "
        "Petra, Quentin, Rosa, Samir, Tilda, Ursula, Viktor, Wanda, Yusuf, Zora, Anselm, Brigid, Cyril, Delphine, Edda"
    ),
    "when": _words(
        "in early spring, before dawn, on market days, after the second bell, late in the autumn, around noon, "
        "on the last day of the month, during the long rains, in the week of the fair, towards evening, one winter, "
        "on a windless afternoon, at the turn of the year, when the snow had gone, halfway through the summer"
    ),
    "quality": _words(
        "narrow, patient, bumpy, bright, familiar, stubborn, quiet, weathered, careful, crooked, generous, plain, "
        "hollow, slow, delicate, sturdy, faded, curious, modest, restless"
    ),
    "colour": _words("grey, tan, dark green, pale blue, rust red, cream, copper, slate, yellow, chestnut"),
    "manner": _words(
        "without hurry, with great care, as if nothing had happened, by lamplight, to everyone's surprise, "
        "in complete silence, with borrowed tools, as their parents had done, for the first time, against all advice"
    ),
    "feeling": _words("relief, doubt, pride, amusement, regret, curiosity, impatience, gratitude, unease, delight"),
    "while": _words(
        "a whole season, the better part of a day, several weeks, longer than anyone had planned, only a moment, "
        "most of a lifetime, two generations, an afternoon"
    ),
}

ANY = _lines(
    """
    Nobody could say who had first thought of it, but {name} was usually given the credit.
    It took {while} before {who} agreed that the old way had been better.
    {name} wrote a short letter about {what} and never sent it.
    There are people who walk through {where} every day and have never looked up.
    What {name} remembered most was the {colour} light that fell over {where} {when}.
    The matter of {what} came up again {when}, and again it was put off.
    If anything held the place together, it was a {quality} kind of {feeling}.
    For {while}, {where} belonged to whoever arrived first.
    Some said that {what} mattered more than money, and {name} did not contradict them.
    {name} and {name2} disagreed about {what}, though both had learned it in {where}.
    A visitor would have noticed little more than {what} and a {quality} silence.
    The explanation that {who} gave was {quality} but not wrong.
    In the end the decision was taken {manner}, and {who} accepted it with {feeling}.
    Between {where} and the next village the road is {quality} and lined with {colour} stones.
    One learns to tell good {what} from bad by touch, {name} used to say.
    Much has been written about {what}; very little of it comes from {who}.
    With some {feeling}, {name2} admitted that {what} had been forgotten in {where}.
    The {quality} part is not the beginning but the third day, when {who} grow tired.
    A {colour} door, a {quality} bench and {what}: that was all the room contained.
    Things changed slowly in {where}, and mostly {when}.
    Even {name}, who trusted hardly anyone, asked {who} for help {when}.
    Two rules were painted over the entrance of {where}, and both concerned {what}.
    They had agreed to meet in {where}, but {name2} arrived {when} and found it closed.
    It is easy to laugh at {what} until one has to live without it.
    The report described {what} as {quality}, a word {who} had never used.
    {name} kept a {colour} notebook in which {what} was mentioned only once.
    Asked for a reason, {who} pointed at {where} and shrugged {manner}.
    Every few years somebody proposes to give up {what}, and every time {who} refuse.
    The first photograph of {where} shows {name} holding {what} {manner}.
    Whatever the weather, {who} came to {where} {when}.
    A child could have done it, {name2} claimed, and then spent {while} trying.
    The cost was small, the {feeling} considerable, and {what} lasted for {while}.
    Rumours about {where} travelled faster than {what} ever did.
    On paper the plan was {quality}; in {where} it looked different.
    {name} preferred the {colour} one, but said so only {when}.
    No two accounts of that day agree, except that {who} were present and {what} was not.
    The lesson, if there was one, concerned {feeling} rather than {what}.
    By the time the news reached {where}, {name} had already left {manner}.
    Old maps call this place by another name, which only {who} still use.
    {who_} have a saying about {what}, but it cannot be translated.
    """
)

# Smallest and largest value of each; a field drawn twice in one sentence has a second name.
NUMBERS = {
    "year": (1702, 1993),
    "year2": (1994, 2024),
    "small": (2, 19),
    "count": (20, 980),
    "count2": (1_000, 48_000),
    "price": (12, 9_999),
    "price2": (10_000, 99_999),
    "hour": (1, 12),
    "minute": (10, 59),
    "day": (1, 28),
    "room": (101, 899),
    "serial": (10_000, 999_999),
    "serial2": (1_000_000, 9_999_999),
}

NUMBERED = _lines(
    """
    In {year} {who} repaired {where} at a cost of {price} crowns.
    The register of {where} lists {count} names, the oldest of them from {year}.
    The inventory gives {what} the number {serial}.
    Ticket {serial2} was never collected, though {name} asked for it {when}.
    At {hour}:{minute} the doors of {where} were opened, and nobody came in.
    Of {count} visitors that day only {small} asked about {what}.
    From {where} to the border it is {count} kilometres, {small} more by the old road.
    Letter {serial} in the archive mentions {what} and a debt of {price} crowns.
    {name} paid {price} for {what} and sold it for {price2}.
    Between {year} and {year2} the number of {who} fell from {count2} to {count}.
    The postcard is stamped {hour}:{minute} and dated the {day} of March {year}.
    {name2} lived in room {room} for {small} years and kept {what} under the bed.
    A crate marked {serial2} stood in {where} until somebody needed the wood.
    Paragraph {small} of the rules of {year} forbids {what} in {where}.
    On page {count} of the {colour} ledger {name} found an error of {price}.
    The {day} of June {year} was the warmest day that {who} could remember.
    The policy on {where} had the number {serial2} and ran out in {year2}.
    Every year {count2} people pass through {where}, and {small} of them write about it.
    They counted {count} steps up to {where} and {small} fewer on the way down.
    Form {serial} must be filled in by {who} before {hour}:{minute}.
    By {year2} the price of {what} had risen from {price} to {price2}.
    The clock in {where} has shown {hour}:{minute} since the winter of {year}.
    Half of the {count2} copies were sold, {name} said, and the other {count} were given away.
    Number {serial2} is written on the back of {what}, in {colour} ink.
    """
)
