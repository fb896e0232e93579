"""What a stored prefix is as bytes: header, blocks, digests, and the encodings of its tensors."""
