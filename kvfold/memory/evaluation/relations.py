"""What people of a made-up log may state: sentences, how they change and end, and how one asks for them.

In templates {S} is the subject, {P} its possessive, {s} the ending of a verb, {do} does or do, {v} a value, {d} a day.
Plain words are mostly such that the rules of kvfold know; free ones were written without regard to them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Subject:
    """Who is spoken of, by the forms that templates need."""

    S: str
    P: str
    s: str = "s"
    do: str = "does"


I = Subject("I", "my", "", "do")  # noqa: E741 - the user, who says so
NAMES = ("Anna", "Ben", "Clara", "David", "Elena", "Felix", "Greta", "Hugo", "Irene", "Jonas", "Klara", "Luis", "Mara")
OTHERS = tuple(Subject(name, f"{name}'s") for name in NAMES)
STRANGERS = tuple(Subject(name, f"{name}'s") for name in ("Xaver", "Yusuf", "Zelda"))  # whom no log names


@dataclass(frozen=True)
class Wording:
    """How a fact is stated, changes and ends."""

    stated: tuple[str, ...]
    updated: tuple[str, ...]
    ended: tuple[str, ...]


@dataclass(frozen=True)
class Relation:
    """One kind of fact: a subject has one value at a time. `free`: words that the rules of kvfold were not made for."""

    name: str
    values: tuple[str, ...]
    plain: Wording
    free: Wording
    asked: tuple[str, ...]
    asked_of_the_past: tuple[str, ...]


RELATIONS = (
    Relation(
        "city",
        ("Berlin", "Paris", "Oslo", "Lisbon", "Vienna", "Dublin", "Prague", "Athens", "Madrid", "Zurich"),
        Wording(
            ("{S} live{s} in {v}.", "By the way, {S} live{s} in {v} with a friend."),
            ("{S} moved to {v}.", "{S} now live{s} in {v}.", "{S} packed everything and settled in {v}."),
            ("{S} no longer live{s} in {v}.",),
        ),
        Wording(
            ("{S} rent{s} a flat in {v}.",),
            ("{S} left for {v}, for good this time.", "{P} furniture is in {v} since last week."),
            ("{S} gave up the flat in {v}.",),
        ),
        ("Where {do} {S} live?", "Which city {do} {S} live in?"),
        ("Where did {S} live on {d}?",),
    ),
    Relation(
        "employer",
        ("Siemens", "Bosch", "Airbus", "Nokia", "Philips", "Ericsson", "Nestle", "Lufthansa", "Adidas", "Roche"),
        Wording(
            ("{S} work{s} at {v}.", "{S} work{s} for {v} as an engineer."),
            ("{S} now work{s} at {v}.", "{S} joined {v}.", "{S} signed a contract with {v}."),
            ("{S} no longer work{s} at {v}.", "{S} stopped working at {v}."),
        ),
        Wording(
            ("{S} got a desk at {v}.", "{P} employer is {v}."),
            ("{S} signed a contract with {v}.", "{v} hired {S} away."),
            ("{S} handed in the badge at {v}.",),
        ),
        ("Where {do} {S} work?", "Which company {do} {S} work for?"),
        ("Where did {S} work on {d}?",),
    ),
    Relation(
        "phone",
        tuple(f"555-{number}" for number in (1374, 2891, 3305, 4467, 5120, 6698, 7743, 8052, 9916, 1029)),
        Wording(
            ("{P} phone number is {v}.",),
            ("{P} phone number is now {v}.", "{P} phone number is {v}.", "{P} new phone number is {v}."),
            ("{P} phone number is no longer {v}.",),
        ),
        Wording(
            ("You reach {S} under {v}, that is the phone.",),
            ("{S} changed the phone number, it is {v}.",),
            ("{v} rings nobody, {S} cancelled that phone number.",),
        ),
        ("What is {P} phone number?", "Which phone number reaches {P} phone?"),
        ("What was {P} phone number on {d}?",),
    ),
    Relation(
        "dog",
        ("Rex", "Bello", "Luna", "Max", "Rocky", "Bruno", "Kira", "Nala", "Odin", "Pablo"),
        Wording(
            ("{P} dog is called {v}.", "{P} dog is a poodle called {v}."),
            ("{P} dog is now called {v}.", "{P} dog was renamed to {v}."),
            ("{P} dog is no longer called {v}.",),
        ),
        Wording(
            ("A puppy named {v} is {P} dog.",),
            ("{S} took in another dog after the first one died, {v}.",),
            ("{v}, {P} dog, ran away.",),
        ),
        ("What is {P} dog called?", "What is the name of {P} dog?"),
        ("What was {P} dog called on {d}?",),
    ),
    Relation(
        "dish",
        ("lasagne", "goulash", "paella", "ramen", "risotto", "falafel", "moussaka", "pizza", "curry", "sushi"),
        Wording(
            ("{P} favourite dish is {v}.",),
            ("{P} favourite dish changed to {v}.", "{P} favourite dish is now {v}.", "{P} favourite dish is {v}."),
            ("{P} favourite dish is not {v} anymore.",),
        ),
        Wording(
            ("Nothing beats {v}, that is {P} favourite dish.",),
            ("{v} has become {P} favourite dish.",),
            ("{S} cannot stand {v}, the favourite dish of old.",),
        ),
        ("What is {P} favourite dish?", "Which dish is {P} favourite?"),
        ("What was {P} favourite dish on {d}?",),
    ),
    Relation(
        "meeting",
        ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"),
        Wording(
            ("{P} weekly meeting is on {v}.", "{P} weekly meeting takes place on {v}."),
            ("{P} weekly meeting moved to {v}.", "{P} weekly meeting is now on {v}."),
            ("{P} weekly meeting is no longer on {v}.",),
        ),
        Wording(
            ("Every {v} there is {P} weekly meeting.",),
            ("From now on {v} is the day of {P} weekly meeting.",),
            ("{P} weekly meeting was cancelled, {v} is free.",),
        ),
        ("On which day is {P} weekly meeting?", "When is {P} weekly meeting?"),
        ("On which day was {P} weekly meeting on {d}?",),
    ),
    Relation(
        "locker",
        tuple(map(str, (4817, 9931, 2706, 6340, 1185, 7592, 3064, 8428, 5273, 1946))),
        Wording(
            ("The code of {P} locker is {v}.",),
            ("The code of {P} locker is now {v}.", "The code of {P} locker was changed to {v}."),
            ("The code of {P} locker is no longer {v}.",),
        ),
        Wording(
            ("{v} opens {P} locker, that is the code.",),
            ("{S} set the locker to a code of {v}.",),
            ("{P} locker is gone, forget the code {v}.",),
        ),
        ("What is the code of {P} locker?",),
        ("What was the code of {P} locker on {d}?",),
    ),
)
DISTRACTORS = (
    "The weather was lovely today.",
    "We talked about the match for an hour.",
    "{S} told a joke about {city}.",
    "Somebody lost a phone on the train to {city}.",
    "There was a long article about {employer} in the paper.",
    "{S} asked whether the dog next door barks at night.",
    "I read half of a novel on the sofa.",
    "The kitchen smelled of {dish} all evening.",
    "{S} was late because the bus did not come.",
    "Next {meeting} the museum opens late.",
    "My neighbour painted the fence again.",
    "{S} laughed about the old locker in the hall.",
    "It rained so hard that we stayed at home.",
    "A colleague of {S} visited {city} for a weekend.",
    "Thanks, that helped a lot.",
)
