"""Decode steps captured as CUDA graphs: host planning of batch slots, block tables and split-KV tasks."""
