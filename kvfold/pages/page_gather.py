"""Page table of one layer for sparse readers (Quest, RocketKV), and a gather of the codes of selected units.

Pages are numbered run after run, used or not. Runs lie in different places of memory, so a gather reads back once per
layer how many units come from each run.

    H KV heads   M pages of the longest head   U units of it, slots of a page in a row   N units picked
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from kvfold.codec.base import SIDES, Field, Side
from kvfold.pages.extent import Codes, Run
from kvfold.pages.layer import LayerPages
from kvfold.pages.layout import SUMMARY, PageClass


@dataclass(frozen=True)
class PageList:
    """`number_HM` and `used_HM`: the pages of each head, oldest first, and the slots in each; 0 where there is none."""

    page_class: PageClass
    runs: tuple[Run, ...]
    number_HM: Tensor  # int32
    used_HM: Tensor  # int32

    @classmethod
    def of(cls, parts: Sequence[LayerPages]) -> PageList:
        """The pages of one layer over all segments."""
        page_class, device = parts[-1].page_class, None
        runs = tuple(run for part in parts for run in part.runs())
        number: list[list[Tensor]] = [[torch.empty(0, dtype=torch.int32)] for _ in range(parts[-1].num_heads)]
        used: list[list[Tensor]] = [[torch.empty(0, dtype=torch.int32)] for _ in range(parts[-1].num_heads)]
        for run, begin in zip(runs, accumulate((run.num_pages for run in runs), initial=0), strict=False):
            device = run.extents[0].span.arena.device
            for head, start, length in zip(run.heads, run.starts, run.lens, strict=True):
                page = torch.arange(page_class.pages_for(length), dtype=torch.int32)
                number[head].append(begin + start // page_class.page_size + page)
                used[head].append((length - page * page_class.page_size).clamp(max=page_class.page_size))
        return cls(page_class, runs, _stacked(number).to(device), _stacked(used).to(device))

    def covers(self, parts: Sequence[LayerPages]) -> bool:
        """Whether nothing changed: runs are made anew whenever slots do."""
        now = [run for part in parts for run in part.runs()]
        return len(now) == len(self.runs) and all(a is b for a, b in zip(now, self.runs, strict=True))

    @property
    def num_pages(self) -> int:
        """M."""
        return self.number_HM.shape[1]

    @property
    def num_bytes(self) -> int:
        return self.number_HM.nbytes + self.used_HM.nbytes

    @cached_property
    def _ends(self) -> Tensor:
        """The number after the last page of each run."""
        return torch.tensor(list(accumulate(run.num_pages for run in self.runs)), device=self.number_HM.device)

    def used_HU(self, unit: int) -> Tensor:
        """Slots in each unit."""
        start = torch.arange(0, self.page_class.page_size, unit, device=self.used_HM.device)
        return (self.used_HM.unsqueeze(-1) - start).clamp(0, unit).flatten(1)

    def number_HU(self, unit: int) -> Tensor:
        """Units by number, as pages are."""
        per_page = self.page_class.page_size // unit
        within = torch.arange(per_page, device=self.number_HM.device)
        return (self.number_HM.unsqueeze(-1) * per_page + within).flatten(1)

    def read(self, name: str) -> Tensor:
        """A summary of every page, with all its slots' where they have their own: [H, M, elements of a page]."""
        (item,) = (item for item in self.page_class.summaries if item.name == f"{SUMMARY}{name}")
        rows = [run.by_page(item) for run in self.runs]
        flat = rows[0] if len(rows) == 1 else torch.cat(rows)
        return flat.index_select(0, self.number_HM.flatten()).view(*self.number_HM.shape, -1)

    def codes(self, number_N: Tensor, unit: int) -> dict[Side, Codes]:
        """Both sides of units, in the order of their numbers given."""
        found: dict[Side, Codes] = {"k": {}, "v": {}}
        per_page = self.page_class.page_size // unit
        pick = _Pick.of(number_N, self._ends * per_page) if len(self.runs) > 1 else None
        for side in SIDES:
            for item in self.page_class.fields:
                if item.name.startswith(f"{side}."):
                    if pick is None:
                        rows = _by_unit(self.runs[0], item, per_page).index_select(0, number_N)
                    else:
                        rows = pick.rows(self.runs, item, per_page)
                    found[side][item.name[2:]] = rows.view(-1, item.width)
        return found


@dataclass(frozen=True)
class _Pick:
    """Units to gather from each run, and the permutation back to the order given."""

    units: list[Tensor]  # within its run
    back_N: Tensor

    @classmethod
    def of(cls, number_N: Tensor, ends: Tensor) -> _Pick:
        sorted_N, order_N = number_N.sort()
        stops = [0, *torch.searchsorted(sorted_N, ends.to(sorted_N.dtype)).tolist()]
        starts = torch.cat((ends.new_zeros(1), ends[:-1])).to(sorted_N.dtype)
        units = [sorted_N[a:b] - start for (a, b), start in zip(pairwise(stops), starts, strict=True)]
        return cls(units, order_N.argsort())

    def rows(self, runs: Sequence[Run], item: Field, per_page: int) -> Tensor:
        each = zip(runs, self.units, strict=True)
        found = [_by_unit(run, item, per_page).index_select(0, unit) for run, unit in each]
        return torch.cat(found).index_select(0, self.back_N)


def _by_unit(run: Run, item: Field, per_page: int) -> Tensor:
    """A field of every unit of the run: [units, elements of a unit]."""
    return run.by_page(item).view(run.num_pages * per_page, -1)


def _stacked(heads: Sequence[Sequence[Tensor]]) -> Tensor:
    return pad_sequence([torch.cat(list(parts)) for parts in heads], batch_first=True)
