"""Decoder layers on a CPU: norms, rotary embedding and SwiGLU compiled by numba, between matrix products.

A layer of transformers is some thirty operations and a dozen modules beside its products. For the 16 rows of a decode
step calling them takes a quarter of the time; for the rows of a chunk each reads and writes what no cache holds. Layers
that are made as Llama's are replaced while the model runs, if they give the same on random rows; all others, and calls
with one row, run as they are.

    N rows   M hidden dims   Q query heads   H KV heads   D head dim
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from kvfold.models import cpu_linear, cpu_rows
from kvfold.models.attach import ModuleState, is_attached, maskless
from kvfold.models.cpu_decoder import Decoder, Parts, fused_mlp, normed_products
from kvfold.models.cpu_linear import FewRows, Group, is_served, padded_rows
from kvfold.models.fused_layers import Exchange, exchanged, is_bare, known
from kvfold.models.pass_cache import ForwardCache

_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 2e-2}  # relative, of a layer against the one it replaces
_NAMES = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
_GATED = ("gate_proj", "up_proj", "down_proj")
_SILU = ("SiLU", "SiLUActivation")


def parts_of(layer: nn.Module) -> Parts | None:
    """None where a layer is not made as Llama's, or has hooks."""
    children: dict[str, Any] = layer._modules
    if children.keys() != _NAMES:
        return None
    attention, mlp = children["self_attn"], children["mlp"]
    norms = children["input_layernorm"], children["post_attention_layernorm"]
    if not all(map(is_bare, (layer, attention, mlp, *norms))) or not all(map(_is_rms_norm, norms)):
        return None
    groups = *_groups(attention, _PROJECTIONS), *_groups(mlp, _GATED)
    if len(groups) != len(_PROJECTIONS) + len(_GATED) or not _is_silu(mlp._modules.get("act_fn")):
        return None
    qkv, _, _, out, gate_up, _, down = groups
    return Parts(attention, mlp, *norms, qkv, out, gate_up, down)


def _groups(parent: nn.Module, names: tuple[str, ...]) -> tuple[Group, ...]:
    """The groups of these linear layers, if they are replaced, and there are no other modules with weights."""
    found = tuple(module.group for name in names if isinstance(module := parent._modules.get(name), FewRows))
    return found if parent._modules.keys() - {"act_fn"} == set(names) else ()


def _is_rms_norm(module: Any) -> bool:
    if not (type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon")):
        return False
    weight = module.weight
    return type(weight) is nn.Parameter and weight.dtype in _TOLERANCE and weight.is_contiguous()


def _is_silu(module: Any) -> bool:
    kind = type(module)
    return kind.__name__ in _SILU and kind.__module__.startswith(("torch.", "transformers.")) and is_bare(module)


class CompiledLayer(nn.Module):
    """Replaces a decoder layer."""

    def __init__(self, plain: nn.Module, parts: Parts) -> None:
        super().__init__()
        self.plain, self.parts, self.is_fused, self.shapes = plain, parts, parts.can_fuse, parts.shapes
        self.decoder: Decoder | None = None  # of the first layer, where all run in one call

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("plain"), name)

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Any:
        cache, angles = kwargs.get("past_key_values"), kwargs.get("position_embeddings")
        is_usual = kwargs.get("attention_mask") is None and not kwargs.get("output_attentions")
        if not (is_usual and isinstance(cache, ForwardCache) and angles is not None and is_served(hidden_states)):
            return self.plain(hidden_states, **kwargs)
        parts, (size, dtype) = self.parts, (hidden_states.shape[-1], hidden_states.dtype)
        if angles[0].shape[-1] != parts.attention.head_dim or (size, dtype) != (len(parts.before.weight), parts.dtype):
            return self.plain(hidden_states, **kwargs)
        if cache.has_run:  # with the first layer
            cache.take_layer(parts.attention.layer_idx)
            return hidden_states
        if self.decoder is not None and cpu_linear.is_few(hidden_states):
            state = cache.all_layers()
            if state is not None and len(state.scale_L) == len(self.decoder):
                cache.has_run = True
                found = self.decoder.run(hidden_states, _angles(cache, *angles), state)
                cache.take_layer(parts.attention.layer_idx)
                return found
        return self._run(hidden_states, cache, *angles)

    def _run(self, hidden_states: Tensor, cache: ForwardCache, cos: Tensor, sin: Tensor) -> Tensor:
        """[1, N, M]"""
        num_rows, angles = hidden_states.shape[1], _angles(cache, cos, sin)
        q_1QND, k_1HND, v_1HND = (self._heads(x, num_rows) for x in self._qkv(hidden_states, angles))
        keys, _ = cache.update(k_1HND, v_1HND, self.parts.attention.layer_idx)
        first = num_rows - _num_wanted(cache, num_rows)
        attended = keys.attend(q_1QND[:, :, first:], None)[0].flatten(1)
        return self._mlp(hidden_states[:, first:], attended) if first < num_rows else hidden_states[:, first:]

    def _qkv(self, hidden_states: Tensor, angles: cpu_rows.Angles) -> list[Tensor]:
        """Queries, keys and values [N, X], maybe with rows of padding; queries and keys are rotated."""
        parts = self.parts
        if self._are_tiled(hidden_states):
            return cpu_rows.qkv_bf16(parts, hidden_states[0].contiguous(), angles)
        x_NM = padded_rows(hidden_states, parts.dtype)
        if self.is_fused and cpu_linear.is_few(hidden_states):
            q, k, v = normed_products(parts, x_NM)
            cpu_rows.rotate(q, k, angles, is_bf16=parts.dtype == torch.bfloat16)
        else:
            q, k, v = cpu_rows.qkv(parts, x_NM, angles)
        return list(map(torch.from_numpy, (q, k, v)))

    def _mlp(self, hidden_states: Tensor, attended: Tensor) -> Tensor:
        """The output projection and the MLP, [1, N, M]."""
        parts = self.parts
        if self._are_tiled(hidden_states):
            return cpu_rows.mlp_bf16(parts, hidden_states[0].contiguous(), attended).unsqueeze(0)
        x_NM, attended_NX = (padded_rows(x, parts.dtype) for x in (hidden_states, attended))
        is_fused = self.is_fused and cpu_linear.is_few(hidden_states)
        found = (fused_mlp if is_fused else cpu_rows.mlp)(parts, x_NM, attended_NX)
        return torch.from_numpy(found[: hidden_states.shape[1]]).unsqueeze(0).to(hidden_states.dtype)

    def _are_tiled(self, hidden_states: Tensor) -> bool:
        """Whether so many rows are multiplied by tiles that read packed weights."""
        is_bf16 = hidden_states.dtype == torch.bfloat16
        return is_bf16 and not cpu_linear.is_few(hidden_states) and cpu_rows.has_whole_tiles(self.parts)

    def _heads(self, x_NX: Tensor, num_rows: int) -> Tensor:
        """[1, heads, N, D]"""
        return x_NX[:num_rows].view(1, num_rows, -1, self.parts.attention.head_dim).transpose(1, 2)


