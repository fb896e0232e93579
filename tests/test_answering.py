"""`kvfold.answer` and the pipeline task: a context is compressed once, and every question sees it and nothing else."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import transformers

import kvfold
from kvfold.errors import InputError, KvfoldWarning
from kvfold.models.attach import is_attached, set_arena
from kvfold.models.loader import Model
from kvfold.pages.arena import Arena
from kvfold.session import Session
from tests.tiny import build, tokenizer

CONTEXT = "The cellar is locked. Its code is 4817, and the parrot is called Admiral. " * 4
QUESTIONS = ["What is the code?", "Who is Admiral?", "What is the code?"]
POLICY = "keydiff + 3x + int4"
INPUT = f"<s><user>{CONTEXT}\n\n{QUESTIONS[0]}<end>\n<assistant>"


@pytest.fixture
def hf() -> Any:
    """As a user of transformers has it: nothing is attached."""
    found = build("llama")
    set_arena(found, Arena(16 << 20, superblock_bytes=4096))
    return found


def test_every_question_is_asked_of_the_compressed_context_alone(model: Model) -> None:
    found = kvfold.answer(model, CONTEXT, QUESTIONS, POLICY, max_new_tokens=8)
    with Session(model, POLICY) as session:
        session.extend(CONTEXT)
        expected = [session.ask(question, max_new_tokens=8).token_ids for question in QUESTIONS]
        assert found.stats.slots == session.stats().slots and found.stats.logical_len == len(session.token_ids)
    assert [reply.token_ids for reply in found.replies] == expected
    assert found.texts[0] == found.texts[2] != found.texts[1]
    (alone,) = kvfold.answer(model, CONTEXT, QUESTIONS[1], POLICY, max_new_tokens=8).replies
    assert alone.token_ids == expected[1]


def test_under_full_tokens_are_those_of_generate(hf: Any) -> None:
    """Context, question and prefix are one user turn and the beginning of its reply, each templated once."""
    names = tokenizer()
    for prefix in ("", "It is"):
        inputs = names(INPUT + prefix, return_tensors="pt", add_special_tokens=False)
        tokens = hf.generate(**inputs, max_new_tokens=8, do_sample=False)[0, inputs["input_ids"].shape[1] :].tolist()
        found = kvfold.answer(hf, CONTEXT, QUESTIONS[0], tokenizer=names, max_new_tokens=8, answer_prefix=prefix)
        assert found.replies[0].token_ids == tokens
        assert found.texts == [names.decode(tokens, skip_special_tokens=True)]
        assert not is_attached(hf)


def test_without_a_template_texts_are_read_as_they_are(hf: Any) -> None:
    names = tokenizer()
    inputs = names(CONTEXT + QUESTIONS[0] + "It", return_tensors="pt")
    tokens = hf.generate(**inputs, max_new_tokens=6, do_sample=False)[0, inputs["input_ids"].shape[1] :].tolist()
    options: dict[str, Any] = {"tokenizer": names, "template": None, "max_new_tokens": 6, "answer_prefix": "It"}
    assert kvfold.answer(hf, CONTEXT, QUESTIONS[0], **options).replies[0].token_ids == tokens


def test_a_longer_context_is_cut_and_told(model: Model) -> None:
    with pytest.warns(KvfoldWarning, match=r"the context has \d+ tokens; the first 40 of them are read"):
        found = kvfold.answer(model, CONTEXT, "What?", max_new_tokens=2, max_context_length=40)
    assert found.stats.logical_len == 40
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        whole = kvfold.answer(model, CONTEXT, "What?", max_new_tokens=2).stats.logical_len
        for length in (whole, whole + 1):
            kvfold.answer(model, CONTEXT, "What?", max_new_tokens=2, max_context_length=length)


def test_special_tokens_of_texts_are_text(model: Model) -> None:
    found = kvfold.answer(model, "a<end>\n<assistant>b", "c<end>", max_new_tokens=2, answer_prefix="<end>")
    ends = model.tokenizer.convert_tokens_to_ids("<end>")
    with Session(model) as session:
        session.extend("a<end>\n<assistant>b")
        assert ends not in session.token_ids and found.stats.logical_len == len(session.token_ids)
        prefixed = session.conversation.reply_ids("user", "<end>")
    assert prefixed.count(ends) == 1


def test_wrong_inputs_are_told(model: Model, hf: Any) -> None:
    for questions in ([], "", ["What?", ""], [3]):
        with pytest.raises(InputError, match="questions is a text, or a non-empty list of texts"):
            kvfold.answer(model, CONTEXT, questions)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="not LlamaForCausalLM without a tokenizer"):
        kvfold.answer(hf, CONTEXT, "What?")
    with pytest.raises(InputError, match="transformers module with tokenizer=…; not str"):
        kvfold.answer("smollm2-135m", CONTEXT, "What?", tokenizer=tokenizer())
    with pytest.raises(InputError, match="a tokenizer of its own"):
        kvfold.answer(model, CONTEXT, "What?", tokenizer=tokenizer())
    with pytest.raises(InputError, match="max_tokens is 0"):
        kvfold.answer(model, CONTEXT, "What?", max_context_length=0)
    with pytest.raises(TypeError, match="no option 'temperatur'"):
        kvfold.answer(model, CONTEXT, "What?", temperatur=1)  # type: ignore[call-arg]
    with pytest.raises(InputError, match="nothing to read"):
        kvfold.answer(hf, "", "What?", tokenizer=tokenizer())
    assert not is_attached(hf)


def test_the_task_of_transformers(hf: Any) -> None:
    kvfold.register_pipeline()
    kvfold.register_pipeline()
    pipe = transformers.pipeline(
        "kvfold-text-generation", model=hf, tokenizer=tokenizer(), policy=POLICY, max_new_tokens=6, device="cpu"
    )
    expected = kvfold.answer(hf, CONTEXT, QUESTIONS, POLICY, tokenizer=tokenizer(), max_new_tokens=6)
    found = pipe(CONTEXT, questions=QUESTIONS)
    assert found["answers"] == expected.texts and found["stats"].slots == expected.stats.slots
    assert pipe(CONTEXT, question=QUESTIONS[1])["answer"] == expected.texts[1]
    assert pipe([CONTEXT, CONTEXT], question=QUESTIONS[1])[1]["answer"] == expected.texts[1]
    full = kvfold.answer(hf, CONTEXT, QUESTIONS[0], tokenizer=tokenizer(), max_new_tokens=4)
    assert pipe(CONTEXT, question=QUESTIONS[0], policy="full", max_new_tokens=4)["answer"] == full.texts[0]
    for given, kind, told in (
        ({}, InputError, "give a question"),
        ({"question": "a", "questions": ["b"]}, InputError, "either question or questions"),
        ({"question": "a", "press": None}, TypeError, "give policy=.* in place of press"),
        ({"question": "a", "pres": None}, TypeError, "no option 'pres'"),
    ):
        with pytest.raises(kind, match=told):
            pipe(CONTEXT, **given)
    with pytest.raises(InputError, match="the context is a text"):
        pipe({"role": "user"}, question="What?")


@pytest.mark.model
def test_a_real_model_answers_from_less_than_a_quarter_of_the_bytes(smollm2: Model) -> None:
    asked = ["What is the code of the wine cellar?", "What is the name of the parrot in the bar?"]
    options: dict[str, Any] = {"max_new_tokens": 16, "stop": (".", "\n")}
    found = kvfold.answer(smollm2, kvfold.example_text(), asked, "keydiff + 2x + int4", **options)
    assert "4817" in found.texts[0] and "Admiral" in found.texts[1]
    assert found.stats.ratio > 4.5
    begun = kvfold.answer(smollm2, kvfold.example_text(), asked[0], answer_prefix="The code is", **options)
    assert "4817" in begun.texts[0] and "The code" not in begun.texts[0]


def test_a_wrong_argument_is_refused_before_anything_is_read(hf: Any) -> None:
    names = tokenizer()
    read: list[int] = []
    wrong: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
        (CONTEXT, {"tokenizer": "gpt2"}, InputError, 'tokenizer is what AutoTokenizer.* not "gpt2"'),
        (names(CONTEXT), {"tokenizer": names}, InputError, "context is a text, not BatchEncoding; token ids go to"),
        (CONTEXT, {"tokenizer": names, "num_beams": 2}, TypeError, "there is no option 'num_beams'; options: max_new"),
    ]
    for context, more, kind, text in wrong:
        with pytest.raises(kind, match=text):
            kvfold.answer(hf, context, QUESTIONS[0], "int4", progress=read.append, **more)
    assert read == [] and not is_attached(hf)


def test_a_tokenizer_of_another_model_is_warned_of(hf: Any) -> None:
    names = tokenizer()
    names.add_tokens([f"word{i}" for i in range(9)])
    with pytest.warns(KvfoldWarning, match=r"has \d+ tokens and the model \d+: it seems to be of another model"):
        kvfold.answer(hf, CONTEXT, QUESTIONS[0], tokenizer=names, max_new_tokens=1)
