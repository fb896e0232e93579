"""Attach kvfold to a transformers model: an attention and a mask function registered as "kvfold", undone on exit.

On plain tensors the attention function is `sdpa`, bit for bit. Where the `update` of a kvfold cache returned a handle
in place of keys, the handle computes attention over the paged KV cache. Nothing is registered before `attach` is
called, and no class is ever patched. State that kvfold keeps with a module (its arena, CUDA graphs, fused layers,
tokenizer) lives in one attribute of it and is freed with it; copies and pickles of the module do not have it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from threading import RLock
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable
from weakref import ref

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from kvfold.core import ModelSpec
from kvfold.errors import InputError, ModelError
from kvfold.models.own_model import warn_of_emulated_bf16
from kvfold.models.spec import decoder_layers, read_spec
from kvfold.pages.arena import Arena
from kvfold.policy.size import parse_bytes
from kvfold.yielding import patched

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


_creating = RLock()


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

    def made(self, module: Any, make: Callable[[], T]) -> T:
        """The value, made if there is none; of threads that ask at once, by one."""
        with _creating:
            found = self.get(module)
            return self.set(module, make()) if found is None else found


def _values(module: Any) -> dict[str, Any]:
    state = getattr(module, _ATTRIBUTE, None)
    if state is None or state.module is None or state.module() is not module:
        state = _State(module)
        setattr(module, _ATTRIBUTE, state)
    values: dict[str, Any] = state.values
    return values


NAME = "kvfold"
_ATTACHED = "_kvfold_attached"  # attribute of an attached model
_UNSUPPORTED = ("softcap", "s_aux", "position_bias", "head_mask")
_maskless: ContextVar[bool] = ContextVar("kvfold_maskless", default=False)


@runtime_checkable
class Handle(Protocol):
    """What the `update` of kvfold's caches returns in place of keys."""

    def attend(self, query: Tensor, mask: Tensor | None) -> Tensor:
        """[B, Q, T, D] -> [B, T, Q, D]"""


