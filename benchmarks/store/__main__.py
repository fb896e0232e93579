import sys

from benchmarks.commands import run_command

sys.exit(run_command(str(__package__), sys.argv[1:]))
