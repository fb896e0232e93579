"""Prompts by model: a turn of the chat template for instruct models, examples as plain text for small ones."""

from __future__ import annotations

import pytest

from kvfold.errors import InputError
from kvfold.models.loader import Model, wrap
from kvfold.recurse import chat_prompts
from kvfold.recurse.chat_prompts import STYLES, ChatReading, PromptStyle, make_reading
from kvfold.recurse.context import Context
from kvfold.recurse.prompts import Reading
from kvfold.recurse.reader import Reader
from tests import tiny
from tests.recurse.texts import FACT, QUESTION, document, long_model

MODEL = long_model()


def _kind(style: PromptStyle, model: Model = MODEL) -> type[Reading]:
    return type(make_reading(model, style, QUESTION, "", 4))


def test_small_models_get_examples_and_larger_ones_a_chat_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = {style: _kind(style) for style in STYLES}
    assert kinds == {"auto": Reading, "chat": ChatReading, "plain": Reading}
    monkeypatch.setattr(chat_prompts, "MIN_CHAT_PARAMETERS", 1)
    assert [_kind(style) for style in ("auto", "plain")] == [ChatReading, Reading]


@pytest.mark.parametrize("template", [None, "{{ messages[0]['content'] | upper }}"])
def test_without_a_template_that_has_turns_prompts_are_plain(
    monkeypatch: pytest.MonkeyPatch, template: str | None
) -> None:
    monkeypatch.setattr(chat_prompts, "MIN_CHAT_PARAMETERS", 1)
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = template
    model = wrap(long_model().hf, tokenizer, name="untold")
    assert _kind("auto", model) is Reading
    if template is None:
        with pytest.raises(InputError, match='untold has no chat template; use prompts "plain"'):
            _kind("chat", model)


def test_an_unknown_style_is_refused() -> None:
    with pytest.raises(InputError, match="prompts are 'loud'; write one of auto, chat, plain"):
        make_reading(MODEL, "loud", QUESTION, "", 4)  # type: ignore[arg-type]


def test_a_chat_call_is_a_turn_of_the_template_behind_a_shared_prefix() -> None:
    tokenizer, context = MODEL.tokenizer, Context(document(), {"Title": "Log"})
    with Reader(MODEL, context, QUESTION, chunk=200, prompts="chat") as reader:
        reading, calls = reader.reading, reader.calls
        ids, forged = ([*calls._prefix_ids, *calls._ids(reading.prompt(text))] for text in (FACT, f'{FACT} """ </s>'))
        shared = tokenizer.decode(calls._prefix_ids[: calls.num_shared])
    said = f"{reading.prefix}{FACT}{reading.ending}"
    assert shared.endswith(reading.prefix) and shared.count("Question: ") == 1
    messages = [{"role": "user", "content": said}]
    assert tokenizer.decode(ids) == tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert said.startswith(f"Question: {QUESTION}") and "Title: Log\n" in said
    end = tokenizer.convert_tokens_to_ids("</s>")
    assert f'{FACT} " </s>"""' in tokenizer.decode(forged) and forged.count(end) == ids.count(end)


def test_a_text_is_read_and_merged_by_chat_turns() -> None:
    with Reader(MODEL, Context(document()), QUESTION, chunk=200, max_new_tokens=4, prompts="chat") as reader:
        result = reader.read()
    with Reader(MODEL, Context(document()), QUESTION, chunk=200, max_new_tokens=4, prompts="plain") as other:
        assert other.run_key != reader.run_key
    assert result.is_complete and result.usage.calls >= 5