def attention(
    module: nn.Module, query: Tensor, key: Any, value: Any, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """The registered attention function."""
    if not isinstance(key, Handle):
        found: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
        return found
    for name in _UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise ModelError(f"{type(module).__name__} asks for `{name}` in attention, which kvfold does not support")
    check = getattr(key, "check", None)  # of a drop-in cache, whose input the runner did not prepare
    if check is not None:
        check(module, kwargs.get("position_ids"))
    return key.attend(query, attention_mask), None


def mask(**kwargs: Any) -> Tensor | None:
    """The registered mask function: that of sdpa; None inside the runner, which masks by lengths."""
    if _maskless.get():
        return None
    found: Tensor | None = sdpa_mask(**kwargs)
    return found


@contextmanager
def maskless() -> Iterator[None]:
    token = _maskless.set(True)
    try:
        yield
    finally:
        _maskless.reset(token)


@dataclass
class _Attached:
    """The attention implementation that the model had, and how often it was attached since."""

    before: str
    count: int = 0


class attach:
    """Make `model` able to use kvfold's caches. Call it, or use it in a `with` statement to have it undone.

    A model that is attached several times gets its own attention back at the last detach.
    """

    def __init__(self, model: Any) -> None:
        self.model = model = module_of(model)
        self.spec: ModelSpec = spec_of(model)
        if not is_attached(model):
            warn_of_emulated_bf16(model)
            AttentionInterface.register(NAME, attention)
            AttentionMaskInterface.register(NAME, mask)
            setattr(model, _ATTACHED, _Attached(model.config._attn_implementation))
            model.set_attn_implementation(NAME)
        elif not hasattr(model, _ATTACHED):  # it was loaded under our name
            setattr(model, _ATTACHED, _Attached("sdpa"))
        getattr(model, _ATTACHED).count += 1
        self._is_undone = False

    def detach(self) -> None:
        """Undo this attach; the last one restores the attention implementation that the model had."""
        if self._is_undone:
            return
        self._is_undone = True
        found: _Attached = getattr(self.model, _ATTACHED)
        found.count -= 1
        if found.count == 0:
            delattr(self.model, _ATTACHED)
            if is_attached(self.model):  # no other implementation was set since
                self.model.set_attn_implementation(found.before)

    def __enter__(self) -> attach:
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()


_arena: ModuleState[Arena] = ModuleState("arena")
_arena_bytes: ModuleState[int] = ModuleState("arena_bytes")


def bound_arena(model: Any, capacity_bytes: int) -> None:
    """How large the arena of a model will be, whoever asks for it first."""
    _arena_bytes.set(model, capacity_bytes)


def arena_of(model: Any, capacity_bytes: int | None = None) -> Arena:
    """The arena (KV page pool) of a model, allocated at first use and shared by its sessions and caches."""
    known = _arena.get(model)
    if known is None:
        capacity = capacity_bytes or _arena_bytes.get(model) or default_capacity(model.device)
        known = _arena.set(model, Arena(capacity, device=model.device))
    elif capacity_bytes is not None and capacity_bytes // known.superblock_bytes != known.num_superblocks:
        raise InputError(
            f"the model has an arena of {known.capacity_bytes} bytes already, not of {capacity_bytes}; "
            "give the memory when it is first loaded"
        )
    return known


def set_arena(model: Any, arena: Arena) -> None:
    """Give a model an arena of your own making, before its first session or after all were closed."""
    known = _arena.get(model)
    if known is not None and known.used_bytes:
        raise InputError(f"{known.used_bytes} bytes of the model's arena are in use; close its sessions first")
    _arena.set(model, arena)


def check_memory(memory: str | int | None, device: torch.device) -> int | None:
    """Bytes of an arena; InputError if they are more than the device has."""
    if memory is None:
        return None
    num_bytes, most = parse_bytes(memory), _device_bytes(device)
    if num_bytes > most:
        where = "this machine" if device.type == "cpu" else str(device)
        asked, there = f"{num_bytes / 1e9:,.1f} GB", f"{most / 1e9:,.1f} GB"
        raise InputError(f"memory: {asked} are more than the {there} of {where}; give less")
    return num_bytes


def _device_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def default_capacity(device: torch.device) -> int:
    """Half of a CPU's memory (committed only as it is written), or 70 % of what a GPU has free."""
    if device.type == "cuda":
        return int(0.7 * torch.cuda.mem_get_info(device)[0])
    return _device_bytes(device) // 2


def module_of(model: Any) -> Any:
    """The transformers module of what `kvfold.load` or `wrap` returned, or the module itself."""
    return model if isinstance(model, nn.Module) else getattr(model, "hf", model)


def spec_of(model: Any) -> ModelSpec:
    """The spec of a model or module; the dtype of its cache may be smaller than that of its weights."""
    return read_spec(model, _kv_dtype.get(model)) if isinstance(model, nn.Module) else model.spec


_kv_dtype: ModuleState[torch.dtype] = ModuleState("kv_dtype")


def set_kv_dtype(model: nn.Module, dtype: torch.dtype) -> None:
    """The dtype of all caches of a module, where it is not the one of its weights."""
    _kv_dtype.set(model, dtype)


def is_attached(model: Any) -> bool:
    return bool(model.config._attn_implementation == NAME)


@contextmanager
def layers_wrapped(model: Any, wrap: Any) -> Iterator[None]:
    """Replace each decoder layer's forward by wrap(index, forward) while the context lasts."""
    layers = decoder_layers(model)
    before = [layer.__dict__.get("forward") for layer in layers]  # others may have wrapped it (offloading hooks)
    wrapped = [wrap(index, layer.forward) for index, layer in enumerate(layers)]

    def apply() -> None:
        for layer, forward in zip(layers, wrapped, strict=True):
            layer.forward = forward

    def undo() -> None:
        for layer, forward in zip(layers, before, strict=True):
            layer.__dict__.pop("forward", None)
            if forward is not None:
                layer.forward = forward

    with patched(apply, undo):
        yield
