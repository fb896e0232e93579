"""Self-study prompts (arXiv:2506.06266, 2602.16284): generic questions about any context, in the model's own tokens.

One question of each kind: structuring, summarisation, question generation, use cases, continuation.
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
    """Each question as a user turn after the context, up to where the reply starts."""
    tokenizer = tokenizer_of(hf)
    if tokenizer is None:
        raise ModelError("self-study asks questions, and its tokenizer is not known; load the model by kvfold.load")
    close = repeat_request(hf).close
    return [[*tokenizer(f"\n\n{text}", add_special_tokens=False)["input_ids"], *close] for text in QUESTIONS]
