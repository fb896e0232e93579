"""Checks: what each refuses, and with which words."""

from __future__ import annotations

import pytest
import torch

import kvfold
from kvfold.errors import InputError
from kvfold.models.loader import Model
from kvfold.recurse.checks import AgreementCheck, ArithmeticCheck, FunctionCheck, QuoteCheck
from kvfold.shortening.yes_no import yes_no_ids

SOURCE = "The cat sat on\nthe mat. “It’s warm,” she said. Later the dog came home."


@pytest.mark.parametrize(
    "text",
    [
        'It says "The cat sat on the mat."',
        "It says “the dog came home”.",
        'It says "Sat on the mat".',
        'It says "The cat sat … the dog came home."',
        'It says "The cat sat [...] the dog came".',
        "It says «It's warm,».",
        'It says "The cat … on the mat … she said".',
        'It says "… the dog came home …".',
        'A "cat" is named, and nothing is quoted.',
        "Nothing is quoted.",
        "It says ‘It’s warm’ and ‘the cat sat on the mat’.",
    ],
)
def test_quotes_of_the_text_pass(text: str) -> None:
    assert QuoteCheck(SOURCE).refusal(text) is None


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ('It says "The cat sat on the dog."', "The cat sat on the dog."),
        ('"The cat sat on the mat" and "the dog ran away"', "the dog ran away"),
        ('"the dog came home … The cat sat"', "the dog came home … The cat sat"),
        ('"he cat sat on the mat"', "he cat sat on the mat"),
        ('"The cat … she … dog cam"', "The cat … she … dog cam"),
        ('It says “The cat ran away".', "The cat ran away"),
        ("It says »the cat ran away«.", "the cat ran away"),
        ("It says ”the cat ran away”.", "the cat ran away"),
        ("It says ‘the cat’s away today’.", "the cat’s away today"),
        ("It says 「the cat ran away」.", "the cat ran away"),
    ],
)
def test_a_quote_that_is_not_in_the_text_is_refused(text: str, wrong: str) -> None:
    assert QuoteCheck(SOURCE).refusal(text) == f'"{wrong}" is not in the text'


def test_parts_of_a_quote_stand_in_one_passage() -> None:
    """Words of the first clause and of the last are no quote, though the text has them in this order."""
    filler = "The rooms are heated in winter. " * 20
    text = f"The contract with Bosch runs for years. {filler}The contract with Siemens, signed late, ends in May."
    assert QuoteCheck(text).refusal('"The contract with Bosch … ends in May"') is not None
    assert QuoteCheck(text).refusal('"The contract with … ends in May"') is None, "there is a later one"
    assert QuoteCheck(text).refusal('"The contract with Siemens … ends in May."') is None
    passages = [f"It began here {'x' * num_left_out} and ended there." for num_left_out in (398, 399)]
    assert [QuoteCheck(one).refusal('"It began here … and ended there"') is None for one in passages] == [True, False]


def test_a_quote_of_a_language_without_spaces_may_begin_anywhere() -> None:
    assert QuoteCheck("猫は赤い敷物の上に座った。", min_words=1).refusal("「赤い敷物」") is None


def test_a_quote_can_be_required_and_short_ones_checked() -> None:
    assert QuoteCheck(SOURCE, required=True).refusal("The cat sat.") == "it quotes nothing of the text"
    assert QuoteCheck(SOURCE, required=True).refusal('"… … …" and "! ! !"') == "it quotes nothing of the text"
    assert QuoteCheck(SOURCE, min_words=1).refusal('A "bird"') == '"bird" is not in the text'


def test_wrong_arithmetic_is_refused_with_the_right_result() -> None:
    check = ArithmeticCheck()
    assert check.refusal("12 * 3 = 36, 36 + 1 = 37") is None
    assert check.refusal("12 * 3 = 35") == "12 * 3 = 35 is wrong: 12 * 3 is 36"
    assert check.refusal("35 = 12 * 3") == "35 = 12 * 3 is wrong: 12 * 3 is 36"
    assert check.refusal("1 / 0 = 1") == "1 / 0 = 1 divides by zero"
    assert ArithmeticCheck(required=True).refusal("no sum") == "it computes nothing"


def test_a_function_refuses_by_a_reason_or_by_false() -> None:
    def short(text: str) -> bool:
        return len(text) < 5

    assert FunctionCheck(short).refusal("abc") is None
    assert FunctionCheck(short).refusal("abcdef") == "short refused it"
    assert FunctionCheck(lambda text: "it is bad").refusal("a") == "it is bad"
    assert FunctionCheck(lambda text: None).refusal("a") is None
    with pytest.raises(InputError, match="returned 3; return a reason"):
        FunctionCheck(lambda text: 3).refusal("a")  # type: ignore[arg-type,return-value]


@pytest.mark.parametrize("template", ["auto", None])
def test_agreement_is_the_models_probability_of_yes_against_no(model: Model, template: str | None) -> None:
    check = AgreementCheck()
    with kvfold.Session(model, template="auto" if template else None) as session:
        session.extend("the cat")
        session.generate(max_new_tokens=4)
        before = list(session.token_ids)
        found = check.probability(session)
        assert session.token_ids == before
        cue = "\n\nIs the last step right? Answer yes or no." + ("" if template else "\nAnswer:")
        session.extend(cue, compress=False)
        yes, no = yes_no_ids(model.tokenizer)
        p_V = torch.softmax(session.next_logits().double(), -1)
        assert found == pytest.approx(float(p_V[yes].sum() / p_V[yes + no].sum()), abs=1e-6)
        refusal = AgreementCheck(threshold=min(0.999, found + 0.01)).refusal("x", session)
        assert refusal is None or "the model agrees with a probability of" in refusal


def test_agreement_refuses_below_its_threshold_and_without_a_session(model: Model) -> None:
    with kvfold.Session(model) as session:
        session.extend("the cat")
        p = AgreementCheck().probability(session)
        assert AgreementCheck(threshold=p * 0.99).refusal("x", session) is None
        assert AgreementCheck(threshold=p + (1 - p) / 2).refusal("x", session) is not None
    with pytest.raises(InputError, match="use it in a Chain"):
        AgreementCheck().refusal("x")
    with pytest.raises(InputError, match="threshold is 1"):
        AgreementCheck(threshold=1)
