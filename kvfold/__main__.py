"""The command `kvfold`, also as `python -m kvfold`; Ctrl-C is one line from the first import on."""

from __future__ import annotations

import sys


def main() -> int:
    """Run the command line; returns the exit code."""
    try:
        from kvfold.cli.process import set_up_process

        set_up_process()
        from kvfold.cli.main import main as run

        return run()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
