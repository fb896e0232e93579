"""`kvfold serve --engine URL`: the vendors' APIs in front of a vLLM server, which computes the replies."""
