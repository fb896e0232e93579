"""Streams on a tiny model: rotations, losses that are the model's own, constant memory, and everything given back."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from benchmarks.stream_blocks import RUNS, Block, Run, host_bytes, read_blocks, rotations
from kvfold.errors import InputError
from kvfold.models.loader import Model
from tests.tiny import build, prompt

BLOCK_LEN = 160
SMALL = {
    "stream": Run("streaming + 96tok + slot + between_chunks(chunk=64)"),
    "control": Run("streaming + 96tok + slot + between_chunks(chunk=64)", fresh=True),
    "whole": Run("full", fresh=True),
}


@pytest.fixture(autouse=True)
def _small_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, run in SMALL.items():
        monkeypatch.setitem(RUNS, name, run)


def _read(model: Model, name: str, tokens: Sequence[int]) -> list[Block]:
    return list(read_blocks(model, name, 5, tokens, BLOCK_LEN))


def test_rotations_start_at_even_steps_and_go_round() -> None:
    found = rotations(range(10), 4, 12)
    assert [stream[0] for stream in found] == [0, 2, 5, 7]
    assert found[2] == [5, 6, 7, 8, 9, 0, 1, 2, 3, 4, 5, 6]


def test_a_block_of_all_rotations_is_the_whole_text() -> None:
    """With as many streams as blocks of the text, every block index sees every token once."""
    streams = rotations(range(40), 4, 40)
    for begin in range(0, 40, 10):
        assert sorted(token for stream in streams for token in stream[begin : begin + 10]) == list(range(40))


@pytest.mark.parametrize(("tokens", "num_streams"), (([], 2), ([1, 2], 0)))
def test_no_text_or_no_streams_are_refused(tokens: list[int], num_streams: int) -> None:
    with pytest.raises(InputError, match="at least one stream"):
        rotations(tokens, num_streams, 10)


def test_losses_are_those_of_the_unmodified_model(model: Model) -> None:
    tokens = prompt(2 * BLOCK_LEN)
    found = _read(model, "whole", tokens)
    for block, begin in zip(found, (0, BLOCK_LEN), strict=True):
        ids = torch.tensor([tokens[begin : begin + BLOCK_LEN]])
        with torch.inference_mode():
            loss = build()(input_ids=ids, labels=ids).loss.item()
        assert block.log_loss == pytest.approx(loss, rel=1e-5)


def test_blocks_say_where_they_stand_and_memory_stays(model: Model) -> None:
    found = _read(model, "stream", prompt(4 * BLOCK_LEN))
    assert [(block.run, block.stream, block.block, block.end) for block in found] == [
        ("stream", 5, index, (index + 1) * BLOCK_LEN) for index in range(4)
    ]
    assert len({block.arena_bytes for block in found}) == len({block.resident_bytes for block in found}) == 1
    assert found[0].arena_bytes > 0 and found[0].cuda_bytes is None and (found[0].host_bytes or 1) > 0
    assert model.arena.used_bytes == 0


def test_the_control_forgets_and_the_stream_does_not(model: Model) -> None:
    tokens = prompt(2 * BLOCK_LEN)
    stream, control = _read(model, "stream", tokens), _read(model, "control", tokens)
    alone = _read(model, "stream", tokens[BLOCK_LEN:])
    assert stream[0].log_loss == control[0].log_loss
    assert control[1].log_loss == alone[0].log_loss != stream[1].log_loss


def test_memory_is_given_back_when_reading_stops(model: Model) -> None:
    blocks = read_blocks(model, "stream", 0, prompt(2 * BLOCK_LEN), BLOCK_LEN)
    next(blocks)
    assert model.arena.used_bytes > 0
    blocks.close()  # type: ignore[attr-defined]
    assert model.arena.used_bytes == 0


@pytest.mark.parametrize(("num_tokens", "block_len"), ((100, 30), (0, 10), (5, 1)))
def test_parts_of_blocks_are_refused(model: Model, num_tokens: int, block_len: int) -> None:
    with pytest.raises(InputError, match="no whole blocks"):
        next(read_blocks(model, "stream", 0, [1] * num_tokens, block_len))


def test_host_bytes_grow_with_what_is_held() -> None:
    before = host_bytes()
    if before is None:
        pytest.skip("this system does not tell the resident set")
    held = torch.ones(64 * 2**20, dtype=torch.uint8)
    after = host_bytes()
    assert after is not None and after - before > held.nbytes // 2
