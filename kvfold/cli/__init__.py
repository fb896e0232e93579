"""The command line: one file per command, each with `add_parser(subparsers)` and `run(args) -> exit code`."""
