"""Other libraries' caches on kvfold's prompts: the same tokens in, rows of the same kind out (docs/peers.md)."""
