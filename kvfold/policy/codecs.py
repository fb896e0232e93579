"""Which codec stores which side of which layer: the `codec` part of a policy.

Keys and values take different errors (arXiv:2402.02750), and the first and last layers often bear none, so a plan has
a codec per side and a Python slice of layers; the layers outside it stay `native`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvfold.errors import PolicyError
from kvfold.policy.defaults import default

if TYPE_CHECKING:
    from kvfold.codec.base import Codec


@dataclass(frozen=True)
class LayerSlice:
    """`2:-2`, as in Python; a bound that changes nothing (start 0, step 1) is the same as none."""

    start: int | None = None
    stop: int | None = None
    step: int | None = None

    def __post_init__(self) -> None:
        if self.step is not None and self.step < 1:
            raise PolicyError(f"layers={self}: the step of a slice of layers is at least 1")
        object.__setattr__(self, "start", self.start or None)
        object.__setattr__(self, "step", None if self.step == 1 else self.step)

    @property
    def is_all(self) -> bool:
        return self == LayerSlice()

    def holds(self, layer: int, num_layers: int) -> bool:
        return layer in range(*slice(self.start, self.stop, self.step).indices(num_layers))

    def __str__(self) -> str:
        bounds = [self.start, self.stop] if self.step is None else [self.start, self.stop, self.step]
        return ":".join("" if bound is None else str(bound) for bound in bounds)


@dataclass(frozen=True)
class CodecPlan:
    """Codecs of keys and values for the layers of a slice."""

    k: Codec
    v: Codec
    layers: LayerSlice = LayerSlice()

    def sides(self, layer: int, num_layers: int) -> tuple[Codec, Codec]:
        """Codecs of the keys and of the values of one layer."""
        if self.layers.holds(layer, num_layers):
            return self.k, self.v
        native: Codec = default("codec")
        return native, native

    @property
    def codecs(self) -> tuple[Codec, ...]:
        """Every codec that some layer may use, each once."""
        outside = () if self.layers.is_all else (default("codec"),)
        return tuple(dict.fromkeys((self.k, self.v, *outside)))
