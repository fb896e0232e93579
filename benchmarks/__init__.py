"""Thin scripts, one per question; results are appended under results/, never overwritten."""
