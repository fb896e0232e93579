"""Growing rows: rows behind rows, heads of their own lengths, copies that share until they differ."""

from __future__ import annotations

import torch

from kvfold.pages.host_offload import GrowingRows


def growing_rows() -> GrowingRows:
    return GrowingRows({"x": torch.empty(2, 0, dtype=torch.int32), "y": torch.empty(2, 0, 3)})


def put(found: GrowingRows, head: int, *numbers: int) -> None:
    x = torch.tensor(numbers)
    found.append(head, {"x": x, "y": x.unsqueeze(-1).expand(-1, 3)})


def rows(found: GrowingRows) -> list[list[int]]:
    for head, length in enumerate(found.lens):
        assert torch.equal(found.tensors["x"][head, :length].float(), found.tensors["y"][head, :length, 2])
    return [found.tensors["x"][head, :length].tolist() for head, length in enumerate(found.lens)]


def test_rows_are_appended_head_by_head() -> None:
    found = growing_rows()
    put(found, 0, 1, 2, 3)
    put(found, 1, 9)
    put(found, 0, 4)
    assert rows(found) == [[1, 2, 3, 4], [9]]
    assert found.num_bytes == 2 * found.capacity * (4 + 12)


def test_what_nobody_wrote_is_0() -> None:
    found = growing_rows()
    put(found, 0, 1, 2, 3)
    assert found.tensors["x"][1].tolist() == [0] * found.capacity


def test_copies_share_until_they_differ() -> None:
    """There is room for two more: the copy takes it, so the first has to move when it writes there itself."""
    first = growing_rows()
    put(first, 0, *range(8))
    copy = first.copy()
    assert copy.tensors["x"].data_ptr() == first.tensors["x"].data_ptr()
    put(copy, 0, 100)
    assert copy.tensors["x"].data_ptr() == first.tensors["x"].data_ptr()
    put(first, 0, 200)
    assert copy.tensors["x"].data_ptr() != first.tensors["x"].data_ptr()
    put(copy, 0, 101, 102, 103)
    assert rows(first) == [[*range(8), 200], []]
    assert rows(copy) == [[*range(8), 100, 101, 102, 103], []]


def test_a_copy_of_a_copy_keeps_its_length() -> None:
    first = growing_rows()
    put(first, 1, 1, 2, 3, 4)
    short = first.copy()
    put(first, 1, 5)
    again = short.copy()
    put(again, 1, 6)
    assert (rows(first), rows(short), rows(again)) == ([[], [1, 2, 3, 4, 5]], [[], [1, 2, 3, 4]], [[], [1, 2, 3, 4, 6]])
