"""Prompts of replays, in the model's own tokens, and what a replay changes or reads in the model.

KVzip's context reconstruction (arXiv:2505.23416) asks the model to repeat the text:

    | … context |  "Repeat …", last tokens before the chunk, end of the user's turn  | the chunk again

A model whose tokenizer is not known reconstructs without a prompt. Self-study (arXiv:2506.06266, 2602.16284) asks
generic questions about any context, one of each kind: structuring, summarisation, question generation, use cases,
continuation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from kvfold.errors import ModelError
from kvfold.models.attach import ModuleState
from kvfold.models.chat_template import ChatTemplate
from kvfold.models.spec import attention_modules
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


@contextmanager
def hidden_norms(hf: Any, note: Callable[[Tensor], None]) -> Iterator[None]:
    """Call note(norm_T), fp32, before the attention of each layer runs, for a batch of one."""

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden_TM = (args[0] if args else kwargs["hidden_states"])[0]
        note(hidden_TM.float().norm(dim=-1))

    handles: list[Any] = []

    def apply() -> None:
        handles.extend(module.register_forward_pre_hook(before, with_kwargs=True) for module in attention_modules(hf))

    def undo() -> None:
        while handles:
            handles.pop().remove()

    with patched(apply, undo):
        yield
