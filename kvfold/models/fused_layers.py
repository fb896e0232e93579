"""Fused layers: QKV and gate-up projections as one matrix product each, RMSNorm and SwiGLU as one kernel each, on CUDA.

Between two attentions transformers launches some forty kernels, most of which read what the one before wrote. Here
linear layers of one input become one product (their weights move into one tensor, of which each is a view), and RMS
norms and gated MLPs one kernel each. Modules are exchanged while a context lasts. Modules of other types, and those
with hooks or a replaced forward, are left as they are. A layer under torch.compile gets the plain norms and gates,
which the compiler fuses with their neighbours; its one-row MLP products are kept from becoming reductions, which run no
faster and take twice as long to compile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules import module as modules

from kvfold.core import HAS_TRITON
from kvfold.models.attach import ModuleState
from kvfold.yielding import patched

_MOST_ROWS = 256  # of a joint product: with more, separate ones are as fast, and their outputs can be freed apart
_TOLERANCE = 0.02  # relative, of a fused module against the module it replaces, checked once per class


class Joint(nn.Module):
    """Linear layers of the same input as one matrix product (QKV, gate-up)."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        super().__init__()
        self.sizes = [linear.out_features for linear in linears]
        self.held: tuple[Tensor, tuple[Tensor, ...]] | None = None
        self.register_buffer("weight", _moved([linear.weight for linear in linears]), persistent=False)
        bias = None if linears[0].bias is None else _moved([linear.bias for linear in linears])
        self.register_buffer("bias", bias, persistent=False)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """The output of each layer, as views of one tensor."""
        parts: tuple[Tensor, ...] = product(x, self.weight, self.bias).split(self.sizes, dim=-1)
        return parts


class Part(nn.Module):
    """Replaces one of several linear layers that are called with the same input, one after another."""

    def __init__(self, plain: nn.Linear, joint: Joint, index: int) -> None:
        super().__init__()
        self.plain, self.joint, self.index = plain, joint, index

    def forward(self, x: Tensor) -> Tensor:
        if num_rows(x) > _MOST_ROWS or _is_reduced(x):
            out: Tensor = self.plain(x)
            return out
        held = self.joint.held
        if held is None or held[0] is not x:
            held = self.joint.held = x, self.joint(x)
        if self.index == len(held[1]) - 1:
            self.joint.held = None
        return held[1][self.index]


class Gated(nn.Module):
    """Replaces a SwiGLU MLP, down(silu(gate(x)) * up(x))."""

    def __init__(self, plain: Any) -> None:
        super().__init__()
        self.plain, self.joint = plain, Joint([plain.gate_proj, plain.up_proj])

    def forward(self, x: Tensor) -> Tensor:
        plain = self.plain
        gate, up = (plain.gate_proj(x), plain.up_proj(x)) if num_rows(x) > _MOST_ROWS else self.joint(x)
        if torch.compiler.is_compiling():
            x = functional.silu(gate) * up
        else:
            from kvfold.models.kernels import gated

            x = gated(gate, up)
        return product(x, plain.down_proj.weight, plain.down_proj.bias)


class Norm(nn.Module):
    """Replaces an RMSNorm."""

    def __init__(self, plain: Any) -> None:
        super().__init__()
        self.plain = plain

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            out: Tensor = self.plain(x)
            return out
        from kvfold.models.kernels import rms_norm

        return rms_norm(x, self.plain.weight, self.plain.variance_epsilon)


