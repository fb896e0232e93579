"""Cache of byte-matched sizes: the size of every policy in every memory budget, searched once per run (RUN/sizes.json).

A size is searched on sample 0 of each task, length and mode, whatever shard a process runs, so that all shards agree.
The size found at one place, the anchor, is tried first at the others: one forward tells whether it fits, and usually it
does. 1 % of the budget is left to samples that take more than the first; rows record what they took. In the memory
"own" nothing is searched: a policy runs as it is written. A policy that shortens is searched on the shortened sample,
for the same bytes: a share of the full cache of the original.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from kvfold.atomic_io import write_whole
from kvfold.bench.byte_matching import evicts_nothing, has_own_size, match_many, needs_size
from kvfold.bench.plan import Shard
from kvfold.bench.record import OUT_OF_MEMORY, OWN, TOO_SMALL, Mode
from kvfold.bench.shortened import cache_policy, shorten_plan
from kvfold.bench.size_search import Guess, Matched
from kvfold.core import ModelSpec
from kvfold.engine.runner import Runner
from kvfold.errors import InputError, OutOfPages, PolicyError, SizeError
from kvfold.models.check import check_policy
from kvfold.policy.policy import Policy

FULL, WHOLE = "full", "100%"
_HEADROOM = 0.01  # of the memory, for samples that take more than the first
_SLACK = 0.02  # of it, that a search may leave
_LEFT = 0.03  # of what a size took at the anchor, that it may take less elsewhere


class SearchedTokens(NamedTuple):
    """The tokens that a size is searched on, or a note why there are none."""

    ids: Sequence[int]
    num_original: int  # before shortening
    note: str = ""


_Tokens = Callable[[str], SearchedTokens]  # of a policy


class Place(NamedTuple):
    """What a size is valid for."""

    workload: str
    task: str
    length: int
    mode: Mode


class Cell(NamedTuple):
    """A column of the benchmark."""

    policy: str
    memory: str

    @property
    def as_written(self) -> bool:
        """Whether the policy runs as it is written, without a searched size."""
        return self.memory == OWN or evicts_nothing(self.policy)

    def check(self, spec: ModelSpec) -> None:
        """PolicyError if this model cannot run the policy, whatever its size."""
        check_policy(Policy.parse(self.policy if self.as_written else f"{self.policy} + 1x"), spec)


@dataclass(frozen=True)
class SizedPolicy:
    """The policy to run, or a note why there is none; `share`: its bytes on sample 0 over the full cache's, 1 where
    nothing was searched."""

    workload: str
    task: str
    length: int
    mode: Mode
    policy: str
    memory: str
    resolved: str
    note: str
    share: float


def share_of(memory: str) -> float:
    """ "12.5%" -> 0.125"""
    try:
        share = float(memory.removesuffix("%")) / 100 if memory.endswith("%") else 0.0
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise InputError(
            f'memory "{memory}" is no share of the full cache; write for example 12.5%, at most 100%, or {OWN} for '
            f"policies as they are written"
        )
    return share


def cells(policies: Sequence[str], memories: Sequence[str]) -> list[Cell]:
    """The full cache once, and every other policy in the memories it can run in."""
    others = [policy for policy in policies if policy != FULL]
    return [
        Cell(FULL, WHOLE),
        *(Cell(policy, memory) for policy in others for memory in _memories_of(policy, memories)),
    ]


def _memories_of(policy: str, memories: Sequence[str]) -> list[str]:
    """Below 100 % if a size is searched, OWN if the policy has one, all if nothing is evicted."""
    shares = {memory: share_of(memory) for memory in memories if memory != OWN}
    if needs_size(policy):
        return [memory for memory, share in shares.items() if share < 1]
    if not has_own_size(policy):
        return list(memories)
    if OWN not in memories:
        raise PolicyError(f'policy "{policy}" has a size of its own; leave it out, or add {OWN} to the memories')
    return [OWN]


class SizeCache:
    """Sizes of one run, in RUN/sizes.json; `known`: such a file of another shard or run, to start from."""

    def __init__(self, path: Path, runner: Runner, wanted: Sequence[Cell], known: Path | None = None) -> None:
        self.path = path
        self.runner = runner
        self.written = [cell for cell in wanted if cell.policy == FULL or cell.memory == OWN]
        self.wanted = [cell for cell in wanted if cell not in self.written]
        self._found: dict[tuple[Place, Cell], SizedPolicy] = {}
        if known is not None and not known.is_file():
            raise InputError(f"{known} is no file of sizes; name the sizes.json of a run")
        for sized in [*(_read(known) if known is not None else []), *_read(path)]:
            self._add(sized)
        self._write()

    def take(self, shard: Shard) -> None:
        """Search the sizes of a shard's policies only. Searches are independent, so shards find the same sizes as one
        process."""
        policies = list(dict.fromkeys(cell.policy for cell in self.wanted))
        self.wanted = [cell for cell in self.wanted if shard.takes(policies.index(cell.policy))]

    def at(self, place: Place, tokens: _Tokens, anchor: Place | None = None) -> dict[Cell, SizedPolicy]:
        """The size of every cell at this place; `tokens`, of sample 0, is called if one has to be searched."""
        missing: dict[object, list[Cell]] = {}
        for cell in self.wanted:
            if (place, cell) not in self._found:
                missing.setdefault(shorten_plan(cell.policy), []).append(cell)
        for alike in missing.values():
            for sized in self._search(place, alike, tokens(alike[0].policy), anchor):
                self._add(sized)
        if missing:
            self._write()
        written = {cell: SizedPolicy(*place, *cell, cell.policy, "", 1.0) for cell in self.written}
        return written | {cell: self._found[place, cell] for cell in self.wanted}

    def _write(self) -> None:
        write_whole(self.path, json.dumps([asdict(sized) for sized in self._found.values()], indent=1) + "\n")

    def _add(self, sized: SizedPolicy) -> None:
        place = Place(sized.workload, sized.task, sized.length, sized.mode)
        self._found[place, Cell(sized.policy, sized.memory)] = sized

    def _search(
        self, place: Place, missing: Sequence[Cell], tokens: SearchedTokens, anchor: Place | None
    ) -> list[SizedPolicy]:
        """Of cells that read the same tokens."""
        if tokens.note:
            return [SizedPolicy(*place, *cell, "", tokens.note, 0.0) for cell in missing]
        full_bytes = self.runner.spec.full_bytes(tokens.num_original)
        guesses = [_guess(cell, self._found.get((anchor, cell)) if anchor else None, full_bytes) for cell in missing]
        wanted = [(cache_policy(cell.policy), _share(cell)) for cell in missing]
        num_original = tokens.num_original
        try:
            matches = match_many(
                self.runner, wanted, tokens.ids, slack=_SLACK, guesses=guesses, num_original=num_original
            )
        except (OutOfPages, torch.OutOfMemoryError):
            return [SizedPolicy(*place, *cell, "", OUT_OF_MEMORY, 0.0) for cell in missing]
        return [_sized(place, cell, match) for cell, match in zip(missing, matches, strict=True)]


def _guess(cell: Cell, there: SizedPolicy | None, full_bytes: int) -> Guess | None:
    """What was found at the anchor is good here too if it fits, and leaves little more than it did there."""
    if there is None or cell.as_written or not there.resolved:
        return None
    least_bytes = math.ceil(there.share * (1 - _LEFT) * full_bytes)
    return Guess(cache_policy(there.resolved), least_bytes, math.floor(share_of(cell.memory) * full_bytes))


def _share(cell: Cell) -> float:
    """Of a policy that evicts nothing there is but one size: it may fill its memory."""
    share = share_of(cell.memory)
    return share if cell.as_written else share * (1 - _HEADROOM)


def _sized(place: Place, cell: Cell, found: Matched | SizeError) -> SizedPolicy:
    """What cannot be made smaller is named all the same."""
    if isinstance(found, SizeError):
        return SizedPolicy(*place, *cell, cell.policy if cell.as_written else "", TOO_SMALL, 0.0)
    size = found.policy.removeprefix(cache_policy(cell.policy))
    return SizedPolicy(*place, *cell, cell.policy + size, "", round(found.share, 5))


def _read(path: Path) -> list[SizedPolicy]:
    if not path.exists():
        return []
    try:
        return [SizedPolicy(**found) for found in json.loads(path.read_text(encoding="utf-8"))]
    except (ValueError, TypeError) as error:
        raise InputError(f"{path} holds no sizes of a run ({error}); remove it and run again") from None
