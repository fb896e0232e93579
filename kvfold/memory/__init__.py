"""Facts that users stated, kept over conversations: written without a model, superseded by dates, really forgotten.

`kvfold.memory.Memory` is what a program calls; numpy is imported with it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvfold.memory.fact import Fact
    from kvfold.memory.memory import Memory
    from kvfold.memory.recall import Recalled

__all__ = ["Fact", "Memory", "Recalled"]
_SOURCES = {"Fact": "kvfold.memory.fact", "Memory": "kvfold.memory.memory", "Recalled": "kvfold.memory.recall"}


def __getattr__(name: str) -> Any:
    if name not in _SOURCES:
        raise AttributeError(f"module 'kvfold.memory' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(_SOURCES[name]), name)
