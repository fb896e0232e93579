"""The grammar alone: which texts are expressions, and into which nodes they are read."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfold.errors import PolicyError
from kvfold.policy.parse import MAX_DEPTH, MAX_LEN, Argument, Call, Phase, parse
from kvfold.policy.parts import LayerSlice
from kvfold.policy.size import Bytes, Greatest, Least, Ratio, Share, Size, Tokens


def _value(text: str) -> object:
    (call,) = parse(f"a({text})")
    assert isinstance(call, Call)
    (argument,) = call.arguments
    return argument.value


def test_terms_keep_their_order() -> None:
    assert parse("a + b(1, c=2) + 8x") == (
        Call("a"),
        Call("b", (Argument(None, 1), Argument("c", 2))),
        Ratio(8),
    )


def test_phases_hold_terms() -> None:
    assert parse("prefill(a + 8x) + decode(b)") == (
        Phase("prefill", (Call("a"), Ratio(8))),
        Phase("decode", (Call("b"),)),
    )


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("8x", Ratio(8)),
        ("2.5 x", Ratio(2.5)),
        ("2048tok", Tokens(2048)),
        ("12.5%mem", Share(12.5)),
        ("12.5 % mem", Share(12.5)),
        ("7B", Bytes(7)),
        ("512MB", Bytes(512 * 10**6)),
        ("1.5GiB", Bytes(3 * 2**29)),
        ("min(8x, 2048tok)", Least((Ratio(8), Tokens(2048)))),
        ("max( 8x ,min(1KB,2tok), 3x)", Greatest((Ratio(8), Least((Bytes(1000), Tokens(2))), Ratio(3)))),
    ],
)
def test_sizes(text: str, size: Size) -> None:
    assert parse(text) == (size,)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("64", 64),
        ("-2", -2),
        ("0.25", 0.25),
        ("1e-05", 1e-05),
        ("2:-2", LayerSlice(2, -2)),
        (":", LayerSlice()),
        (":4", LayerSlice(None, 4)),
        ("1:", LayerSlice(1)),
        ("::2", LayerSlice(None, None, 2)),
        ("1 : 9 : 3", LayerSlice(1, 9, 3)),
        ("none", Call("none")),
        ("int4(group=32)", Call("int4", (Argument("group", 32),))),
        ("8x", Ratio(8)),
    ],
)
def test_values(text: str, value: object) -> None:
    assert _value(text) == value
    assert type(_value(text)) is type(value)


@pytest.mark.parametrize("text", ["a(1,b=2:-2)+min(8x,3tok)", " a ( 1 , b = 2 : -2 )\n+\tmin ( 8x , 3tok ) "])
def test_whitespace_is_free(text: str) -> None:
    assert parse(text) == (
        Call("a", (Argument(None, 1), Argument("b", LayerSlice(2, -2)))),
        Least((Ratio(8), Tokens(3))),
    )


def test_empty_parentheses_are_no_arguments() -> None:
    assert parse("a()") == parse("a")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected a term of an expression, found the end"),
        ("a +", "expected a term of an expression, found the end"),
        ("+ a", 'expected a term of an expression, found "+"'),
        ("a b", 'expected + and another term, found "b"'),
        ("a)", 'expected + and another term, found ")"'),
        ("a(1", 'expected ")", found the end'),
        ("a(1,)", 'expected a value, found ")"'),
        ("a(=1)", 'expected a value, found "="'),
        ("a; b", '";" is no part of an expression; join terms with +'),
        ("prefill()", 'expected a term of prefill, found ")"'),
        ("prefill(decode(a))", "decode(...) cannot stand inside prefill(...); write the two side by side"),
        ("a(1.5:2)", "1.5 cannot bound a slice; write whole numbers, such as 2:-2"),
        ("a(::0)", "layers=::0: the step of a slice of layers is at least 1"),
        ("1e999x", "1e999 is too large; numbers stay below 1e18"),
    ],
)
def test_refused(text: str, message: str) -> None:
    with pytest.raises(PolicyError) as caught:
        parse(text)
    assert str(caught.value) == message


@pytest.mark.parametrize("text", ["8", "8y", "0.5", "12.5%", "2048 tokens", "1.5"])
def test_what_is_no_size_is_told_the_units(text: str) -> None:
    with pytest.raises(PolicyError, match=r"is no size; .*sizes: 8x, 2048tok, 12.5%mem, 512MB \(B, KB, MB"):
        parse(text)


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("8X", "write 8x"),
        ("512mb", "write 512MB"),
        ("64TOK", "write 64tok"),
        ("50%", "for 50% of the bytes write 50%mem"),
        ("0.5", "for a compression_ratio of 0.5, as kvpress counts, write 2x"),
        ("0.875", "for a compression_ratio of 0.875, as kvpress counts, write 8x"),
        ("8", "did you mean 8x or 8tok?"),
    ],
)
def test_a_size_as_others_write_it_is_answered_in_our_spelling(text: str, advice: str) -> None:
    with pytest.raises(PolicyError) as caught:
        parse(f"snapkv + {text}")
    assert f'"{text}" is no size; {advice}' in str(caught.value)


@pytest.mark.parametrize("part", ["1", "a", "2:3"])
def test_min_takes_sizes_only(part: str) -> None:
    with pytest.raises(PolicyError, match="expected a size"):
        parse(f"min(8x, {part})")


def test_length_and_depth_are_bounded() -> None:
    deep = MAX_DEPTH * "max(1x, " + "1x" + MAX_DEPTH * ")"
    assert len(parse(deep)) == 1
    with pytest.raises(PolicyError, match=f"more than {MAX_DEPTH} deep"):
        parse(f"max(1x, {deep})")
    assert len(parse("a" * MAX_LEN)) == 1
    with pytest.raises(PolicyError, match=f"at most {MAX_LEN} characters, this one has {MAX_LEN + 1}"):
        parse("a" * (MAX_LEN + 1))


@given(st.text(alphabet="ab18x.%+(),=: -eminMBtok", max_size=40) | st.text(max_size=20))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        assert parse(text)
    except PolicyError as error:
        assert str(error)
