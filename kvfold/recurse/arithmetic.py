"""Equations inside a text, such as `12 * 3 = 36`, computed exactly and without running any code.

    equations("So 12 * 3 = 35, and 35 / 2 = 17.5")  ->  12 * 3 = 35 (is 36), 35 / 2 = 17.5 (right)

Only what is certainly arithmetic counts: runs of numbers, operators and brackets between words. A side with an unknown
in it (`2y + 3`) is left alone, and so is what cannot be read (`1,5 + 1`). Numbers are fractions, so
nothing is rounded but a result that is written with decimals: `10 / 3 = 3.33` is right.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import NamedTuple

_TOKEN = re.compile(
    r"""(?P<word>[^\W\d_]\w*|\d[\d.,]{0,63}+[^\W\d_]\w*|_\w*)
      | (?P<number>[$€£]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?![.,:]?\d)%?)
      | (?P<unclear>\d[\d.,:]*+)
      | (?P<equal>==?(?!=)|≈)
      | (?P<operator>\*\*|//|[-+*/^×÷·−–])
      | (?P<bracket>[()])
      | (?P<space>[^\S\n]+)
      | (?P<other>[<>!]=|.|\n)""",
    re.VERBOSE,
)
_LATEX = {r"\times": "*", r"\cdot": "*", r"\div": "/", r"\approx": "≈", r"\left": "", r"\right": ""}
_LATEX_NAMES = re.compile(r"\\(?:(?:times|cdot|div|left|right|approx)(?![A-Za-z])|[()\[\]])")
_LIST_MARK = re.compile(r"^[^\S\n]*(?:[-*+•]|\d{1,3}[.)]|\(?[A-Za-z][.)])[^\S\n]+", re.MULTILINE)
_TIMES = re.compile(r"(?<=[\d)])( +)[xX]( +)(?=[\d(])")
_SPELLED = str.maketrans(dict(zip("×·÷−–", "**/--", strict=True)) | {"^": "**"} | dict.fromkeys(",$€£", ""))
_MOST_CHARACTERS = 300  # of one side
_MOST_DIGITS, _MOST_EXPONENT, _MOST_BITS = 60, 64, 640  # bits of any result: a float holds it
_OPERATORS = frozenset(("**", "//", *"-+*/^×÷·−–"))
_SIGNS = frozenset("-+−–")
_BINARY: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


@dataclass(frozen=True)
class Equation:
    """Two sides as they were written. `value` is the computed side; None where something divides by zero."""

    left: str
    right: str
    value: Fraction | None
    is_left_computed: bool
    is_right: bool

    def __str__(self) -> str:
        return f"{self.left} = {self.right}"


@dataclass(frozen=True)
class _Side:
    text: str
    value: Fraction | None
    num_operators: int
    can_round: bool  # a plain number, which may stand for a longer one

    @property
    def unit(self) -> Fraction:
        """The last decimal place that is written."""
        digits = self.text.rstrip("%").partition(".")[2]
        return Fraction(1, 10 ** len(digits)) / (100 if self.text.endswith("%") else 1)


class _Token(NamedTuple):
    kind: str
    text: str
    start: int
    end: int


def equations(text: str) -> Iterator[Equation]:
    """Every equation of a text, in order; takes time linear in the text."""
    text = _LIST_MARK.sub("", _LATEX_NAMES.sub(lambda found: _LATEX.get(found[0], "\n"), text))
    text = _TIMES.sub(r"\1*\2", text)
    for run, follows_word in _runs(text):
        sides: list[list[_Token]] = [[]]
        signs: list[str] = []
        for token in run:
            if token.kind == "equal":
                signs.append(token.text)
                sides.append([])
            else:
                sides[-1].append(token)
        sides = [_balanced(_without_bold(text, side)) for side in sides]
        read = [_read(text, side) for side in sides]
        if follows_word and sides[0] and sides[0][0].kind != "number":
            read[0] = None  # `y - 3 = 4`, `f(3) = 4`
        for index, (left, right) in enumerate(pairwise(read)):
            if left is not None and right is not None:
                named = follows_word and index == 0  # `day 1 = 5 + 3` names a day
                if left.num_operators or (right.num_operators and not named):
                    yield _compared(left, right, signs[index])


def _runs(text: str) -> Iterator[tuple[list[_Token], bool]]:
    """Arithmetic tokens between words and punctuation, where they hold a sign of equality; whether a word precedes."""
    run: list[_Token] = []
    before, last = "", ""
    for found in _TOKEN.finditer(text + "\n"):
        token = _Token(str(found.lastgroup), found[0], *found.span())
        if token.kind == "space":
            continue
        if token.kind not in ("word", "unclear", "other"):
            if not run:
                before = last
            run.append(token)
        elif run:
            if any(token.kind == "equal" for token in run):
                yield run, before in ("word", "unclear")
            run = []
        last = token.kind


def _without_bold(source: str, tokens: list[_Token]) -> list[_Token]:
    """`**12 * 3 = 36**` and `12 * 3 = **36**` in Markdown; `y**2` and `2**y` are powers."""
    if tokens and tokens[0].text == "**" and not _is_value(source[max(0, tokens[0].start - 1) : tokens[0].start]):
        tokens = tokens[1:]
    if tokens and tokens[-1].text == "**" and not _is_value(source[tokens[-1].end : tokens[-1].end + 1]):
        tokens = tokens[:-1]
    return tokens


def _is_value(character: str) -> bool:
    return character.isalnum() or character in ("_", "(", ")")


def _balanced(tokens: list[_Token]) -> list[_Token]:
    """Without brackets that open or close around the equation, as in `(since 3 + 4 = 7)`."""
    texts = [token.text for token in tokens]
    low, high = 0, len(texts)
    extra = texts.count("(") - texts.count(")")
    while low < high and extra > 0 and texts[low] == "(":
        low, extra = low + 1, extra - 1
    while low < high and extra < 0 and texts[high - 1] == ")":
        high, extra = high - 1, extra + 1
    return tokens[low:high]


def _read(source: str, tokens: list[_Token]) -> _Side | None:
    """None for what is no arithmetic, or more of it than anyone writes."""
    text = source[tokens[0].start : tokens[-1].end] if tokens else ""
    if not text or len(text) > _MOST_CHARACTERS or _adds_percent(tokens):
        return None
    spelled = re.sub(r"([\d.]+)%", r"(\1/100)", text.translate(_SPELLED))
    try:
        tree = ast.parse(spelled, mode="eval").body
        value = _value(tree)
    except ZeroDivisionError:
        value = None
    except (SyntaxError, ValueError, OverflowError, MemoryError, RecursionError):
        return None
    num_operators = sum(token.text in _OPERATORS for token in tokens[1:])
    can_round = len(tokens) == 1 or (len(tokens) == 2 and tokens[0].text in _SIGNS)
    return _Side(text, value, num_operators, can_round)


def _adds_percent(tokens: list[_Token]) -> bool:
    """`100 - 20%`, of which nobody knows what the percentage is of; `20% + 30%` is plain."""
    percents = {token.text.endswith("%") for token in tokens if token.kind == "number"}
    return len(percents) == 2 and any(token.text in _SIGNS for token in tokens)


def _value(node: ast.expr) -> Fraction:
    """ValueError for anything but numbers, + - * / and small powers, and for results of too many digits."""
    value = _computed(node)
    if _num_bits(value) > _MOST_BITS:
        raise ValueError("a number beyond what is computed")
    return value


def _num_bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())


def _computed(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            written = repr(number)
            if len(written) > _MOST_DIGITS:
                raise ValueError(written)
            return Fraction(written)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            base, exponent = _value(left), _value(right)
            if exponent.denominator != 1 or abs(exponent) > _MOST_EXPONENT:
                raise ValueError("a power beyond what is computed")
            return Fraction(base ** int(exponent))
        case ast.BinOp(left=left, op=ast.FloorDiv(), right=right):
            return Fraction(_value(left) // _value(right))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _BINARY[type(op)](_value(left), _value(right))
    raise ValueError(f"{type(node).__name__} is no arithmetic")


def _compared(left: _Side, right: _Side, sign: str) -> Equation:
    is_left_computed = bool(left.num_operators)
    if left.value is None or right.value is None:
        return Equation(left.text, right.text, None, is_left_computed, is_right=False)
    written = right if right.can_round else left
    rounds = written.can_round and (sign == "≈" or written.unit < 1)
    error = abs(left.value - right.value)
    is_right = error <= written.unit / 2 if rounds else error == 0
    return Equation(left.text, right.text, left.value if is_left_computed else right.value, is_left_computed, is_right)


def number_text(value: Fraction) -> str:
    """36, 17.5, or 3.33333 for what does not end."""
    return str(value.numerator) if value.denominator == 1 else f"{float(value):g}"
