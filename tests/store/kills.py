"""Fork a process that writes entries, kill it, look at what is left; many times. Prints how many entries were stored.

python -m tests.store.kills FOLDER TIMES
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import NoReturn

from kvfold.store.entry.format import EntryReader
from kvfold.store.key import Key
from kvfold.store.tiers.disk import DiskTier
from kvfold.store.tiers.eviction import Lease
from tests.store.common import BINDING, make_entry, make_key

LIMIT = 1 << 20
NUM_LAYERS = 20


def write_forever(folder: Path, number: int, pipe: int) -> NoReturn:
    """Tell of every entry that is stored."""
    try:
        tier = DiskTier(folder, LIMIT)
        while True:
            key, lease = make_key(number), Lease(time.time(), 300, 1.0)
            if tier.put(key, make_entry(key, lease, num_layers=NUM_LAYERS), lease):
                os.write(pipe, number.to_bytes(4, "little"))
            number += 1
    finally:
        os._exit(1)


def kill_one(folder: Path, number: int, after_s: float) -> list[int]:
    """What a process said it had stored; it is killed some time after its first word."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        write_forever(folder, number, writer)
    os.close(writer)
    data = os.read(reader, 4)
    time.sleep(after_s)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    while more := os.read(reader, 4096):
        data += more
    os.close(reader)
    return [int.from_bytes(data[i : i + 4], "little") for i in range(0, len(data), 4)]


def check(folder: Path, told: list[int]) -> None:
    """All that was told of is there, and whole, and so is what could not be told any more; then it is deleted."""
    tier = DiskTier(folder, LIMIT)
    found = set(tier.keys())
    assert {make_key(number) for number in told} <= found <= {make_key(n) for n in (*told, told[-1] + 1)}
    assert not list(folder.rglob("*.tmp")) and tier.num_bytes <= LIMIT
    for key in found:
        assert _num_blocks(tier, key) == NUM_LAYERS
        tier.delete(key)
    tier.close()


def _num_blocks(tier: DiskTier, key: Key) -> int:
    file = tier.get(key, 0.0)
    assert file is not None
    with file:
        return len(list(EntryReader(file, key, BINDING).blocks()))


def main(folder: Path, times: int) -> None:
    stored = 0
    for kill in range(times):
        told = kill_one(folder, 1000 * kill, after_s=0.0007 * (kill % 17))
        check(folder, told)
        stored += len(told)
    print(stored)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
