"""Norms of the hidden states at the input of each attention layer, by forward hooks.

T tokens
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from kvfold.models.spec import attention_modules
from kvfold.yielding import patched


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
