"""The pages of each layer under a policy: page size, codecs, low-rank bases, and how many full-precision sinks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvfold.codec.base import SIDES, Side
from kvfold.codec.basis import Basis, LowRankCodec
from kvfold.codec.native import Native
from kvfold.core import ModelSpec
from kvfold.errors import InputError
from kvfold.pages.arena import Arena
from kvfold.pages.layer import Changes, LayerPages
from kvfold.pages.layout import PageClass
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


_MOST_KNOWN = 64  # policies of an arena


class LayerLayout(NamedTuple):
    """What the pages of a layer are like in every sequence of a policy."""

    page_class: PageClass
    num_heads: int
    bases: Mapping[Side, Basis]


class SequenceLayout(NamedTuple):
    """What every sequence of a policy begins with."""

    layers: Sequence[LayerLayout]
    num_fp_sinks: int

    def empty_layers(self) -> list[LayerPages]:
        """Those of an empty segment."""
        changes = Changes()  # of all of them
        return [LayerPages(page_class, num, bases=bases, changes=changes) for page_class, num, bases in self.layers]


def sequence_layout(spec: ModelSpec, policy: Policy, config: PageConfig, arena: Arena) -> SequenceLayout:
    key, known = (spec, policy, config), arena.derived
    found: SequenceLayout | None = known.get(key)
    if found is None:
        layers = [_layer_layout(spec, policy, config, i, arena) for i in range(spec.num_layers)]
        found = SequenceLayout(layers, num_fp_sinks(policy, spec))
        if not any(layer.bases for layer in layers):  # they may be calibrated anew
            if len(known) >= _MOST_KNOWN:
                known.clear()
            known[key] = found
    return found


def _layer_layout(spec: ModelSpec, policy: Policy, config: PageConfig, index: int, arena: Arena) -> LayerLayout:
    layer = spec.layers[index]
    if not layer.compressible:
        page_class = PageClass(Native(), Native(), layer.head_dim, spec.kv_dtype, config.page_size)
        return LayerLayout(arena.intern(page_class), layer.num_kv_heads, {})
    k, v = policy.codec.sides(index, spec.num_layers)
    sides = zip(SIDES, (k, v), strict=True)
    bases = {
        side: codec.basis(side, spec, index, arena.device) for side, codec in sides if isinstance(codec, LowRankCodec)
    }
    widths = {side: basis.width for side, basis in bases.items()}
    group = max(k.group("k"), v.group("v"))
    page_class = PageClass(
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
    return LayerLayout(arena.intern(page_class), layer.num_kv_heads, bases)


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
