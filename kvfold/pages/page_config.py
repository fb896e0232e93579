"""The pages of each layer under a policy: page size, codecs, low-rank bases, and how many full-precision sinks."""

from __future__ import annotations

from dataclasses import dataclass

from kvfold.codec.base import Codec, Side
from kvfold.codec.basis import Basis, LowRankCodec
from kvfold.core import ModelSpec
from kvfold.errors import InputError
from kvfold.pages.arena import Arena
from kvfold.pages.layer import LayerPages
from kvfold.pages.layout import PageClass
from kvfold.pages.open_block import OpenBlock
from kvfold.policy.policy import Policy


@dataclass(frozen=True)
class PageConfig:
    """Page size and open block are independent; a codec's group is its own argument."""

    page_size: int = 16
    open_len: int = 32

    def __post_init__(self) -> None:
        for name, value in (("page_size", self.page_size), ("open_len", self.open_len)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise InputError(f"{name} is {value!r}; it must be a whole number of at least 1")


def layer_pages(spec: ModelSpec, policy: Policy, config: PageConfig, index: int, arena: Arena) -> LayerPages:
    """One layer of an empty segment."""
    codecs = _codecs(spec, policy, index)
    bases = {
        side: codec.basis(side, spec, index, arena.device) for side, codec in codecs if isinstance(codec, LowRankCodec)
    }
    page_class = _page_class(spec, policy, config, index, bases)
    return LayerPages(page_class, spec.layers[index].num_kv_heads, bases=bases)


def _codecs(spec: ModelSpec, policy: Policy, index: int) -> tuple[tuple[Side, Codec], ...]:
    """Of the sides of a layer that has a choice."""
    if not spec.layers[index].compressible:
        return ()
    k, v = policy.codec.sides(index, spec.num_layers)
    return ("k", k), ("v", v)


def _page_class(spec: ModelSpec, policy: Policy, config: PageConfig, index: int, bases: dict[Side, Basis]) -> PageClass:
    layer = spec.layers[index]
    if not layer.compressible:
        native = OpenBlock.page_class(layer.head_dim, spec.kv_dtype, 1)
        return PageClass(native.k, native.v, layer.head_dim, spec.kv_dtype, config.page_size)
    k, v = policy.codec.sides(index, spec.num_layers)
    group = max(k.group("k"), v.group("v"))
    widths = {side: basis.width for side, basis in bases.items()}
    return PageClass(
        k,
        v,
        layer.head_dim,
        spec.kv_dtype,
        -(-config.page_size // group) * group,
        reader=policy.attend.at(index),
        has_bias=policy.prefill.evicted.has_bias,
        k_width=widths.get("k"),
        v_width=widths.get("v"),
    )


def num_fp_sinks(policy: Policy, spec: ModelSpec) -> int:
    """Sinks that a policy keeps in full precision: those its codecs ask for and that are never evicted; 0 if slots have
    biases, if keys are rotated when read, or if decoding adds up attention mass."""
    wanted = max((codec_fp_sinks(policy, spec, layer) for layer in spec.compressible_layers), default=0)
    observes_mass = policy.decode.evicts and policy.decode.score.needs.mass
    if policy.prefill.evicted.has_bias or policy.position.shifts or observes_mass:
        return 0
    return min([wanted, *(stage.protect.sinks for _, stage in policy.stages() if stage.evicts)])


def codec_fp_sinks(policy: Policy, spec: ModelSpec, layer: int) -> int:
    """Full-precision sinks that the codecs of a layer ask for."""
    return max(codec.fp_sinks for codec in policy.codec.sides(layer, spec.num_layers))
