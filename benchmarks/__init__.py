"""Benchmarks of the repository; README.md beside this file lists them."""
