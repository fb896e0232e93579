"""Other libraries' caches on kvfold's prompts: same tokens in, same kind of rows out (docs/research/peers.md)."""
