"""Runs of `kvfold bench`: run them in many processes, keep them under benchmarks/results, compare their policies."""

COMMANDS = ("shards", "keep", "paired", "own_sizes", "page")
