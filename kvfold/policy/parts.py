"""The parts of a policy, a field per axis: what each phase keeps, and what both phases share.

Keys and values take different errors (arXiv:2402.02750), and the first and last layers often bear none, so a codec plan
has a codec per side and a Python slice of layers; the layers outside it stay `native`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from kvfold.errors import PolicyError
from kvfold.policy.reader import Reader
from kvfold.policy.registry import Term, default, named, nested

if TYPE_CHECKING:
    from kvfold.budget.base import Allocator
    from kvfold.codec.base import Codec
    from kvfold.evicted.base import Evicted, PagedRecall
    from kvfold.policy.size import Size
    from kvfold.position import Position
    from kvfold.protect import Protect
    from kvfold.score.base import Scorer
    from kvfold.shortening.shorten import Shorten
    from kvfold.token_pruning import TokenPruning
    from kvfold.triggers import Trigger


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


STAGE_AXES = ("score", "budget", "size", "when", "protect", "evicted")


@dataclass(frozen=True)
class Stage:
    """The choices of one phase, a field per axis; without a size nothing is evicted and the score is `full`."""

    score: Scorer
    budget: Allocator
    size: Size | None
    when: Trigger
    protect: Protect
    evicted: Evicted

    @property
    def evicts(self) -> bool:
        return self.size is not None

    @property
    def may_evict(self) -> bool:
        """Whether a trigger can fire."""
        return self.evicts and self.when.can_fire

    @property
    def holds_bytes(self) -> bool:
        """Whether triggers are to hold a number of bytes."""
        return self.may_evict and self.size is not None and self.size.counts_bytes

    @property
    def observes_mass(self) -> bool:
        """Whether attention mass is kept for each slot."""
        return self.evicts and self.score.needs.mass

    @property
    def variants(self) -> tuple[Term, ...]:
        """The registered parts: everything but the size."""
        return self.score, self.budget, self.when, self.protect, self.evicted


@dataclass(frozen=True)
class PolicyParts:
    """`prefill` and `decode` say what is kept in each phase; codec, position, reader and token pruning are common, and
    `shorten` comes before both."""

    prefill: Stage
    decode: Stage
    codec: CodecPlan
    position: Position
    attend: Reader
    token_pruning: TokenPruning
    shorten: Shorten | None = None

    def stages(self) -> Iterator[tuple[str, Stage]]:
        """Both phases with their names."""
        yield "prefill", self.prefill
        yield "decode", self.decode

    @property
    def keeps_all(self) -> bool:
        """Whether every token keeps a slot in every layer."""
        return not (self.prefill.evicts or self.decode.evicts or self.token_pruning.prunes)

    @cached_property
    def observes_mass(self) -> bool:
        """Whether attention mass is kept for each slot in a phase."""
        return any(stage.observes_mass for _, stage in self.stages())

    @property
    def recall(self) -> PagedRecall | None:
        """How reads recall evicted slots, if a phase offloads them."""
        ways = (stage.evicted.recall for _, stage in self.stages() if stage.evicts)
        return next((way for way in ways if way is not None), None)

    @property
    def variants(self) -> tuple[Term, ...]:
        """Every registered part of the policy, each once, also those that stand inside another."""
        staged = [part for _, stage in self.stages() for part in stage.variants]
        text = () if self.shorten is None else (self.shorten,)
        outer = (*staged, self.position, *self.codec.codecs, self.attend, self.token_pruning, *text)
        return tuple(dict.fromkeys(part for variant in outer for part in nested(variant)))


def default_trigger(phase: str, score: Scorer, size: Size | None) -> Trigger:
    """A bound is a bound: absolute sizes hold while decoding and, for scorers that ask for it, between chunks."""
    is_bound = size is not None and size.is_absolute
    bound, unbound = ("on_overflow", "never") if phase == "decode" else (score.default_prefill_trigger, "after_prefill")
    trigger: Trigger = named(bound if is_bound else unbound)
    return trigger
