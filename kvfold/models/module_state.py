"""State that kvfold keeps with a transformers module: its arena, CUDA graphs, fused layers, tokenizer.

It lives in one attribute of the module and is freed with it. Copies and pickles of the module do not have it.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar
from weakref import ref

_ATTRIBUTE = "_kvfold_state"
T = TypeVar("T")


class _State:
    """Values by name, of one module."""

    def __init__(self, module: Any = None) -> None:
        self.module = None if module is None else ref(module)  # a shallow copy shares the attribute, not the state
        self.values: dict[str, Any] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> _State:
        return _State()

    def __reduce__(self) -> tuple[type[_State], tuple[()]]:
        return _State, ()


class ModuleState(Generic[T]):
    """One named value per module."""

    def __init__(self, name: str) -> None:
        self._name = name

    def get(self, module: Any) -> T | None:
        found: T | None = _values(module).get(self._name)
        return found

    def set(self, module: Any, value: T) -> T:
        _values(module)[self._name] = value
        return value

    def clear(self, module: Any) -> None:
        _values(module).pop(self._name, None)


def _values(module: Any) -> dict[str, Any]:
    state = getattr(module, _ATTRIBUTE, None)
    if state is None or state.module is None or state.module() is not module:
        state = _State(module)
        setattr(module, _ATTRIBUTE, state)
    values: dict[str, Any] = state.values
    return values
