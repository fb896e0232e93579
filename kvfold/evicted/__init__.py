"""What becomes of evicted slots."""
