"""How a model is asked to repeat what it has read (KVzip, arXiv:2505.23416), in its own tokens.

    | … text |  "Repeat …", where later chunks start, end of the user's turn  | the chunk again

The request is remembered with the model when its tokenizer is known; a model without one repeats without being asked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from kvfold.errors import ModelError
from kvfold.models.chat_template import ChatTemplate
from kvfold.yielding import patched

_FIRST = "\n\nRepeat the previous context exactly."
_LATER = "\n\nRepeat the part of the previous context exactly, starting with"
_NUM_LAST = 8  # tokens before a later chunk that tell where it starts


@dataclass(frozen=True)
class RepeatRequest:
    """Token ids: of the request for the first chunk, of that for later ones, and of what lets the model reply."""

    first: tuple[int, ...] = ()
    later: tuple[int, ...] = ()
    close: tuple[int, ...] = ()

    @classmethod
    def of(cls, tokenizer: Any) -> RepeatRequest:
        texts = _FIRST, _LATER, _close(tokenizer)
        return cls(*(tuple(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts))

    def before(self, read: Sequence[int]) -> list[int]:
        """What comes before a chunk, given the tokens of the text before it."""
        if not read:
            return [*self.first, *self.close]
        return [*self.later, *read[-_NUM_LAST:], *self.close] if self.later else []


def _close(tokenizer: Any) -> str:
    try:
        template = ChatTemplate.of(tokenizer)
    except ModelError:  # it cannot be cut into turns, so nobody talks to the model through it
        template = None
    return "\n" if template is None else template.close


_tokenizers: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()
_requests: WeakKeyDictionary[nn.Module, RepeatRequest] = WeakKeyDictionary()


def set_tokenizer(hf: nn.Module, tokenizer: Any) -> None:
    """Let the model be asked in the tokens of this tokenizer."""
    _tokenizers[hf] = tokenizer
    _requests.pop(hf, None)


def tokenizer_of(hf: nn.Module) -> Any:
    """The model's tokenizer, or None."""
    return _tokenizers.get(hf)


def repeat_request(hf: nn.Module) -> RepeatRequest:
    """The model's request, made when it is first needed."""
    if hf not in _requests:
        _requests[hf] = RepeatRequest.of(_tokenizers[hf]) if hf in _tokenizers else RepeatRequest()
    return _requests[hf]


@contextmanager
def rotary_kept(hf: Any) -> Iterator[None]:
    """Put rotary frequencies back: those that depend on the length follow the longest position that was read."""
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
