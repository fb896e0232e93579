"""Writing slots to pages on a GPU: one launch encodes what a sequence, or many, seal."""
