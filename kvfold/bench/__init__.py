"""Workloads, the sweep that runs policies over them, and the tables they end in."""
