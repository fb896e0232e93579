"""Files that were altered, cut, swapped, or are somebody else's: a counted miss, a quarantine, never a wrong token."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvfold.models.loader import Model
from kvfold.store import DiskTier, HostTier, PrefixStore, Quarantine
from kvfold.testing.prefix_reuse import prefill_reusing
from tests.engine.runs import Shared
from tests.store.common import CHUNK, cold_logits, entry_files, make_key, make_prefixes, make_runner, overwrite
from tests.tiny import prompt, ready

TOKENS, END = prompt(4 * CHUNK + 3), 4 * CHUNK + 2
SNAPSHOT, MARKER = prompt(150, seed=3), 100
POLICY = "knorm + 2x + int8"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def written(model: Model, folder: Path) -> Path:
    """Four chunks of a prompt on the disk, and the part behind them up to a marker."""
    with open_store(folder) as store:
        prefill_reusing(make_runner(model), make_prefixes(store, model), TOKENS, markers=[END]).sequence.release()
    assert len(entry_files(folder)) == 5
    return folder


def open_store(folder: Path) -> PrefixStore:
    return PrefixStore([DiskTier(folder, 1 << 24)], chunk_len=CHUNK, quarantine=Quarantine(folder / "quarantine"))


def file_of(folder: Path, start: int) -> Path:
    (found,) = [path for path in entry_files(folder) if path.name.startswith(f"{start:x}-")]
    return found


def run(model: Model, folder: Path) -> tuple[int, Tensor, dict[str, int]]:
    with open_store(folder) as store:
        found = prefill_reusing(make_runner(model), make_prefixes(store, model), TOKENS, markers=[END])
        found.sequence.release()
        return found.matched_tokens, found.logits_V, store.counters()


def flipped(data: bytes, position: int, generator: random.Random) -> bytes:
    return data[:position] + bytes([data[position] ^ generator.randrange(1, 256)]) + data[position + 1 :]


def positions_by_kind(data: bytes, generator: random.Random) -> Iterator[int]:
    """Of the magic, revision, life, length, worth, header, digest, and blocks: some of each."""
    header_end = 28 + int.from_bytes(data[16:20], "little")
    bounds = (0, 8, 10, 16, 20, 28, header_end, header_end + 32, header_end + 200, len(data))
    for begin, end in pairwise(bounds):
        yield from (generator.randrange(begin, end) for _ in range(3))


@pytest.mark.parametrize("start", [2 * CHUNK, 4 * CHUNK])
def test_flipped_bytes_of_every_kind_are_a_miss(model: Model, written: Path, start: int) -> None:
    """Chunks before the bad one are used; the bad one is set aside and written again."""
    generator, cold = random.Random(0), cold_logits(model, TOKENS, [END])
    good = file_of(written, start).read_bytes()
    for position in positions_by_kind(good, generator):
        overwrite(file_of(written, start), flipped(good, position, generator))
        matched, logits, counters = run(model, written)
        assert matched == start and torch.equal(logits, cold), position
        assert sum(count for name, count in counters.items() if name.startswith("quarantined.disk")) == 1
        assert file_of(written, start).read_bytes() == good
    assert len(list((written / "quarantine").glob("*.kvp"))) == 1


@pytest.mark.parametrize("length", [0, 1, 27, 28, 300, -1])
@pytest.mark.parametrize("start", [CHUNK, 4 * CHUNK])
def test_truncated_files_are_a_miss(model: Model, written: Path, length: int, start: int) -> None:
    path = file_of(written, start)
    overwrite(path, path.read_bytes()[:length])
    matched, logits, counters = run(model, written)
    assert matched == start and torch.equal(logits, cold_logits(model, TOKENS, [END]))
    assert counters.get("quarantined.disk.truncated", 0) + counters.get("quarantined.disk.foreign", 0) == 1
    (note,) = (written / "quarantine").glob("*.txt")
    assert "a cached prefix is" in note.read_text()


@pytest.mark.parametrize("start", [2 * CHUNK, 4 * CHUNK])
def test_swapped_entries_are_a_miss(model: Model, written: Path, start: int) -> None:
    first, second = file_of(written, CHUNK), file_of(written, start)
    a, b = first.read_bytes(), second.read_bytes()
    overwrite(first, b)
    overwrite(second, a)
    matched, logits, counters = run(model, written)
    assert matched == CHUNK and torch.equal(logits, cold_logits(model, TOKENS, [END]))
    assert counters["quarantined.disk.swapped"] == 1


def test_files_of_another_model_under_this_ones_names_are_a_miss(model: Model, written: Path, tmp_path: Path) -> None:
    """Somebody copied the folder of another model over this one's."""
    other, theirs = ready("llama", seed=5), tmp_path / "theirs"
    with open_store(theirs) as store:
        prefill_reusing(make_runner(other), make_prefixes(store, other), TOKENS, markers=[END]).sequence.release()
    for start in range(0, END, CHUNK):
        overwrite(file_of(written, start), file_of(theirs, start).read_bytes())
    matched, logits, counters = run(model, written)
    assert matched == 0 and torch.equal(logits, cold_logits(model, TOKENS, [END]))
    assert counters["quarantined.disk.swapped"] == 1


@pytest.mark.parametrize("start", [CHUNK, 4 * CHUNK])
def test_a_bad_copy_is_replaced_by_one_of_a_slower_tier(model: Model, folder: Path, written: Path, start: int) -> None:
    path = file_of(written, start)
    good = path.read_bytes()
    host = HostTier(1 << 24)
    with PrefixStore([host, DiskTier(folder, 1 << 24)], chunk_len=CHUNK) as store:
        prefixes = make_prefixes(store, model)
        for copied in range(2):
            hit = prefixes.lookup(TOKENS, markers=[END])
            hit.sequence.release()
            assert hit.matched_tokens == END
            assert store.flush()
            if not copied:
                _spoil(host, good)
        assert store.counters()["quarantined.host.corrupt"] == 1 and hit.tier == "disk"


def _spoil(host: HostTier, good: bytes) -> None:
    (key,) = [key for key, data in host._data.items() if data == good]
    host._data[key] = good[:-1] + bytes([good[-1] ^ 1])


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_flipped_bytes_of_snapshots_are_a_miss(shared: Shared, family: str, folder: Path) -> None:
    model, generator, expected = shared(family), random.Random(1), list[Tensor]()
    for _ in range(12):
        with open_store(folder) as store:
            prefixes = make_prefixes(store, model, POLICY)
            found = prefill_reusing(make_runner(model), prefixes, SNAPSHOT, markers=[MARKER])
            found.sequence.release()
            expected.append(found.logits_V)
            assert found.matched_tokens == 0 and torch.equal(found.logits_V, expected[0])
            reasons = [name for name in store.counters() if name.startswith("quarantined.disk")]
            assert len(reasons) == (len(expected) > 1)
        (path,) = entry_files(folder)
        data = path.read_bytes()
        overwrite(path, flipped(data, generator.randrange(len(data)), generator))


def test_quarantine_is_bounded(tmp_path: Path) -> None:
    quarantine = Quarantine(tmp_path, limit_bytes=1000)
    for number in range(9):
        quarantine.keep(make_key(number), bytes(300), "why")
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 1000
    assert (tmp_path / f"{make_key(8).text}.kvp").stat().st_size == 300
    quarantine.keep(make_key(9), bytes(2000), "too large to keep")
    assert [path.name for path in tmp_path.iterdir()] == [f"{make_key(9).text}.txt"]