@torch.library.custom_op("kvfold::linear", mutates_args=())
def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`functional.linear`, opaque to torch.compile."""
    return functional.linear(x, weight, bias)


@_linear.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    out: Tensor = (_linear if _is_reduced(x) else functional.linear)(x, weight, bias)
    return out


def num_rows(x: Tensor) -> int:
    return x.numel() // x.shape[-1]


def _is_reduced(x: Tensor) -> bool:
    """Whether torch.compile makes the product a reduction, as it does for one row: that fuses with what follows."""
    return num_rows(x) == 1 and torch.compiler.is_compiling()


class Exchange(NamedTuple):
    """One module of the model and its replacement."""

    parent: nn.Module
    name: str
    plain: nn.Module
    fused: nn.Module

    @property
    def is_valid(self) -> bool:
        """False if the weights were moved to other storage since."""
        joint = getattr(self.fused, "joint", None)
        if joint is None:
            return True
        inside, whole = next(self.plain.parameters()), joint.weight
        return bool(inside.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr())


_exchanges: ModuleState[list[Exchange]] = ModuleState("fused_layers")


@contextmanager
def fused(hf: Any) -> Iterator[None]:
    """Run the model with fused layers while the context lasts; without CUDA or triton, unchanged."""
    if hf.device.type != "cuda" or not HAS_TRITON:
        yield
        return
    with exchanged(known(_exchanges, hf, attrgetter("is_valid"), exchanges)):
        yield


def known(
    state: ModuleState[list[Exchange]],
    hf: Any,
    is_valid: Callable[[Exchange], bool],
    make: Callable[[Any], list[Exchange]],
    hooked: ModuleState[list[nn.Module]] | None = None,
) -> list[Exchange]:
    """The exchanges of a model, made anew where one no longer holds, or where one of the modules that had hooks then,
    which `hooked` keeps, has none now."""
    found = state.get(hf)
    were_hooked = (hooked and hooked.get(hf)) or ()
    if found is not None and all(map(is_valid, found)) and not any(map(is_bare, were_hooked)):
        return found
    if hooked is not None:
        hooked.set(hf, [module for module in hf.modules() if not is_bare(module)])
    return state.set(hf, make(hf))


@contextmanager
def exchanged(found: Sequence[Exchange]) -> Iterator[None]:
    def apply() -> None:
        for exchange in found:
            exchange.parent._modules[exchange.name] = exchange.fused

    def undo() -> None:
        for exchange in found:
            exchange.parent._modules[exchange.name] = exchange.plain

    with patched(apply, undo):
        yield


@torch.inference_mode(False)
@torch.no_grad()
def exchanges(hf: nn.Module) -> list[Exchange]:
    """The modules of a model that have a fused replacement. Weights move here, once."""
    found: list[Exchange] = []
    tried: dict[type[nn.Module], bool] = {}
    for parent in list(hf.modules()):
        found += _projections(parent)
        for name, module in parent.named_children():
            kind = type(module)
            replacement = _replacement(module) if tried.get(kind, True) else None
            if replacement is None:
                continue
            if kind not in tried:
                tried[kind] = _agree(module, replacement)
            if tried[kind]:
                found.append(Exchange(parent, name, module, replacement))
    return found


def _projections(attention: nn.Module) -> list[Exchange]:
    names = ("q_proj", "k_proj", "v_proj")
    linears: list[Any] = [getattr(attention, name, None) for name in names]
    if not can_join(linears):
        return []
    joint = Joint(linears)
    return [
        Exchange(attention, name, linear, Part(linear, joint, index))
        for index, (name, linear) in enumerate(zip(names, linears, strict=True))
    ]


def _replacement(module: Any) -> nn.Module | None:
    if not is_bare(module):
        return None
    if type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon"):
        return Norm(module)
    linears = [getattr(module, name, None) for name in ("gate_proj", "up_proj")]
    if can_join(linears) and can_join([getattr(module, "down_proj", None)]):
        return Gated(module)
    return None


def can_join(linears: Sequence[Any]) -> bool:
    """Whether they are plain linear layers of one shape and dtype, without hooks."""
    if not all(type(linear) is nn.Linear and is_bare(linear) for linear in linears):
        return False
    kinds = {(linear.in_features, linear.weight.dtype, linear.weight.device, linear.bias is None) for linear in linears}
    return len(kinds) == 1


def is_bare(module: nn.Module) -> bool:
    """Whether it has no hooks, its own or those of all modules, and the forward of its class."""
    if modules._global_forward_hooks or modules._global_forward_pre_hooks:
        return False
    return not (module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__)


def _moved(tensors: Sequence[Tensor]) -> Tensor:
    """All of them concatenated; each becomes a view of the result."""
    joined = torch.cat([tensor.data for tensor in tensors])
    for tensor, part in zip(tensors, joined.split([len(tensor) for tensor in tensors]), strict=True):
        tensor.data = part
    return joined


def _agree(plain: nn.Module, replacement: nn.Module) -> bool:
    """Whether both agree on a random input."""
    weight = next(plain.parameters())
    generator = torch.Generator(weight.device).manual_seed(0)
    x = torch.randn(2, weight.shape[-1], generator=generator, device=weight.device).to(weight.dtype)
    expected, found = plain(x).float(), replacement(x).float()
    return bool((found - expected).norm() <= _TOLERANCE * expected.norm())
