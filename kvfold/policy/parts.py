"""The parts of a policy, a field per axis: what each phase keeps, and what both phases share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from kvfold.policy.codecs import CodecPlan
from kvfold.policy.reader import Reader
from kvfold.policy.registry import Term, nested
from kvfold.policy.stage import Stage

if TYPE_CHECKING:
    from kvfold.position import Position
    from kvfold.token_pruning import TokenPruning


@dataclass(frozen=True)
class PolicyParts:
    """`prefill` and `decode` say what is kept in each phase; codec, position, reader and token pruning are common."""

    prefill: Stage
    decode: Stage
    codec: CodecPlan
    position: Position
    attend: Reader
    token_pruning: TokenPruning

    def stages(self) -> Iterator[tuple[str, Stage]]:
        """Both phases with their names."""
        yield "prefill", self.prefill
        yield "decode", self.decode

    @cached_property
    def observes_mass(self) -> bool:
        """Whether attention mass is kept for each slot in a phase."""
        return any(stage.observes_mass for _, stage in self.stages())

    @property
    def variants(self) -> tuple[Term, ...]:
        """Every registered part of the policy, each once, also those that stand inside another."""
        staged = [part for _, stage in self.stages() for part in stage.variants]
        outer = (*staged, self.position, *self.codec.codecs, self.attend, self.token_pruning)
        return tuple(dict.fromkeys(part for variant in outer for part in nested(variant)))
