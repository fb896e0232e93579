"""The repeat prompt of KVzip's context reconstruction (arXiv:2505.23416), in the model's own tokens.

    | … context |  "Repeat …", last tokens before the chunk, end of the user's turn  | the chunk again

A model whose tokenizer is not known reconstructs without a prompt.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from kvfold.errors import ModelError
from kvfold.models.chat_template import ChatTemplate
from kvfold.models.module_state import ModuleState
from kvfold.yielding import patched

_FIRST = "\n\nRepeat the previous context exactly."
_LATER = "\n\nRepeat the part of the previous context exactly, starting with"
_NUM_LAST = 8  # tokens before a later chunk that tell where it starts


@dataclass(frozen=True)
class RepeatRequest:
    """Token ids: prompt for the first chunk, prompt for later ones, and the template text that opens the reply."""

    first: tuple[int, ...] = ()
    later: tuple[int, ...] = ()
    close: tuple[int, ...] = ()

    @classmethod
    def of(cls, tokenizer: Any) -> RepeatRequest:
        texts = _FIRST, _LATER, _close(tokenizer)
        return cls(*(tuple(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts))

    def before(self, read: Sequence[int]) -> list[int]:
        """Prompt tokens before a chunk, given the context tokens before it."""
        if not read:
            return [*self.first, *self.close]
        return [*self.later, *read[-_NUM_LAST:], *self.close] if self.later else []


def _close(tokenizer: Any) -> str:
    try:
        template = ChatTemplate.of(tokenizer)
    except ModelError:  # it cannot be cut into turns, so no session uses it either
        template = None
    return "\n" if template is None else template.close


_tokenizer: ModuleState[Any] = ModuleState("tokenizer")
_repeat_request: ModuleState[RepeatRequest] = ModuleState("repeat_request")


def set_tokenizer(hf: nn.Module, tokenizer: Any) -> None:
    """Prompts for this model are tokenized by this tokenizer."""
    _tokenizer.set(hf, tokenizer)
    _repeat_request.clear(hf)


def tokenizer_of(hf: nn.Module) -> Any:
    """The model's tokenizer, or None."""
    return _tokenizer.get(hf)


def repeat_request(hf: nn.Module) -> RepeatRequest:
    """The model's repeat prompt, tokenized at first use."""
    known, tokenizer = _repeat_request.get(hf), _tokenizer.get(hf)
    if known is None:
        known = _repeat_request.set(hf, RepeatRequest() if tokenizer is None else RepeatRequest.of(tokenizer))
    return known


@contextmanager
def rotary_kept(hf: Any) -> Iterator[None]:
    """Restore rotary frequencies on exit: length-dependent RoPE scaling follows the largest position that ran."""
    module = getattr(hf.base_model, "rotary_emb", None)
    if module is None:
        yield
        return
    others = _rotary_state(module)

    def swap() -> None:
        nonlocal others
        mine = _rotary_state(module)
        module._buffers.update(others[0])
        vars(module).update(others[1])
        others = mine

    with patched(swap, swap):  # the first time they are the same
        yield


def _rotary_state(module: Any) -> tuple[dict[str, Any], dict[str, int | float]]:
    return dict(module._buffers), {k: value for k, value in vars(module).items() if isinstance(value, (int, float))}
