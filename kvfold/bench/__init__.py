"""The benchmark: workloads, byte-matched policies, runs, statistics and reports."""
