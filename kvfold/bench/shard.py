"""Shards of a run, so that several processes divide it without communication.

    shard 1/4 takes items 1, 5, 9, …

Tasks, streams and difficulty alternate along the items, so the shards of a run take about equally long.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from kvfold.errors import InputError


@dataclass(frozen=True)
class Shard:
    index: int = 0
    num_shards: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.num_shards:
            raise InputError(f"shard {self} does not exist; shards of {self.num_shards} are 0 to {self.num_shards - 1}")

    @classmethod
    def parse(cls, text: str) -> Shard:
        """ "3/12": the share 3 of 12, counted from 0."""
        match = re.fullmatch(r"(\d+)/(\d+)", text)
        if match is None:
            raise InputError(f'"{text}" is no shard; write I/N, for example 0/8 for the first of eight')
        return cls(int(match[1]), int(match[2]))

    def takes(self, item: int) -> bool:
        return item % self.num_shards == self.index

    def __str__(self) -> str:
        return f"{self.index}/{self.num_shards}"
