"""What the command sets for its process before PyTorch is loaded."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

CODE = """
import os, sys
from kvfold.cli.process import set_up_process
set_up_process()
assert "torch" not in sys.modules
print(os.environ.get("GOMP_SPINCOUNT"))
"""


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, "None")],
    ids=["default", "count", "policy"],
)
def test_idle_threads_sleep_soon_unless_the_environment_says_otherwise(given: dict[str, str], expected: str) -> None:
    known = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    done = subprocess.run([sys.executable, "-c", CODE], env={**known, **given}, capture_output=True, text=True)
    assert done.stdout.strip() == expected, done.stderr


FAULTS = """
import resource, sys
from threading import Thread
from kvfold.cli.process import set_up_process
if sys.argv[1] == "set":
    set_up_process()
import numpy as np

def use():
    for _ in range(20):
        [np.ones(20 << 20, np.uint8) for _ in range(4)]

def faults():
    thread = Thread(target=use)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    thread.start()
    thread.join()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults()
print(faults())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc")
def test_large_blocks_of_a_new_thread_are_not_faulted_in_again() -> None:
    words = [sys.executable, "-c", FAULTS]
    found = [
        int(subprocess.run([*words, how], capture_output=True, text=True, check=True).stdout) for how in ("set", "")
    ]
    assert found[0] < 1000 < found[1] // 4, "four blocks are 20,480 pages"
