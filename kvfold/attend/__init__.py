"""Attention over stored pages and new tokens: prefill passes and decode steps, in plain PyTorch."""
