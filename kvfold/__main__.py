"""The command `kvfold`, also as `python -m kvfold`; Ctrl-C is one line from the first import on."""

from __future__ import annotations

import os
import sys


def main() -> int:
    """Run the command line; returns the exit code."""
    if "OMP_WAIT_POLICY" not in os.environ:  # before PyTorch: its idle threads sleep after 0.1 ms, not 20, since
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # kernels run in other threads next (cpu_threads.py)
    try:
        from kvfold.cli.main import main as run

        return run()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
