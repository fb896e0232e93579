"""Paged KV cache: the arena (block pool), pages and page tables, shared segments (copy-on-write), the open block."""
