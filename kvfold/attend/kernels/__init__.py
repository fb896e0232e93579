"""Decode attention over pages for GPUs, with torch twins of every kernel; triton is imported by kernel files alone."""