def _angles(cache: ForwardCache, cos: Tensor, sin: Tensor) -> cpu_rows.Angles:
    """Cosines and sines as arrays: as a rule those of the layer before."""
    if cache.angles is None or cache.angles[0] is not cos:
        cos_ND, sin_ND = (x[0].float().contiguous().numpy() for x in (cos, sin))
        cache.angles = cos, cos_ND, sin_ND
    return cache.angles[1:]


def _num_wanted(cache: ForwardCache, num_rows: int) -> int:
    """Of so many rows; kernels take two at least."""
    if not cache.num_wanted:
        return num_rows if cache.num_wanted is None else 0
    return min(max(cache.num_wanted, 2), num_rows)


_exchanges: ModuleState[list[Exchange]] = ModuleState("cpu_layers")
_hooked: ModuleState[list[nn.Module]] = ModuleState("cpu_layers_hooked")


@contextmanager
def compiled_layers(hf: Any) -> Iterator[None]:
    """Run decoder layers by kernels while the context lasts, where their linear layers are (`few_rows`)."""
    if hf.device.type != "cpu" or not is_attached(hf) or not cpu_linear.is_wanted():
        _exchanges.clear(hf)
        yield
        return
    with exchanged(known(_exchanges, hf, _is_valid, layer_exchanges, _hooked)):
        yield


def _is_valid(exchange: Exchange) -> bool:
    """False if the layer was replaced or changed since."""
    found, parts = exchange.parent._modules[exchange.name], parts_of(exchange.plain)
    if parts is None or not (found is exchange.plain or found is exchange.fused):
        return False
    compiled: Any = exchange.fused
    same = all(map(is_, parts, compiled.parts)) and compiled.is_fused == parts.can_fuse
    return same and compiled.shapes == parts.shapes


@torch.no_grad()
def layer_exchanges(hf: Any) -> list[Exchange]:
    """The layers of an attached model that have a replacement, while their linear layers are replaced."""
    parent, found = hf.base_model.layers, []
    for name, module in parent._modules.items():
        layer = module.plain if isinstance(module, CompiledLayer) else module  # another thread may have exchanged it
        parts = parts_of(layer)
        if parts is not None and parts.fits and _agree(layer, replacement := CompiledLayer(layer, parts)):
            found.append(Exchange(parent, name, layer, replacement))
    if len(found) == len(parent) == hf.base_model.config.num_hidden_layers:
        compiled: list[Any] = [exchange.fused for exchange in found]
        compiled[0].decoder = Decoder.over([one.parts for one in compiled])
    return found


class _Echo(ForwardCache):
    """Attention that gives back queries, keys and values."""

    def attend(self, layer: int, q_QND: Tensor, k_HND: Tensor, v_HND: Tensor) -> Tensor:
        group = len(q_QND) // len(k_HND)
        return (q_QND + (k_HND - 2 * v_HND).repeat_interleave(group, 0)).transpose(0, 1)


def _agree(plain: nn.Module, replacement: CompiledLayer) -> bool:
    """Whether both give the same for random rows. Layers of one class may differ: some have no rotary embedding."""
    generator, parts = torch.Generator().manual_seed(0), replacement.parts
    x = torch.randn(1, 3, parts.before.weight.shape[0], generator=generator).to(parts.dtype)
    angle = torch.rand(1, 3, parts.attention.head_dim // 2, generator=generator).repeat(1, 1, 2)
    angles = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    position_ids = torch.arange(3).unsqueeze(0)
    with maskless():
        expected = plain(
            x, attention_mask=None, position_embeddings=angles, position_ids=position_ids, past_key_values=_Echo()
        )
    found = replacement._run(x, _Echo(), *angles)
    same_shape = isinstance(expected, Tensor) and expected.shape == found.shape
    expected, found, x = expected.float(), found.float(), x.float()
    return same_shape and bool((found - expected).norm() <= _TOLERANCE[parts.dtype] * (expected - x).norm())
