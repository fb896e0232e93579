"""`python -m kvfold`: the same as the command `kvfold`."""

from __future__ import annotations

import sys

from kvfold.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
