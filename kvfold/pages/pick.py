"""All pages of one layer as one list, and codes of some of them: how a reader that chooses sees storage.

Pages are numbered run after run, used or not. Runs lie in different places of memory, so picking pages asks the device
once per layer how many come from each run.

    H KV heads   M pages of the longest head   N pages picked
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from kvfold.codec.base import Field, Side
from kvfold.pages.layer import LayerPages
from kvfold.pages.layout import SUMMARY, PageClass
from kvfold.pages.run import Codes, Run


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

    def read(self, name: str, element_HC: Tensor | None = None) -> Tensor:
        """A summary of every page [H, M, width]; of each head these elements alone, [H, M, C], if they are given."""
        (item,) = (item for item in self.page_class.summaries if item.name == f"{SUMMARY}{name}")
        if element_HC is None:
            rows = [run.by_page(item) for run in self.runs]
        else:
            rows = [part for run in self.runs for part in _elements(run, item, element_HC)]
        flat = rows[0] if len(rows) == 1 else torch.cat(rows)
        return flat.index_select(0, self.number_HM.flatten()).view(*self.number_HM.shape, -1)

    def codes(self, number_N: Tensor) -> dict[Side, Codes]:
        """Both sides of whole pages, in the order of their numbers given."""
        found: dict[Side, Codes] = {"k": {}, "v": {}}
        sides: tuple[Side, ...] = ("k", "v")
        pick = _Pick.of(number_N, self._ends) if len(self.runs) > 1 else None
        for side in sides:
            for item in self.page_class.fields:
                if item.name.startswith(f"{side}."):
                    rows = self._rows(item, number_N) if pick is None else pick.rows(self.runs, item)
                    found[side][item.name[2:]] = rows.view(-1, item.width)
        return found

    def _rows(self, item: Field, number_N: Tensor) -> Tensor:
        return self.runs[0].by_page(item).index_select(0, number_N)


@dataclass(frozen=True)
class _Pick:
    """Pages wanted of each run, and the way back to the order they were asked for in."""

    pages: list[Tensor]  # within its run
    back_N: Tensor

    @classmethod
    def of(cls, number_N: Tensor, ends: Tensor) -> _Pick:
        sorted_N, order_N = number_N.sort()
        stops = [0, *torch.searchsorted(sorted_N, ends.to(sorted_N.dtype)).tolist()]
        starts = torch.cat((ends.new_zeros(1), ends[:-1])).to(sorted_N.dtype)
        pages = [sorted_N[a:b] - start for (a, b), start in zip(pairwise(stops), starts, strict=True)]
        return cls(pages, order_N.argsort())

    def rows(self, runs: Sequence[Run], item: Field) -> Tensor:
        found = [run.by_page(item).index_select(0, page) for run, page in zip(runs, self.pages, strict=True)]
        return torch.cat(found).index_select(0, self.back_N)


def _elements(run: Run, item: Field, element_HC: Tensor) -> Iterator[Tensor]:
    """Of every page of the run, extent by extent, what its head asks for."""
    by_extent = run.by_page(item).split([extent.num_pages for extent in run.extents])
    for head, rows in zip(run.heads, by_extent, strict=True):
        yield rows.index_select(1, element_HC[head])


def _stacked(heads: Sequence[Sequence[Tensor]]) -> Tensor:
    return pad_sequence([torch.cat(list(parts)) for parts in heads], batch_first=True)
