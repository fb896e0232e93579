"""The prompt cache: breakpoints, lookup, usage and why a prefix missed."""
