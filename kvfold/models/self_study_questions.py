"""What a model is asked about any text it has read, in its own tokens (self-study, arXiv:2506.06266, 2602.16284).

A user's turn of one question of every kind: gathering, ordering, asking, using, going on.
"""

from __future__ import annotations

from typing import Any

from kvfold.errors import ModelError
from kvfold.models.repeat_prompt import repeat_request, tokenizer_of

QUESTIONS = (
    "Write down every name, number and date of the text above as JSON.",
    "What is the text above about? Name its parts in their order.",
    "Ask three questions about details of the text above, and answer each of them.",
    "What would somebody use the text above for, and what would they look up in it?",
    "Continue the text above as its author would.",
)


def question_ids(hf: Any) -> list[list[int]]:
    """Each question behind a text, up to where the model replies."""
    tokenizer = tokenizer_of(hf)
    if tokenizer is None:
        raise ModelError("self-study asks the model in words, and its tokenizer is not known; load it by kvfold.load")
    close = repeat_request(hf).close
    return [[*tokenizer(f"\n\n{text}", add_special_tokens=False)["input_ids"], *close] for text in QUESTIONS]
