"""A prefix store in a process of its own, for the suite of faults: JSON commands on stdin, answers on stdout.

python -m tests.store.fault_process FOLDER SECRET [REDIS]
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvfold.store import DiskTier, PrefixStore, Quarantine, RedisTier
from kvfold.store.tiers.shared_disk import SharedDiskTier
from kvfold.testing.prefix_reuse import prefill_reusing
from tests.store.common import CHUNK, make_prefixes, make_runner
from tests.tiny import prompt, ready

NUM_CHUNKS = 3
LIMIT = 1 << 28  # more than the disk has


class StoreProcess:
    """The test's end; RuntimeError when the process has ended."""

    def __init__(self, folder: Path, secret: bytes, redis: str | None, variables: Mapping[str, str]) -> None:
        words = [
            sys.executable,
            "-m",
            "tests.store.fault_process",
            str(folder),
            secret.decode(),
            *filter(None, [redis]),
        ]
        self.process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=dict(variables)
        )

    def tell(self, number: int | None) -> Any:
        """The answer to a prompt, or to None the store's counters."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{json.dumps(number)}\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError("the process ended")
        return json.loads(line)

    def stop(self) -> None:
        self.process.communicate()


def main(folder: Path, secret: bytes, redis: str | None) -> None:
    """With Redis the folder is shared, too."""
    tiers = [DiskTier(folder, LIMIT)] if redis is None else [SharedDiskTier(folder, LIMIT), RedisTier(redis)]
    model, quarantine = ready(), Quarantine(folder / "quarantine")
    with PrefixStore(tiers, chunk_len=CHUNK, quarantine=quarantine, secret=secret) as store:
        prefixes = make_prefixes(store, model)
        for line in sys.stdin:
            number = json.loads(line)
            if number is None:
                print(json.dumps(store.counters()), flush=True)
                continue
            found = prefill_reusing(make_runner(model), prefixes, prompt(NUM_CHUNKS * CHUNK + 1, seed=number))
            found.sequence.release()
            store.flush()
            print(json.dumps([found.logits_V.tolist(), found.matched_tokens]), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2].encode(), sys.argv[3] if len(sys.argv) > 3 else None)
