"""Chat templates cut into pieces: joined again, they are what the tokenizer renders."""

from __future__ import annotations

from typing import Any

import pytest

from kvfold.errors import InputError, ModelError
from kvfold.models.chat_template import ChatTemplate, render_messages
from tests.tiny import TEMPLATE, tokenizer

WITH_SYSTEM = (
    "{% if messages[0]['role'] != 'system' %}<s>default{% endif %}"
    "{% for message in messages %}[{{ message['role'] }}]{{ message['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
INSTRUCT = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}[I]{{ message['content'] }}[/I]"
    "{% else %}{{ message['content'] }}{{ eos_token }}{% endif %}{% endfor %}"
)
ALTERNATING = (
    "{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}<{{ message['role'] }}>{{ message['content'] }}<end>"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def with_template(text: str | None) -> Any:
    found = tokenizer()
    found.chat_template = text
    return found


@pytest.mark.parametrize("text", [TEMPLATE, WITH_SYSTEM, INSTRUCT, ALTERNATING])
def test_pieces_join_to_the_rendering(text: str) -> None:
    templated = with_template(text)
    pieces = ChatTemplate.of(templated)
    assert pieces is not None
    user, reply, more = ({"role": r, "content": c} for r, c in (("user", "u"), ("assistant", "r"), ("user", "m")))

    def rendered(*messages: dict[str, str], reply: bool = False) -> str:
        return str(templated.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=reply))

    assert pieces.opening + "u" + pieces.close == rendered(user, reply=True)
    assert rendered(user) + pieces.header == rendered(user, reply=True)
    done = pieces.opening + "u" + pieces.close + "r" + pieces.end
    assert done == rendered(user, reply)
    assert done + pieces.reopen + "m" + pieces.close == rendered(user, reply, more, reply=True)


def test_no_template_is_none() -> None:
    assert ChatTemplate.of(with_template(None)) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{% for m in messages %}{{ m['content'] | upper }}{% endfor %}", "does not keep texts whole"),
        ("{% for m in messages %}{{ m['content'] }}{{ m['content'] }}{% endfor %}", "does not keep texts whole"),
        ("{% for m in messages %}{% if loop.last %}!{% endif %}{{ m['content'] }}{% endfor %}{{ messages|length }}",
         "rewrites earlier turns"),
        ("{{ raise_exception('never') }}", "cannot render a plain conversation: never"),
    ],
)  # fmt: skip
def test_templates_that_cannot_grow_are_refused(text: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        ChatTemplate.of(with_template(text))


def test_messages_the_template_refuses() -> None:
    twice = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    with pytest.raises(InputError, match="does not take these messages: roles must alternate"):
        render_messages(with_template(ALTERNATING), twice)
