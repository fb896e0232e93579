"""The workloads of the benchmark, a file each; `workloads()` lists them and `find(name)` gives one."""

from kvfold.bench.workloads.base import Sample, Setting, Workload, find, workload, workloads

__all__ = ["Sample", "Setting", "Workload", "find", "workload", "workloads"]
